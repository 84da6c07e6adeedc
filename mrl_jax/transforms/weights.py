"""From a loss mask to a loss measure: reduction is a transform.

The objective is `sum(weights * loss)`, nothing else. Token mean, sequence
mean and constant mean differ only in the weights they write, and they write
them over the whole batch, so gradients of microbatches simply add. After
means over disjoint sources `sum(weights)` is the sum of their scales; a
source that no mean covers keeps weight 1 per token and swamps the loss.
With no token left the weights are 0, and so is the loss.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from mrl_jax.transforms import rows
from mrl_jax.types import Batch, BatchTransform

# (log-ratios, mask, advantages) -> what the weights are multiplied with.
Correction = Callable[
  [Float[Array, "B T"], Bool[Array, "B T"], Float[Array, "B"]],
  Float[Array, "B T"],
]


def token_mean(
  source: rows.Sources = None, scale: float = 1.0
) -> BatchTransform:
  """Every token counts the same: w <- scale w / sum(w).

  Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476, equation 12.
  """

  def normalize(weights: Float[Array, "B T"]) -> Float[Array, "B T"]:
    return weights / _or_one(weights.sum())

  return _mean(normalize, source, scale)


def sequence_mean(
  source: rows.Sources = None, scale: float = 1.0
) -> BatchTransform:
  """Every row counts the same: w <- scale w / (sum_t w * rows).

  Rows of weight 0 throughout are not counted.

  Shao et al. 2024 (GRPO), https://arxiv.org/abs/2402.03300, equation 3.
  """

  def normalize(weights: Float[Array, "B T"]) -> Float[Array, "B T"]:
    totals = weights.sum(-1, keepdims=True)
    return weights / _or_one(totals) / _or_one((totals > 0).sum())

  return _mean(normalize, source, scale)


def constant_mean(
  length: int, source: rows.Sources = None, scale: float = 1.0
) -> BatchTransform:
  """Divides by a constant per row: w <- scale w / (length * rows).

  `length` is the completion limit, so that neither a row's own length nor
  its batch's matters. The weights add up to less than `scale`.

  Liu et al. 2025 (Dr.GRPO), https://arxiv.org/abs/2503.20783.
  """
  if length < 1:
    raise ValueError(f"length={length} must be at least 1")

  def normalize(weights: Float[Array, "B T"]) -> Float[Array, "B T"]:
    count = jnp.any(weights > 0, axis=-1).sum()
    return weights / (length * _or_one(count))

  return _mean(normalize, source, scale)


def group_mean(
  source: rows.Sources = None, scale: float = 1.0
) -> BatchTransform:
  """Every prompt counts the same, with or without a row of `source`.

  w <- scale w / (sum_{rows of the group, t} w * groups), with the groups of
  the whole batch: what few prompts have weighs little.
  """

  def apply(batch: Batch) -> Batch:
    mine = rows.among(batch, source)[:, None]
    kept = jnp.where(mine, batch.weights, 0.0)
    count = batch.group.shape[0]
    totals = jax.ops.segment_sum(kept.sum(-1), batch.group, count)
    there = jax.ops.segment_max(jnp.ones((count,)), batch.group, count) > 0
    found = kept / _or_one(totals)[batch.group][:, None] / there.sum()
    return batch._replace(weights=jnp.where(mine, scale * found, batch.weights))

  return apply


def _mean(normalize, source, scale) -> BatchTransform:
  def apply(batch: Batch) -> Batch:
    mine = rows.among(batch, source)[:, None]
    found = scale * normalize(jnp.where(mine, batch.weights, 0.0))
    return batch._replace(weights=jnp.where(mine, found, batch.weights))

  return apply


def _or_one(total: Array) -> Array:
  return jnp.where(total == 0, 1, total)


def correct(
  correction: Correction, source: rows.Sources = None
) -> BatchTransform:
  """Multiplies the weights by a rollout correction.

  Compares the trainer's log-probs at the start of the stage with those of
  the sampler. Its place in the chain names the denominator: before the mean,
  tokens that were dropped do not count in it (`kept`); after the mean they
  do (`original`). It sees the whole batch, so a correction that ranks
  tokens, like `correction.m2po`, does not depend on microbatches.

  Raises:
    ValueError: at trace time, for a batch without `old_logprobs`.
  """

  def apply(batch: Batch) -> Batch:
    if batch.old_logprobs is None:
      raise ValueError(
        "old_logprobs=None: weights.correct compares the trainer's log-probs "
        "at the start of the stage with the sampler's; score the batch and "
        "set old_logprobs before preparing it"
      )
    mask = (batch.weights != 0) & rows.among(batch, source)[:, None]
    log_ratios = batch.old_logprobs - batch.behavior_logprobs
    log_ratios = jnp.where(mask, log_ratios, 0.0)
    factors = correction(log_ratios, mask, batch.advantages)
    return batch._replace(weights=jnp.where(mask, factors, 1) * batch.weights)

  return apply
