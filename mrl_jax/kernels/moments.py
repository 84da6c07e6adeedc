"""Means and spreads of groups of rows, by segment sums.

Rows of one prompt share an integer in [0, B); a group's numbers are an array
of length B indexed by it. Everything here is a sum over rows, so groups need
not stand together, and rows may be spread over devices.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mrl_jax.types import Moments, Peers


def grouped(
  values: Float[Array, "B"], group: Int[Array, "B"], valid: Bool[Array, "B"]
) -> Moments:
  """Count, sum and sum of squares of each group's valid rows.

  (n, S, Q)_g = sum_{i in g, valid} (1, x_i, x_i^2)
  """
  x = jnp.where(valid, values, 0.0)
  ones = valid.astype(jnp.float32)
  return Moments(*(_sum(part, group) for part in (ones, x, x * x)))


def merge(a: Moments, b: Moments) -> Moments:
  """Moments of the union of two disjoint sets: elementwise sums.

  Chan, Golub & LeVeque 1979 discuss pairwise merging of such statistics,
  http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf.
  """
  return jax.tree.map(jnp.add, a, b)


def mean(moments: Moments) -> Float[Array, "..."]:
  """S / n, and 0 for an empty set."""
  return moments.total / jnp.maximum(moments.count, 1.0)


def deviation(moments: Moments, ddof: int = 1) -> Float[Array, "..."]:
  """sqrt((Q - S^2 / n) / (n - ddof)), and 0 where n <= ddof.

  Loses digits where the mean is large against the spread; `standardize`
  takes a second pass instead.
  """
  left = moments.square - moments.total * mean(moments)
  variance = jnp.maximum(left, 0.0) / jnp.maximum(moments.count - ddof, 1.0)
  return jnp.where(moments.count > ddof, jnp.sqrt(variance), 0.0)


def spread(
  values: Float[Array, "B"], group: Int[Array, "B"], valid: Bool[Array, "B"]
) -> Float[Array, "B"]:
  """max - min of each group's valid rows; -inf for a group without any."""
  size = values.shape[0]
  high = jax.ops.segment_max(jnp.where(valid, values, -jnp.inf), group, size)
  low = jax.ops.segment_min(jnp.where(valid, values, jnp.inf), group, size)
  return high - low


def standardize(
  values: Float[Array, "B"],
  group: Int[Array, "B"],
  valid: Bool[Array, "B"],
  *,
  ddof: int = 1,
  eps: float = 1e-6,
  normalize: bool = True,
  degenerate_range: float = 1e-6,
) -> Float[Array, "B"]:
  """Each row's value against its group's mean, in the group's deviations.

  A_i = (x_i - mean_g) / (std_g + eps), std_g with n - ddof; without
  `normalize`, A_i = x_i - mean_g. Exactly 0 where the group's max - min is
  at most `degenerate_range`, and for rows that are not valid. Range and not
  deviation decides: the mean of equal float32 numbers need not equal them,
  and what is left over would be divided by next to nothing.

  Shao et al. 2024 (GRPO), https://arxiv.org/abs/2402.03300, section 4.1.2;
  Liu et al. 2025 (Dr.GRPO, normalize=False),
  https://arxiv.org/abs/2503.20783.
  """
  _, centers = _centers(values, group, valid)
  scale = scales(
    values,
    group,
    valid,
    ddof=ddof,
    eps=eps,
    normalize=normalize,
    degenerate_range=degenerate_range,
  )
  return over(values - centers[group], scale, valid)


def scales(
  values: Float[Array, "B"],
  group: Int[Array, "B"],
  valid: Bool[Array, "B"],
  *,
  ddof: int = 1,
  eps: float = 1e-6,
  normalize: bool = True,
  degenerate_range: float = 1e-6,
) -> Float[Array, "B"]:
  """What `standardize` divides by: std_g + eps, of each row's group.

  Without `normalize`, 1. Infinite where the group's values are all alike.
  """
  live = spread(values, group, valid)[group] > degenerate_range
  scale = jnp.ones_like(values)
  if normalize:
    count, centers = _centers(values, group, valid)
    centered = jnp.where(valid, values - centers[group], 0.0)
    squares = _sum(centered * centered, group)
    stds = jnp.sqrt(squares / jnp.maximum(count - ddof, 1.0))
    scale = stds[group] + eps
  return jnp.where(live, scale, jnp.inf)


