"""Reward shaping by a potential: three places for it, with three guarantees.

`shape_tokens` changes what each token is worth and, in expectation, nothing
else: it is a baseline that depends on the past alone. `shape_sequence` adds
to the reward and may move the optimum by as much as the potential varies
within a prompt; `shape_bounded` is the same under a condition that keeps the
best responses the best ones.

MeRLa 2026, https://arxiv.org/abs/2607.26094.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mrl_jax.kernels import potentials
from mrl_jax.transforms import rows
from mrl_jax.types import Batch, BatchTransform


def shape_tokens(
  alpha: float | int, source: rows.Sources = rows.OWN_SAMPLES
) -> BatchTransform:
  """A_t <- A_t - (alpha / S) phi(s_{t-1}), written as credit.

  With phi(s_t+1) - phi(s_t) as further rewards this is the return to go, in
  units of S, the average deviation of *past* groups: this batch's own would
  depend on what was sampled. The expected on-policy gradient and the optima,
  hard and KL-soft, stay what they are, if the reduction divides by constants.
  """

  def apply(batch: Batch) -> Batch:
    values, scale = _shaping(batch)
    phi = potentials.telescoping(values, batch.weights != 0)
    worth = -(alpha / scale)[:, None] * phi
    mine = rows.among(batch, source)[:, None]
    return batch._replace(credit=batch.credit + jnp.where(mine, worth, 0.0))

  return apply


def shape_sequence(
  alpha: float | int, source: rows.Sources = rows.OWN_SAMPLES
) -> BatchTransform:
  """R <- R + alpha Phi(x, y), before anything is made of rewards.

  The paper's form. What is lost of the reward is at most
  min(2 alpha d, (alpha d)^2 / (2 beta)), with d half of max - min of Phi
  within a prompt and beta the weight of a KL to the reference.
  """

  def apply(batch: Batch) -> Batch:
    values, _ = _shaping(batch)
    worth = alpha * potentials.last(values, batch.weights != 0)
    mine = rows.among(batch, source)
    return batch._replace(rewards=batch.rewards + jnp.where(mine, worth, 0.0))

  return apply


def shape_bounded(
  alpha: float | int,
  bound: float | int,
  gap: float | int,
  source: rows.Sources = rows.OWN_SAMPLES,
) -> BatchTransform:
  """`shape_sequence` where it cannot make a worse response the best.

  Args:
    alpha: weight of the potential.
    bound: on its absolute value.
    gap: the least difference between the best reward and any other.
    source: which rows.

  Raises:
    ValueError: 2 alpha bound is not below the gap.
  """
  if not 2 * abs(alpha) * bound < gap:
    raise ValueError(
      f"alpha={alpha}, bound={bound}: 2 alpha bound must be below gap={gap}, "
      "or a worse response could overtake the best"
    )
  return shape_sequence(alpha, source)


def _shaping(batch: Batch) -> tuple[Float[Array, "B T"], Float[Array, "B"]]:
  """The potential's values and their scale; no gradient goes through."""
  if batch.shaping is None:
    raise ValueError(
      "shaping=None: needs the potential's values; score the batch with the "
      "frozen reference before preparing it"
    )
  return jax.lax.stop_gradient(batch.shaping)
