"""How far the policy is from whoever sampled its tokens, per source of rows.

`measure` runs inside the jitted step and returns sums, so microbatches and
updates add (`merge`); `summarize` turns them into numbers on the host. Every
token of non-zero weight counts once, whatever its weight.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mrl_jax import losses
from mrl_jax.kernels import surrogate
from mrl_jax.types import Batch, Scores, Source


class Sums(NamedTuple):
  """Per source, each leaf [4] float32; r is the ratio, d its log."""

  rows: Any  # with a token of non-zero weight
  tokens: Any
  positive: Any  # tokens of positive advantage
  negative: Any
  clipped_high: Any  # positive and r > 1 + clip_high
  clipped_low: Any  # negative and r < 1 - clip_low
  distance: Any  # sum |d|
  distance_max: Any  # max |d|
  ratio: Any
  ratio_square: Any
  kl: Any  # sum of exp(d) - 1 - d
  entropy: Any
  ref_kl: Any  # k3 to the reference, or None


def measure(scores: Scores, batch: Batch) -> Sums:
  """The sums of a batch, by `batch.source`; without gradient."""
  mask = batch.weights != 0
  scores, batch = losses.neutralize(scores, batch, mask)
  scores = jax.lax.stop_gradient(scores)
  d = losses.log_ratios(scores, batch)
  r = surrogate.ratios(d)
  advantages = losses.token_advantages(batch)
  positive, negative = mask & (advantages > 0), mask & (advantages < 0)
  high = positive & (r > 1 + batch.clip_high[:, None])
  low = negative & (r < 1 - batch.clip_low[:, None])
  ref_kl = None
  if batch.ref_logprobs is not None:
    ref_kl = surrogate.k3(scores.logprobs, batch.ref_logprobs)

  def total(x):
    per_row = jnp.where(mask, x.astype(jnp.float32), 0.0).sum(-1)
    return jax.ops.segment_sum(per_row, batch.source, len(Source))

  distance = jnp.abs(d)
  furthest = jax.ops.segment_max(distance.max(-1), batch.source, len(Source))
  rows = mask.any(-1).astype(jnp.float32)
  return Sums(
    rows=jax.ops.segment_sum(rows, batch.source, len(Source)),
    tokens=total(mask),
    positive=total(positive),
    negative=total(negative),
    clipped_high=total(high),
    clipped_low=total(low),
    distance=total(distance),
    distance_max=jnp.maximum(furthest, 0.0),  # -inf: no such row
    ratio=total(r),
    ratio_square=total(r * r),
    # The samples are the behaviour's, so this estimates KL(behaviour||policy).
    kl=total(surrogate.k3(batch.behavior_logprobs, scores.logprobs)),
    entropy=total(scores.entropies),
    ref_kl=None if ref_kl is None else total(ref_kl),
  )


def zeros(like: Sums) -> Sums:
  """What `merge` leaves anything unchanged by; `like` may be abstract."""
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)


def merge(a: Sums, b: Sums) -> Sums:
  """The sums of both: added, and the greater of the maxima."""
  both = jax.tree.map(lambda x, y: x + y, a, b)
  furthest = jnp.maximum(a.distance_max, b.distance_max)
  return both._replace(distance_max=furthest)


def summarize(sums: Sequence[Sums]) -> dict[str, float]:
  """The numbers of some updates together; host side.

  For own rows "clip_low", "clip_high" (shares of the tokens of negative and
  of positive advantage), "log_ratio_mean", "log_ratio_max" (of |d|), "ess"
  ((sum r)^2 / (N sum r^2)), "kl", "entropy" and, with a reference, "ref_kl";
  for other sources the same behind "peer/", "rescue/" or "regen/". A source
  without tokens is left out; a share of nothing is 0.
  """
  values: dict[str, float] = {}
  if not sums:
    return values
  stacked = jax.tree.map(
    lambda *x: np.stack([np.asarray(y, np.float64) for y in x]), *sums
  )
  added = jax.tree.map(lambda x: x.sum(0), stacked)
  added = added._replace(distance_max=stacked.distance_max.max(0))
  for source in Source:
    one = jax.tree.map(lambda x, s=source: float(x[s]), added)
    if not one.tokens:
      continue
    prefix = "" if source == Source.OWN else f"{source.name.lower()}/"
    values.update({prefix + k: v for k, v in _numbers(one).items()})
  return values


def _numbers(one: Sums) -> dict[str, float]:
  values = {
    "clip_low": one.clipped_low / max(one.negative, 1.0),
    "clip_high": one.clipped_high / max(one.positive, 1.0),
    "log_ratio_mean": one.distance / one.tokens,
    "log_ratio_max": one.distance_max,
    "ess": one.ratio**2 / (one.tokens * one.ratio_square),
    "kl": one.kl / one.tokens,
    "entropy": one.entropy / one.tokens,
  }
  if one.ref_kl is not None:
    values["ref_kl"] = one.ref_kl / one.tokens
  return values