def over(
  values: Float[Array, "B"], scale: Float[Array, "B"], valid: Bool[Array, "B"]
) -> Float[Array, "B"]:
  """values / scale; exactly 0 where that is infinite, or a row not valid."""
  used = valid & jnp.isfinite(scale)
  return jnp.where(used, jnp.where(used, values, 0.0) / scale, 0.0)


def center(
  values: Float[Array, "B T"], group: Int[Array, "B"], valid: Bool[Array, "B"]
) -> Float[Array, "B T"]:
  """x_{i,t} - mean_g x_t: every column against its group's valid rows."""
  count = _sum(valid.astype(jnp.float32), group)
  total = _sum(jnp.where(valid[:, None], values, 0.0), group)
  return values - (total / jnp.maximum(count, 1.0)[:, None])[group]


def standardize_mixed(
  values: Float[Array, "B"],
  group: Int[Array, "B"],
  valid: Bool[Array, "B"],
  peers: Peers,
  mix: float | None = None,
  *,
  ddof: int = 1,
  eps: float = 1e-6,
  normalize: bool = True,
  degenerate_range: float = 1e-6,
) -> Float[Array, "B"]:
  """Each row's value against a baseline that the peers share in.

  b = (1 - a) m_own + a m_peer
  s^2 = ((1 - a) (v_own + (m_own - b)^2) + a (v_peer + (m_peer - b)^2))
        n / (n - ddof),  n = n_own / (1 - a)
  A_i = (x_i - b) / (s + eps)

  These are the statistics of the union once each of the peers' rewards
  counts k = a n_own / ((1 - a) n_peer) times, so ddof enters once: `mix`
  None is k = 1, the plain union, and 0 is `standardize`. A group without
  peers has a = 0. Exactly 0 where own rows and peers are all alike.

  Mutual RL 2026 (XGRPO), https://arxiv.org/abs/2605.07244.
  """
  count, centers = _centers(values, group, valid)
  own, n = centers[group], count[group]
  if mix is None:
    a = peers.count / jnp.maximum(n + peers.count, 1.0)
  else:
    a = jnp.full_like(values, mix)
  a = jnp.where(peers.count > 0, a, 0.0)
  baseline = (1 - a) * own + a * jnp.where(a > 0, peers.mean, 0.0)
  centered = jnp.where(valid, values - baseline, 0.0)
  apart = jnp.abs(peers.mean - own) > degenerate_range
  wide = jnp.sqrt(peers.variance) > degenerate_range
  live = spread(values, group, valid)[group] > degenerate_range
  live |= (a > 0) & (apart | wide)
  if normalize:
    deviations = jnp.where(valid, values - own, 0.0)
    squares = _sum(deviations * deviations, group)[group]
    squares = (1 - a) * (squares + n * (own - baseline) ** 2)
    theirs = peers.variance + (peers.mean - baseline) ** 2
    squares += a * n * jnp.where(a > 0, theirs, 0.0)
    left = jnp.maximum(n - ddof * (1 - a), jnp.where(a > 0, 1e-3, 1.0))
    centered = centered / (jnp.sqrt(squares / left) + eps)
  return jnp.where(live & valid, centered, 0.0)


def _centers(values, group, valid):
  """Count and mean of each group's valid rows."""
  count = _sum(valid.astype(jnp.float32), group)
  total = _sum(jnp.where(valid, values, 0.0), group)
  return count, total / jnp.maximum(count, 1.0)


def _sum(values, group):
  return jax.ops.segment_sum(values, group, num_segments=values.shape[0])
