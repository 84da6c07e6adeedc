"""Which rows a transform is about, said the same way everywhere."""

import functools
import operator

import jax.numpy as jnp
from jaxtyping import Array, Bool

from mrl_jax.types import Batch, Source

OWN_SAMPLES = (Source.OWN, Source.REGEN)
SAMPLES = (*OWN_SAMPLES, Source.PEER)  # all that was sampled, by whomever

Sources = Source | tuple[Source, ...] | None  # None: all rows


def among(batch: Batch, source: Sources) -> Bool[Array, "B"]:
  """Whether each row comes from (one of) `source`."""
  if source is None:
    return jnp.ones(batch.source.shape, bool)
  sources = source if isinstance(source, tuple) else (source,)
  if not sources:
    raise ValueError("source=(): name at least one, or None for all rows")
  found = (batch.source == int(s) for s in sources)
  return functools.reduce(operator.or_, found)
