"""Eight emulated CPU devices, rank promotion refused, shapes checked."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
_FLAG = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}"

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_rank_promotion", "raise")
install_import_hook("mrl_jax", "beartype.beartype")
