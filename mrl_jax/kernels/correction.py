"""Corrections for tokens that another distribution than the trainer's drew.

Sampler and trainer disagree: other kernels, other precision, older weights.
Each function takes log-ratios (trainer minus sampler) and returns what each
token's weight is multiplied with: a truncated ratio, or 0 and 1 for tokens
dropped and kept. All have one signature, so one can stand for another;
nothing here has a gradient. Whether dropped tokens still count in a mean's
denominator is the caller's choice, not made here.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from mrl_jax.kernels import surrogate


def tis_token(
  log_ratios: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
  advantages: Float[Array, "B"],
  cap: float = 2.0,
) -> Float[Array, "B T"]:
  """Truncated importance sampling: sg(min(r_t, cap)).

  Yao et al. 2025, https://fengyao.notion.site/off-policy-rl; Ionides 2008,
  https://doi.org/10.1198/106186008X320456.
  """
  del advantages
  return jnp.minimum(surrogate.ratios(_clean(log_ratios, mask)), cap)


def tis_sequence(
  log_ratios: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
  advantages: Float[Array, "B"],
  cap: float = 2.0,
) -> Float[Array, "B T"]:
  """Truncated importance sampling by row: sg(min(prod_t r_t, cap)).

  Liu et al. 2025, https://richardli.xyz/rl-collapse.
  """
  del advantages
  totals = _clean(log_ratios, mask).sum(-1)
  return _spread(jnp.minimum(surrogate.ratios(totals), cap), mask)


def mis_token(
  log_ratios: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
  advantages: Float[Array, "B"],
  low: float = 0.5,
  high: float = 2.0,
  weighted: bool = False,
) -> Float[Array, "B T"]:
  """Masked importance sampling: keeps tokens with low <= r_t <= high.

  1[low <= r_t <= high], times r_t if `weighted`.

  Liu et al. 2025, https://richardli.xyz/rl-collapse.
  """
  del advantages
  return _inside(_clean(log_ratios, mask), low, high, weighted)


def mis_sequence(
  log_ratios: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
  advantages: Float[Array, "B"],
  low: float = 0.5,
  high: float = 2.0,
  weighted: bool = False,
) -> Float[Array, "B T"]:
  """Masked importance sampling by row: low <= prod_t r_t <= high.

  Liu et al. 2025, https://richardli.xyz/rl-collapse.
  """
  del advantages
  totals = _clean(log_ratios, mask).sum(-1)
  return _spread(_inside(totals, low, high, weighted), mask)


def icepop(
  log_ratios: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
  advantages: Float[Array, "B"],
  low: float = 0.5,
  high: float = 5.0,
  weighted: bool = False,
) -> Float[Array, "B T"]:
  """IcePop: drops tokens on which trainer and sampler disagree too much.

  1[low <= r_t <= high], times r_t if `weighted`, as in the paper. It is
  `mis_token` with the paper's window.

  Ling Team 2025, https://arxiv.org/abs/2510.18855.
  """
  return mis_token(log_ratios, mask, advantages, low, high, weighted)


def response_veto(
  log_ratios: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
  advantages: Float[Array, "B"],
  floor: float = 1e-4,
) -> Float[Array, "B T"]:
  """Drops a whole row if any of its tokens has r_t < floor.

  Liu et al. 2025, https://richardli.xyz/rl-collapse.
  """
  del advantages
  least = _clean(log_ratios, mask).min(-1)
  return _spread((least >= jnp.log(floor)).astype(jnp.float32), mask)


def opsm(
  log_ratios: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
  advantages: Float[Array, "B"],
  delta: float = 0.1,
) -> Float[Array, "B T"]:
  """Off-policy sequence masking: drops bad rows that are far off-policy.

  0 iff A < 0 and mean_t(log p_sampler - log p_trainer) > delta. The sign is
  the row's, never a token's.

  DeepSeek-AI 2025 (V3.2), https://arxiv.org/abs/2512.02556.
  """
  counts = jnp.maximum(mask.sum(-1), 1)
  drift = -_clean(log_ratios, mask).sum(-1) / counts
  keep = ~((advantages < 0) & (drift > delta))
  return _spread(keep.astype(jnp.float32), mask)


def m2po(
  log_ratios: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
  advantages: Float[Array, "B"],
  limit: float = 0.04,
) -> Float[Array, "B T"]:
  """Drops the fewest most extreme tokens so that the rest are near.

  1[(log r_t)^2 <= q], q the greatest with mean{(log r)^2 <= q} <= limit,
  over all tokens of the batch. The mean grows with q, so q is found bit by
  bit in the order of the floats: no sort, and exact. Tokens tied at q stay
  or go together.

  Zheng et al. 2025, https://arxiv.org/abs/2510.01161.
  """
  del advantages
  squares = jnp.square(_clean(log_ratios, mask))
  order = jax.lax.bitcast_convert_type(squares, jnp.uint32)

  def bit(index, threshold):
    trial = threshold | (jnp.uint32(1 << 30) >> jnp.uint32(index))
    inside = mask & (order <= trial)
    total = jnp.where(inside, squares, 0.0).sum()
    return jnp.where(total <= limit * inside.sum(), trial, threshold)

  threshold = jax.lax.fori_loop(0, 31, bit, jnp.uint32(0))
  return (order <= threshold).astype(jnp.float32)


def _clean(log_ratios, mask):
  """No gradient, and 0 where the token does not count."""
  return jax.lax.stop_gradient(jnp.where(mask, log_ratios, 0.0))


def _inside(log_ratios, low, high, weighted):
  r = surrogate.ratios(log_ratios)
  keep = (r >= low) & (r <= high)
  return jnp.where(keep, r if weighted else 1.0, 0.0)


def _spread(rows, mask):
  return jnp.broadcast_to(rows[:, None], mask.shape)
