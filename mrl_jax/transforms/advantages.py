"""Rewards to advantages: what a completion is worth against a baseline.

A row whose reward is NaN could not be scored. It takes no part: not in a
mean, not in a deviation, and with weight 0 neither in the loss nor in any
denominator. A group whose rewards are all alike says nothing: advantage 0.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from mrl_jax.kernels import moments
from mrl_jax.transforms import rows
from mrl_jax.types import Batch, BatchTransform


def group_advantages(
  source: rows.Sources = rows.OWN_SAMPLES,
  *,
  ddof: int = 1,
  eps: float = 1e-6,
  normalize: bool = True,
  degenerate_range: float = 1e-6,
) -> BatchTransform:
  """GRPO: A = (R - mean_g) / (std_g + eps) over each group's rows.

  Groups are the rows of one number in `batch.group`, of the given sources
  together; rows of other sources keep what they have. With
  `normalize=False` it is Dr.GRPO's A = R - mean_g. See
  `moments.standardize`.
  """
  _check_ddof(ddof)

  def apply(batch: Batch) -> Batch:
    mine = rows.among(batch, source)
    found = moments.standardize(
      batch.rewards,
      batch.group,
      mine & jnp.isfinite(batch.rewards),
      ddof=ddof,
      eps=eps,
      normalize=normalize,
      degenerate_range=degenerate_range,
    )
    return _set(batch, mine, found)

  return apply


def mixed_advantages(
  mix: float | None = None,
  source: rows.Sources = rows.OWN_SAMPLES,
  *,
  ddof: int = 1,
  eps: float = 1e-6,
  normalize: bool = True,
  degenerate_range: float = 1e-6,
) -> BatchTransform:
  """XGRPO: own rows only, against a baseline that the peers share in.

  `mix` is the peers' share of the baseline; None takes the statistics of the
  union, 0 is `group_advantages`. See `moments.standardize_mixed`.
  """
  _check_ddof(ddof)
  if mix is not None and not 0 <= mix <= 1:
    raise ValueError(f"mix={mix} must be in [0, 1], or None")

  def apply(batch: Batch) -> Batch:
    mine = rows.among(batch, source)
    found = moments.standardize_mixed(
      batch.rewards,
      batch.group,
      mine & jnp.isfinite(batch.rewards),
      batch.peers,
      mix,
      ddof=ddof,
      eps=eps,
      normalize=normalize,
      degenerate_range=degenerate_range,
    )
    return _set(batch, mine, found)

  return apply


def return_to_go(
  source: rows.Sources = rows.OWN_SAMPLES,
  *,
  ddof: int = 1,
  eps: float = 1e-6,
  normalize: bool = True,
  degenerate_range: float = 1e-6,
  against: str = "to_go",
) -> BatchTransform:
  """Each token is worth what is earned from it on, and not before it.

  With r_{i,k} what the host wrote as credit, b_{i,t} = sum_{k<t} r_{i,k}, and
  G_{i,t} = R_i - b_{i,t} the return to go,

    "return":  c_{i,t} = -b_{i,t} / (std_g + eps), so that
               A_i + c_{i,t} = (G_{i,t} - mean_g R) / (std_g + eps)
    "to_go":   c_{i,t} = -(b_{i,t} - mean_g b_t) / (std_g + eps), so that
               A_i + c_{i,t} = (G_{i,t} - mean_g G_t) / (std_g + eps)

  and c replaces the credit, 0 in a degenerate group. It stands behind
  `group_advantages` of the same arguments. Both take off what the past alone
  decides, so under one scale for all groups the expected gradient stays
  GRPO's. But the mean return is a poor guess at what is still to come late in
  a response: there every advantage is negative, which costs more variance
  than it saves, and chain arithmetic was unlearned. The mean to go is taken at
  the same token, where a row that is over counts as at its last. With nothing
  earned before the end both are GRPO.

  The idea is process supervision of Shao et al. 2024 (DeepSeekMath),
  https://arxiv.org/abs/2402.03300, section 4.1.3, which standardises the
  rewards of all steps of a group and adds up those of the steps to come. So
  there the number of steps matters, and here it does not: returns are what
  is compared.

  Raises:
    ValueError: `against` is neither "return" nor "to_go", or ddof < 0.
  """
  _check_ddof(ddof)
  if against not in ("return", "to_go"):
    raise ValueError(f"against={against!r} must be 'return' or 'to_go'")

  def apply(batch: Batch) -> Batch:
    mine = rows.among(batch, source)
    valid = mine & jnp.isfinite(batch.rewards)
    scale = moments.scales(
      batch.rewards,
      batch.group,
      valid,
      ddof=ddof,
      eps=eps,
      normalize=normalize,
      degenerate_range=degenerate_range,
    )
    mask = batch.weights != 0
    before = _before(batch.credit, mask)
    if against == "to_go":
      before = moments.center(before, batch.group, valid)
    used = mask & valid[:, None]
    credit = jnp.where(used, -before / scale[:, None], 0.0)
    return batch._replace(credit=credit)

  return apply


def _before(
  earned: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
  """sum_{k<t} r_k, and behind a row's last token what it is there."""
  steps = jax.lax.broadcasted_iota(jnp.int32, mask.shape, 1)
  last = jnp.where(mask, steps, 0).max(-1, keepdims=True)
  total = jnp.cumsum(jnp.where(steps < last, earned, 0.0), -1)
  return jnp.pad(total[:, :-1], ((0, 0), (1, 0)))


