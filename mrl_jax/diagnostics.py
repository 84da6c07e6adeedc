"""How far the policy is from whoever sampled its tokens, per source of rows.

`measure` runs inside the jitted step and returns sums, so microbatches and
updates add (`merge`); `summarize` turns them into numbers on the host. Every
token of non-zero weight counts once, whatever its weight.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mrl_jax import losses
from mrl_jax.kernels import moments, potentials, realign, surrogate
from mrl_jax.kernels import veto as veto_lib
from mrl_jax.transforms import rows as rows_lib
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
  ratio_max: Any
  ratio_square: Any
  kl: Any  # sum of exp(d) - 1 - d
  entropy: Any
  logprob: Any
  ref_kl: Any  # k3 to the reference, or None
  # Of the peers' rows that have a trace: w is the ratio of a whole chunk
  # between this policy and the peer; None without any.
  chunks: Any = None
  weight: Any = None
  weight_square: Any = None
  # Of the policy's own rows under a veto (see `veto.Counts`); None without.
  vetoed: Any = None
  negative_rows: Any = None
  vetoed_rows: Any = None
  veto_position: Any = None


def measure(
  scores: Scores, batch: Batch, veto: veto_lib.Rule | None = None
) -> Sums:
  """The sums of a batch, by `batch.source`; without gradient.

  `veto` is the rule that the loss applies to the policy's own rows.
  """
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

  def by_source(x):
    return jax.ops.segment_sum(x, batch.source, len(Source))

  def total(x):
    return by_source(jnp.where(mask, x.astype(jnp.float32), 0.0).sum(-1))

  def greatest(x):
    found = jnp.where(mask, x, 0.0).max(-1)
    found = jax.ops.segment_max(found, batch.source, len(Source))
    return jnp.maximum(found, 0.0)  # -inf: no such row

  distance = jnp.abs(d)
  counts = veto_lib.Counts(None, None, None, None)
  if veto is not None:
    own = mask & rows_lib.among(batch, rows_lib.OWN_SAMPLES)[:, None]
    found = veto_lib.measure(d, own, batch.advantages, veto)
    counts = veto_lib.Counts(*(by_source(x) for x in found))
  chunks = weight = weight_square = None
  if batch.trace is not None:
    ends, w = _chunk_weights(scores, batch, mask)
    chunks, weight, weight_square = map(total, (ends, ends * w, ends * w * w))
  return Sums(
    rows=by_source(mask.any(-1).astype(jnp.float32)),
    tokens=total(mask),
    positive=total(positive),
    negative=total(negative),
    clipped_high=total(high),
    clipped_low=total(low),
    distance=total(distance),
    distance_max=greatest(distance),
    ratio=total(r),
    ratio_max=greatest(r),
    ratio_square=total(r * r),
    # The samples are the behaviour's, so this estimates KL(behaviour||policy).
    kl=total(surrogate.k3(batch.behavior_logprobs, scores.logprobs)),
    entropy=total(scores.entropies),
    logprob=total(scores.logprobs),
    ref_kl=None if ref_kl is None else total(ref_kl),
    chunks=chunks,
    weight=weight,
    weight_square=weight_square,
    vetoed=counts.tokens,
    negative_rows=counts.negative,
    vetoed_rows=counts.rows,
    veto_position=counts.position,
  )


def _chunk_weights(scores: Scores, batch: Batch, mask):
  """Where a peer's chunk ends, and exp(sum_{j in c} lp_j - L_c) there.

  Compares with the peer itself, whatever the loss takes for the behaviour.
  """
  trace = batch.trace
  apart = jnp.where(mask, scores.logprobs - realign.collect(trace), 0.0)
  ratios = surrogate.ratios(realign.chunk_sums(apart, trace), 10.0)
  steps = jax.lax.broadcasted_iota(jnp.int32, mask.shape, 1)
  ends = mask & (steps + 1 == trace.chunk_stop)
  ends &= (batch.source == int(Source.PEER))[:, None]
  return ends.astype(jnp.float32), jnp.where(ends, ratios, 0.0)


_MAXIMA = ("distance_max", "ratio_max")


def shaping(batch: Batch) -> dict[str, Any]:
  """What a potential says of the own rows; nothing where there is none.

  "shaping/phi": the mean of phi over tokens, which shaping should leave at
  0; "shaping/phi_std"; "shaping/radius" and "shaping/radius_max": the d of
  the bounds, half of max - min of Phi within a prompt, mean and greatest;
  "shaping/scale": what phi is divided by.
  """
  if batch.shaping is None:
    return {}
  mask = batch.weights != 0
  mask &= rows_lib.among(batch, rows_lib.OWN_SAMPLES)[:, None]
  phi = potentials.telescoping(batch.shaping.potentials, mask)
  count = jnp.maximum(mask.sum(), 1)
  mean = phi.sum() / count
  square = jnp.where(mask, (phi - mean) ** 2, 0.0).sum() / count
  real = mask.any(-1)
  whole = potentials.last(batch.shaping.potentials, mask)
  spreads = moments.spread(whole, batch.group, real)
  some = jnp.isfinite(spreads)
  radii = jnp.where(some, spreads / 2, 0.0)
  return {
    "shaping/phi": mean,
    "shaping/phi_std": jnp.sqrt(square),
    "shaping/radius": radii.sum() / jnp.maximum(some.sum(), 1),
    "shaping/radius_max": radii.max(),
    "shaping/scale": batch.shaping.scale[0],
  }


def zeros(like: Sums) -> Sums:
  """What `merge` leaves anything unchanged by; `like` may be abstract."""
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)


def merge(a: Sums, b: Sums) -> Sums:
  """The sums of both: added, and the greater of the maxima."""
  both = jax.tree.map(lambda x, y: x + y, a, b)
  maxima = {k: jnp.maximum(getattr(a, k), getattr(b, k)) for k in _MAXIMA}
  return both._replace(**maxima)


def summarize(sums: Sequence[Sums]) -> dict[str, float]:
  """The numbers of some updates together; host side.

  For own rows "clip_low", "clip_high" (shares of the tokens of negative and
  of positive advantage), "log_ratio_mean", "log_ratio_max" (of |d|),
  "ratio_max", "ess" ((sum r)^2 / (N sum r^2)), "kl", "entropy", "nll" (mean
  -log p) and, with a reference, "ref_kl"; for other sources the same behind
  "peer/", "rescue/" or "regen/". Peers' rows also have "chi2" (mean w^2 - 1)
  and "chunk_ess", of the weights of whole chunks against the peer that sampled
  them. Under a veto own rows have "veto" (share of tokens), "veto_rows" (share
  of the rows of negative advantage) and "veto_position" (mean share of such a
  row's tokens that stand before its trigger). A source without tokens is left
  out; a share of nothing is 0.
  """
  values: dict[str, float] = {}
  if not sums:
    return values
  if any(s.chunks is not None for s in sums):
    sums = [s if s.chunks is not None else _no_chunks(s) for s in sums]
  stacked = jax.tree.map(
    lambda *x: np.stack([np.asarray(y, np.float64) for y in x]), *sums
  )
  added = jax.tree.map(lambda x: x.sum(0), stacked)
  maxima = {k: getattr(stacked, k).max(0) for k in _MAXIMA}
  added = added._replace(**maxima)
  for source in Source:
    one = jax.tree.map(lambda x, s=source: float(x[s]), added)
    if not one.tokens:
      continue
    prefix = "" if source == Source.OWN else f"{source.name.lower()}/"
    numbers = _numbers(one)
    if source == Source.RESCUE:  # text without log-probs: no ratio
      numbers = {k: numbers[k] for k in ("nll", "entropy")}
    if one.vetoed is not None and source in rows_lib.OWN_SAMPLES:
      numbers.update(_vetoed(one))
    values.update({prefix + k: v for k, v in numbers.items()})
  return values


def by_staleness(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """What own rows look like as they grow stale; host side.

  Some of the numbers of `summarize`, over the updates whose rows are equally
  many updates old to a factor of four: "stale/0/kl", "stale/1-3/kl",
  "stale/4-15/kl" and so on.
  """
  ages: dict[int, list[Sums]] = {}
  for report in reports:
    step = (int(report["staleness"]).bit_length() + 1) // 2
    ages.setdefault(step, []).append(report["tokens"])
  values = {}
  for step in sorted(ages):
    name = f"{4 ** (step - 1)}-{4**step - 1}" if step else "0"
    found = summarize(ages[step])
    for key in ("clip_low", "clip_high", "veto", "kl", "ess"):
      if key in found:
        values[f"stale/{name}/{key}"] = found[key]
  return values


def first_gap(report: Mapping[str, Any]) -> float:
  """The greatest |log r| of the update's own tokens.

  Right after the log-probs were computed anew it is rounding, and no more.
  """
  return float(report["tokens"].distance_max[Source.OWN])


def _no_chunks(sums: Sums) -> Sums:
  """Of an update in which no peer's row had a trace."""
  nothing = np.zeros(len(Source))
  return sums._replace(chunks=nothing, weight=nothing, weight_square=nothing)


def _numbers(one: Sums) -> dict[str, float]:
  values = {
    "clip_low": one.clipped_low / max(one.negative, 1.0),
    "clip_high": one.clipped_high / max(one.positive, 1.0),
    "log_ratio_mean": one.distance / one.tokens,
    "log_ratio_max": one.distance_max,
    "ratio_max": one.ratio_max,
    "ess": one.ratio**2 / (one.tokens * one.ratio_square),
    "kl": one.kl / one.tokens,
    "entropy": one.entropy / one.tokens,
    "nll": -one.logprob / one.tokens,
  }
  if one.chunks:
    values["chi2"] = one.weight_square / one.chunks - 1.0
    values["chunk_ess"] = one.weight**2 / (one.chunks * one.weight_square)
  if one.ref_kl is not None:
    values["ref_kl"] = one.ref_kl / one.tokens
  return values


def _vetoed(one: Sums) -> dict[str, float]:
  return {
    "veto": one.vetoed / one.tokens,
    "veto_rows": one.vetoed_rows / max(one.negative_rows, 1.0),
    "veto_position": one.veto_position / max(one.vetoed_rows, 1.0),
  }
