"""The window in which a ratio moves the loss, written row by row.

The surrogate reads its window from the batch, so wider clipping for stale
or foreign rows is another write and not another loss.
"""

import jax.numpy as jnp

from mrl_jax.transforms import rows
from mrl_jax.types import Batch, BatchTransform


def clip_range(
  low: float, high: float, source: rows.Sources = None
) -> BatchTransform:
  """Ratios are clipped to [1 - low, 1 + high].

  Yu et al. 2025 (a wider upper side), https://arxiv.org/abs/2503.14476.
  """
  if not 0 <= low <= 1:
    raise ValueError(f"low={low} must be in [0, 1]")
  if not high >= 0:
    raise ValueError(f"high={high} must be at least 0")

  def apply(batch: Batch) -> Batch:
    mine = rows.among(batch, source)
    return batch._replace(
      clip_low=jnp.where(mine, low, batch.clip_low),
      clip_high=jnp.where(mine, high, batch.clip_high),
    )

  return apply


def relaxed(
  low: float = 0.5, high: float = 1.0, source: rows.Sources = None
) -> BatchTransform:
  """A wide asymmetric window, for samples many updates old.

  The default width is our choice; the paper says only that it is wide.

  Mu-GRPO 2026, https://arxiv.org/abs/2605.17570.
  """
  return clip_range(low, high, source)
