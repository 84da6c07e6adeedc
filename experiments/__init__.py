"""Commands, studies and assets built on mrl_jax."""
