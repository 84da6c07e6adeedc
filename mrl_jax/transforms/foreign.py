"""What a peer's log-probs are worth on this policy's own tokens.

A peer's rollout arrives as this policy's tokens and a `Trace` that says how
they lie on the tokens the peer sampled. `collect` makes it a behaviour
log-prob per token; the other transforms are the ways to weigh such a row.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from mrl_jax.kernels import realign, surrogate
from mrl_jax.transforms import rows
from mrl_jax.types import Batch, BatchTransform, Source, Trace


def collect(
  spread: Callable[[Trace], Float[Array, "B T"]] = realign.collect,
) -> BatchTransform:
  """Writes the behaviour log-probs of the rows that peers wrote.

  How a source token's log-prob is spread is our choice: over its own bytes
  (`realign.collect`) or over its whole chunk (`realign.collect_chunks`).
  Both keep the log-prob of every chunk.
  """

  def apply(batch: Batch) -> Batch:
    if batch.trace is None:
      return batch
    mine = rows.among(batch, Source.PEER)[:, None] & (batch.weights != 0)
    found = jnp.where(mine, spread(batch.trace), batch.behavior_logprobs)
    return batch._replace(behavior_logprobs=found)

  return apply


def chunk_log_ratios(
  logprobs: Float[Array, "B T"], batch: Batch
) -> Float[Array, "B T"]:
  """log w_c = sum_{j in c} lp_j - L_c, at every token of its chunk."""
  counted = batch.weights != 0
  apart = jnp.where(counted, logprobs - batch.behavior_logprobs, 0.0)
  return realign.chunk_sums(apart, batch.trace)


def decouple(cap: float = 2.0) -> BatchTransform:
  """Weighs by sg(min(w_c, cap)) and anchors PPO at the learner's log-probs.

  w_c is the chunk's ratio between the learner at the start of the stage and
  the peer. Stands after the mean: the weights do not count in it.

  Hilton et al. 2022 (decoupled PPO), https://arxiv.org/abs/2110.00641.
  """
  if not cap > 0:
    raise ValueError(f"cap={cap} must be above 0")

  def apply(batch: Batch) -> Batch:
    if batch.trace is None:
      return batch
    mine = rows.among(batch, Source.PEER)[:, None] & (batch.weights != 0)
    ratios = surrogate.ratios(chunk_log_ratios(_old(batch), batch))
    factors = jnp.where(mine, jnp.minimum(ratios, cap), 1.0)
    return anchor(Source.PEER)(batch._replace(weights=batch.weights * factors))

  return apply


def anchor(source: rows.Sources = None) -> BatchTransform:
  """Makes the learner's log-probs at stage start the behaviour's.

  For a peer's rows it forgets who sampled them: no weight, and a bias.
  """

  def apply(batch: Batch) -> Batch:
    mine = rows.among(batch, source)[:, None]
    found = jnp.where(mine, _old(batch), batch.behavior_logprobs)
    return batch._replace(behavior_logprobs=found)

  return apply


def _old(batch: Batch) -> Float[Array, "B T"]:
  if batch.old_logprobs is None:
    raise ValueError(
      "old_logprobs=None: needs the learner's log-probs at the start of the "
      "stage; score the batch before preparing it"
    )
  return batch.old_logprobs
