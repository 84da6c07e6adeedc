"""Rewards to rewards, before anything is made of them.

A reward that could not be determined is NaN and stays NaN.
"""

import jax.numpy as jnp

from mrl_jax.transforms import rows
from mrl_jax.types import Batch, BatchTransform


def clip(
  low: float, high: float, source: rows.Sources = None
) -> BatchTransform:
  """R <- clip(R, low, high)."""
  if not low <= high:
    raise ValueError(f"low={low} must not be above high={high}")

  def apply(batch: Batch) -> Batch:
    clipped = jnp.clip(batch.rewards, low, high)
    mine = rows.among(batch, source)
    return batch._replace(rewards=jnp.where(mine, clipped, batch.rewards))

  return apply


def add_novelty(
  weight: float | int, source: rows.Sources = rows.OWN_SAMPLES
) -> BatchTransform:
  """R <- R + weight * nu * 1[R > 0], and no bonus.

  The form that a group's normalisation divides and centres again; see
  `advantages.add_novelty` for the other.
  """

  def apply(batch: Batch) -> Batch:
    mine = rows.among(batch, source)
    worth = jnp.where(batch.rewards > 0, weight * batch.bonus, 0.0)
    return batch._replace(
      rewards=batch.rewards + jnp.where(mine, worth, 0.0),
      bonus=jnp.where(mine, 0.0, batch.bonus),
    )

  return apply


def soft_overlong(
  limit: int, cushion: int, scale: float = 1.0, source: rows.Sources = None
) -> BatchTransform:
  """Takes up to `scale` off as a completion nears the length limit.

  R <- R - scale clip((length - (limit - cushion)) / cushion, 0, 1), with
  length in tokens of non-zero weight.

  Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476, equation 13.
  """
  if not 0 < cushion <= limit:
    raise ValueError(f"cushion={cushion} must be in [1, limit={limit}]")

  def apply(batch: Batch) -> Batch:
    lengths = (batch.weights != 0).sum(-1).astype(jnp.float32)
    over = jnp.clip((lengths - (limit - cushion)) / cushion, 0.0, 1.0)
    mine = rows.among(batch, source)
    penalty = jnp.where(mine, scale * over, 0.0)
    return batch._replace(rewards=batch.rewards - penalty)

  return apply
