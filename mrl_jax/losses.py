"""Token losses: what each token costs under the policy being trained.

A token loss maps (scores, batch) to [B, T] and knows nothing of masks or
means: `objective` weighs it with the measure that the transforms wrote.
Entries of weight 0 are neutralised at the inputs, before any arithmetic,
because a masked output still sends NaN through the gradient.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from mrl_jax.kernels import surrogate
from mrl_jax.transforms import rows as rows_lib
from mrl_jax.transforms import weights
from mrl_jax.types import Batch, Scores, Source, TokenLoss


def objective(
  loss: TokenLoss,
) -> Callable[[Scores, Batch], Float[Array, ""]]:
  """sum(weights * loss(scores, batch)), over entries of non-zero weight."""

  def apply(scores: Scores, batch: Batch) -> Float[Array, ""]:
    mask = batch.weights != 0
    scores, batch = neutralize(scores, batch, mask)
    return jnp.where(mask, batch.weights * loss(scores, batch), 0.0).sum()

  return apply


def neutralize(
  scores: Scores, batch: Batch, mask: Bool[Array, "B T"]
) -> tuple[Scores, Batch]:
  """Zero for everything a loss reads, wherever `mask` is false.

  Log-ratios become 0 there. What belongs to a row becomes 0 where the row
  has no entry left.
  """
  row = mask.any(-1)

  def entries(x):
    return None if x is None else jnp.where(mask, x, 0.0)

  def rows(x):
    return jnp.where(row, x, 0.0)

  batch = batch._replace(
    weights=entries(batch.weights),
    behavior_logprobs=entries(batch.behavior_logprobs),
    old_logprobs=entries(batch.old_logprobs),
    ref_logprobs=entries(batch.ref_logprobs),
    credit=entries(batch.credit),
    rewards=rows(batch.rewards),
    advantages=rows(batch.advantages),
    bonus=rows(batch.bonus),
    clip_low=rows(batch.clip_low),
    clip_high=rows(batch.clip_high),
  )
  return Scores(*map(entries, scores)), batch


def token_advantages(batch: Batch) -> Float[Array, "B T"]:
  """The row's advantage and bonus, plus the token's credit."""
  return (batch.advantages + batch.bonus)[:, None] + batch.credit


def log_ratios(scores: Scores, batch: Batch) -> Float[Array, "B T"]:
  """log p - log p_behavior."""
  return scores.logprobs - batch.behavior_logprobs


def policy_gradient(
  dual_clip: float | None = None, bound: float = surrogate.BOUND
) -> TokenLoss:
  """The clipped surrogate; see `surrogate.clipped`."""
  if dual_clip is not None and not dual_clip > 1:
    raise ValueError(f"dual_clip={dual_clip} must be above 1, or None")

  def loss(scores: Scores, batch: Batch) -> Float[Array, "B T"]:
    return surrogate.clipped(
      log_ratios(scores, batch),
      token_advantages(batch),
      batch.clip_low,
      batch.clip_high,
      dual_clip,
      bound,
    )

  return loss


def gspo() -> TokenLoss:
  """The clipped surrogate of the sequence's ratio (GSPO).

  With `weights.sequence_mean` it is the paper's objective. Its window is
  some hundred times narrower than a token ratio's: 3e-4 and 4e-4 there.
  """

  def loss(scores: Scores, batch: Batch) -> Float[Array, "B T"]:
    found = log_ratios(scores, batch)
    found = surrogate.sequence_log_ratios(found, batch.weights != 0)
    return surrogate.clipped(
      found, token_advantages(batch), batch.clip_low, batch.clip_high
    )

  return loss


def cispo() -> TokenLoss:
  """REINFORCE under a clipped importance weight; see `surrogate.cispo`."""

  def loss(scores: Scores, batch: Batch) -> Float[Array, "B T"]:
    return surrogate.cispo(
      scores.logprobs,
      log_ratios(scores, batch),
      token_advantages(batch),
      batch.clip_low,
      batch.clip_high,
    )

  return loss


def reinforce() -> TokenLoss:
  """-A log p, whoever sampled the token."""

  def loss(scores: Scores, batch: Batch) -> Float[Array, "B T"]:
    return surrogate.reinforce(scores.logprobs, token_advantages(batch))

  return loss


def score() -> TokenLoss:
  """-log p: maximum likelihood of the tokens as they are."""

  def loss(scores: Scores, batch: Batch) -> Float[Array, "B T"]:
    del batch
    return -scores.logprobs

  return loss


def entropy() -> TokenLoss:
  """-H: adding it with a positive coefficient rewards entropy."""

  def loss(scores: Scores, batch: Batch) -> Float[Array, "B T"]:
    del batch
    return -scores.entropies

  return loss


Divergence = Callable[
  [Float[Array, "B T"], Float[Array, "B T"]], Float[Array, "B T"]
]


def kl(estimator: Divergence = surrogate.k3) -> TokenLoss:
  """An estimate of KL(policy || reference): `surrogate.k1`, `k2` or `k3`."""

  def loss(scores: Scores, batch: Batch) -> Float[Array, "B T"]:
    if batch.ref_logprobs is None:
      raise ValueError(
        "ref_logprobs=None: losses.kl needs the reference policy's log-probs "
        "in the batch"
      )
    return estimator(scores.logprobs, batch.ref_logprobs)

  return loss


def add(*terms: tuple[float, TokenLoss]) -> TokenLoss:
  """sum_k c_k loss_k, from (coefficient, loss) pairs."""
  if not terms:
    raise ValueError("add() needs at least one (coefficient, loss) pair")

  def loss(scores: Scores, batch: Batch) -> Float[Array, "B T"]:
    return sum(c * term(scores, batch) for c, term in terms)

  return loss


def switch(default: TokenLoss, cases: Mapping[Source, TokenLoss]) -> TokenLoss:
  """One loss per source of the rows.

  A loss sees other sources' rows neutralised: where its inputs are not set,
  as advantages of a rescue row are not, neither value nor gradient suffers.
  """

  def loss(scores: Scores, batch: Batch) -> Float[Array, "B T"]:
    used = batch.weights != 0
    rest = jnp.ones(batch.source.shape, bool)
    total = jnp.zeros_like(scores.logprobs)
    parts = []
    for source, case in cases.items():
      mine = batch.source == int(source)
      rest &= ~mine
      parts.append((mine, case))
    for mine, case in [*parts, (rest, default)]:
      mask = used & mine[:, None]
      total += jnp.where(mask, case(*neutralize(scores, batch, mask)), 0.0)
    return total

  return loss


def corrected(
  loss: TokenLoss,
  correction: weights.Correction,
  source: rows_lib.Sources = None,
) -> TokenLoss:
  """Multiplies a loss by a correction of the *current* policy's ratios.

  Its denominator is always `original`: the weights were normalised before
  the current policy was known, over more rows than a microbatch sees. For
  the same reason a correction that ranks tokens across rows, like
  `correction.m2po`, belongs in `weights.correct`. The loss sees a token
  whose factor is 0 as if it had no weight. Rows of other sources than
  `source` stay as they are.
  """

  def apply(scores: Scores, batch: Batch) -> Float[Array, "B T"]:
    used = batch.weights != 0
    mask = used & rows_lib.among(batch, source)[:, None]
    found = jnp.where(mask, log_ratios(scores, batch), 0.0)
    found = correction(jax.lax.stop_gradient(found), mask, batch.advantages)
    factors = jax.lax.stop_gradient(jnp.where(mask, found, 1.0))
    kept = used & (factors != 0)
    found = loss(*neutralize(scores, batch, kept))
    return jnp.where(kept, factors * found, 0.0)

  return apply
