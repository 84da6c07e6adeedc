"""Keys and values of a generation: the prompts' once, then the rows' own.

The prompt part is shared by the G samples of a prompt and never copied; the
completion part starts small and is grown by the sampler, so that attention
covers what has been generated and not the limit.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Cache(NamedTuple):
  """What `decode` attends to."""

  prompt_keys: Float[Array, "L N K P h"]
  prompt_values: Float[Array, "L N K P h"]
  prompt_lengths: Int[Array, "N"]
  keys: Float[Array, "L B K C h"]
  values: Float[Array, "L B K C h"]
  step: Int[Array, ""]  # completion tokens written so far


def grow(cache: Cache, capacity: int) -> Cache:
  """The cache with room for `capacity` completion tokens."""
  more = capacity - cache.keys.shape[3]
  if more < 0:
    raise ValueError(f"capacity {capacity} is below {cache.keys.shape[3]}")
  pad = ((0, 0), (0, 0), (0, 0), (0, more), (0, 0))
  return cache._replace(
    keys=jnp.pad(cache.keys, pad), values=jnp.pad(cache.values, pad)
  )