def constant_baseline(
  baseline: float = 0.0, source: rows.Sources = rows.OWN_SAMPLES
) -> BatchTransform:
  """A = R - baseline: for single samples, which have no group to compare."""

  def apply(batch: Batch) -> Batch:
    return _set(batch, rows.among(batch, source), batch.rewards - baseline)

  return apply


def add_novelty(
  weight: float | int, source: rows.Sources = rows.OWN_SAMPLES
) -> BatchTransform:
  """A <- A + weight * nu * 1[R > 0], nu being what the host wrote as bonus.

  It stands after the normalisation and is not centred again, so a group
  whose answers are all right still learns.

  ExTra 2026, https://arxiv.org/abs/2606.24994.
  """

  def apply(batch: Batch) -> Batch:
    mine = rows.among(batch, source)
    worth = jnp.where(batch.rewards > 0, weight * batch.bonus, 0.0)
    return batch._replace(bonus=jnp.where(mine, worth, batch.bonus))

  return apply


def _check_ddof(ddof: int) -> None:
  if ddof < 0:
    raise ValueError(f"ddof={ddof} must be at least 0")


def _set(
  batch: Batch, mine: Bool[Array, "B"], advantages: Float[Array, "B"]
) -> Batch:
  unscored = mine & ~jnp.isfinite(batch.rewards)
  advantages = jnp.where(unscored, 0.0, advantages)
  return batch._replace(
    advantages=jnp.where(mine, advantages, batch.advantages),
    weights=jnp.where(unscored[:, None], 0.0, batch.weights),
  )


def group_statistics(
  batch: Batch,
  source: rows.Sources = rows.OWN_SAMPLES,
  degenerate_range: float = 1e-6,
) -> dict[str, Float[Array, ""]]:
  """The rewards in numbers; every one is finite, whatever could be scored.

  "reward": mean, "reward_min" and "reward_max" of the scored rows (0
  without any); "unscored": rows without a reward; "groups": those with a
  scored row; "degenerate": the share of them whose rewards are all alike.
  """
  mine = rows.among(batch, source)
  valid = mine & jnp.isfinite(batch.rewards)
  sums = moments.grouped(batch.rewards, batch.group, valid)
  count = sums.count.sum()
  some = sums.count > 0
  spread = moments.spread(batch.rewards, batch.group, valid)
  alike = some & (spread <= degenerate_range)

  def scored(value):
    return jnp.where(count > 0, value, 0.0)

  low = jnp.min(jnp.where(valid, batch.rewards, jnp.inf))
  high = jnp.max(jnp.where(valid, batch.rewards, -jnp.inf))
  values = {
    "reward": sums.total.sum() / jnp.maximum(count, 1.0),
    "reward_min": scored(low),
    "reward_max": scored(high),
    "unscored": (mine & ~valid).sum(),
    "groups": some.sum(),
    "degenerate": alike.sum() / jnp.maximum(some.sum(), 1),
  }
  return jax.tree.map(lambda x: x.astype(jnp.float32), values)
