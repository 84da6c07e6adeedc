"""RL post-training of language models on JAX, for one policy or several."""
