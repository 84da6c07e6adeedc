"""A round in numbers: what the logs, the plots and the display are told.

None of the numbers of `summarize` depends on the clock: two runs of one
configuration report the same, to the bit.
"""

import collections
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mrl_jax import diagnostics, measure, records
from mrl_jax.exchange import publish
from mrl_jax.tasks import verify
from mrl_jax.text import align


def summarize(
  round_: records.Round, reports: Sequence[Any], samples: int
) -> dict[str, int | float]:
  """The round's numbers, none of which depends on the clock.

  What is said of rewards and answers is of the task's prompts alone: groups
  that continue a prefix are told of apart.
  """
  rows = [row for row in round_.own if not row.root]
  rewards = np.asarray([r.reward for r in rows]).reshape(-1, samples)
  right = np.asarray([r.outcome == verify.Outcome.correct.value for r in rows])
  right = right.reshape(-1, samples)
  lengths = np.asarray([len(r.tokens) for r in rows])
  scored = np.isfinite(rewards)
  solved = right.any(axis=1)
  texts = np.asarray([r.text for r in rows], object).reshape(-1, samples)
  distinct = [len(set(t[r])) for t, r in zip(texts, right, strict=True)]
  any_scored = scored.any(axis=1)
  spread = measure.spreads(rewards)
  values = {
    "reward": float(rewards[scored].mean()) if scored.any() else math.nan,
    "pass@1": float(right.mean()),
    f"pass@{samples}": float(solved.mean()),
    "all_correct": float(right.all(axis=1).mean()),
    "all_wrong": float(1 - solved.mean()),
    "distinct": float(np.sum(distinct) / max(solved.sum(), 1)),
    "length": float(lengths.mean()),
    "entropy": float(
      np.concatenate([r.entropies for r in rows]).mean(dtype=np.float64)
    ),
    "degenerate": float((spread[any_scored] <= measure.TIED).mean())
    if any_scored.any()
    else math.nan,
    "unscored": int((~scored).sum()),
    "truncated": float(np.mean([not r.finished for r in rows])),
  }
  for outcome in verify.Outcome:
    count = sum(r.outcome == outcome.value for r in rows)
    values[f"outcome/{outcome.value}"] = count
  values.update(diagnostics.summarize([r["tokens"] for r in reports]))
  if len(reports) > 1:
    values.update(diagnostics.by_staleness(reports))
  if reports:
    for name in ("loss", "grad_norm", "padding"):
      values[name] = float(np.mean([r[name] for r in reports]))
    for name in reports[0]:
      if name.startswith("shaping/"):
        most = np.max if name.endswith("_max") else np.mean
        values[name] = float(most([r[name] for r in reports]))
    values["updates"] = int(reports[-1]["step"])
    values["skipped"] = int(reports[-1]["skipped"])
  return values


def exchanged(
  round_: records.Round,
  published: Mapping[str, int],
  needs: Sequence[str],
  peers: Mapping[str, int],
  mix: float | None = None,
) -> dict[str, int | float]:
  """What a policy got from its peers in the round, in numbers.

  Args:
    round_: after the recipe's `receive`.
    published: records in the shipments that were there, by peer.
    needs: the kinds of record that the recipe listens for.
    peers: their samples per prompt, by name.
    mix: the peers' share in XGRPO's baseline; None is the union's.
  """
  values = counts("exchange", round_)
  values["exchange/published"] = sum(published.values())
  if len(peers) > 1:
    for name in peers:
      values.update(counts(f"exchange/{name}", _of(round_, name)))
  if "trajectory" in needs:
    values.update(_residuals(round_))
  if "values" in needs:
    values.update(_shift(round_, mix))
  if "success" in needs:
    values.update(_rescue(round_, peers))
  return values


def name_of(item: records.Record | records.Foreign | records.Refusal) -> str:
  """The peer that a record, a row or a refusal comes from."""
  if isinstance(item, records.Refusal | records.Foreign):
    return item.peer
  return item.header.policy


def _of(round_: records.Round, peer: str) -> records.Round:
  """The round with what one peer contributed alone."""
  inbox, extra, refused = (
    tuple(item for item in items if name_of(item) == peer)
    for items in (round_.inbox, round_.extra, round_.refused)
  )
  return round_._replace(inbox=inbox, extra=extra, refused=refused)


def counts(prefix: str, round_: records.Round) -> dict[str, int | float]:
  """Admitted, used and refused, the latter also by reason."""
  used = {row.record for row in round_.extra}
  if round_.peers:  # the recipe pools values
    pooled = (r for r in round_.inbox if isinstance(r, records.Values))
    used |= {record.header.id for record in pooled}
  values = {
    f"{prefix}/admitted": len(round_.inbox),
    f"{prefix}/used": len(used),
    f"{prefix}/refused": len(round_.refused),
  }
  reasons = collections.Counter(r.reason for r in round_.refused)
  for reason, count in sorted(reasons.items()):
    values[f"{prefix}/refused/{reason}"] = count
  return values


def _residuals(round_: records.Round) -> dict[str, int | float]:
  """How far the peers' tokens are from own ones: chunks that are not 1:1."""
  found = [
    align.residuals(row.alignment, len(row.logprobs))
    for row in round_.extra
    if row.alignment is not None
  ]
  chunks = sum(f.chunks for f in found)
  split = sum(f.split for f in found)
  return {"peer/split": split / chunks if chunks else 0.0}


def _shift(round_: records.Round, mix: float | None) -> dict[str, int | float]:
  """How far the peers move the baseline of a group, and how many have any."""
  shifts = []
  groups = 0
  for name, group in _groups(round_):
    groups += 1
    own = publish.tally(row.reward for row in group)
    peers = round_.peers.get(name)
    if own.count and peers is not None and peers.count:
      union = peers.count / (own.count + peers.count)
      gap = peers.total / peers.count - own.total / own.count
      shifts.append((union if mix is None else mix) * gap)
  return {
    "values/shared": len(shifts) / groups,
    "values/shift": float(np.mean(shifts)) if shifts else 0.0,
    "values/shift_size": float(np.mean(np.abs(shifts))) if shifts else 0.0,
  }


def _rescue(
  round_: records.Round, peers: Mapping[str, int]
) -> dict[str, int | float]:
  """The rescue set, and its expected share at this round's pass rates.

  P_rescue = (1 - p_n)^G (1 - prod_m (1 - p_m)^G_m), mean over prompts, with
  each policy's share of successes for p; it is what the set's share tends to
  when pass rates are spread evenly over the samples.
  """
  told: dict[str, collections.Counter] = {}
  for record in round_.inbox:
    if isinstance(record, records.Success):
      header = record.header
      told.setdefault(header.prompt_id, collections.Counter())
      told[header.prompt_id][header.policy] += 1
  chances, found = [], 0
  for name, group in _groups(round_):
    right = sum(publish.succeeded(row) for row in group)
    successes = told.get(name, {})
    found += not right and bool(successes)
    none = [(1 - successes.get(p, 0) / g) ** g for p, g in peers.items()]
    fail = (1 - right / len(group)) ** len(group)
    chances.append(fail * (1 - math.prod(none)))
  return {
    "rescue/set": found,
    "rescue/share": found / len(chances),
    "rescue/expected": float(np.mean(chances)),
    "rescue/used": sum(row.rescue for row in round_.extra),
  }


def _groups(
  round_: records.Round,
) -> Iterator[tuple[str, list[records.Rollout]]]:
  """The groups of the task's prompts; peers say nothing of a prefix."""
  for name, group in itertools.groupby(round_.own, lambda r: r.prompt_id):
    rows = list(group)
    if not rows[0].root:
      yield name, rows


def decisions(
  round_: records.Round, published: Mapping[str, int], peers: Sequence[str]
) -> Iterator[dict[str, Any]]:
  """One record per peer: what was there, what was used, what was refused."""
  for name in peers:
    mine = _of(round_, name)
    refused: dict[str, list[str]] = {}
    for refusal in mine.refused:
      refused.setdefault(refusal.reason, []).append(refusal.record)
    values = counts("n", mine)
    yield {
      "policy": round_.policy,
      "round": round_.number,
      "peer": name,
      "published": published.get(name, 0),
      "admitted": values["n/admitted"],
      "used": values["n/used"],
      "refused": refused,
    }


def updates(
  reports: Sequence[Any], first: int = 0
) -> Iterator[dict[str, int | float]]:
  """One record per update: how stale its rows were and what it did."""
  for index, found in enumerate(reports, first):
    values = diagnostics.summarize([found["tokens"]])
    yield {
      **values,
      **{k: v for k, v in found.items() if k != "tokens"},
      "update": index,
    }


def timings(
  seconds: Mapping[str, float], cpu: Mapping[str, float], generated: int
) -> dict[str, int | float]:
  """Wall and CPU seconds per phase; tokens/s of sampling and of all."""
  return {
    **{f"seconds/{name}": value for name, value in seconds.items()},
    **{f"cpu/{name}": value for name, value in cpu.items()},
    "generated": generated,
    "generated_per_second": generated / max(seconds["generate"], 1e-9),
    "tokens_per_second": generated / max(sum(seconds.values()), 1e-9),
  }


def rollouts(round_: records.Round):
  for row in round_.own:
    more = {"root": row.root, "prefix": row.prefix} if row.root else {}
    if row.novelty is not None:
      more["novelty"] = row.novelty
    if row.earned is not None:
      more["earned"] = row.earned.tolist()
    yield {
      **more,
      "policy": round_.policy,
      "round": round_.number,
      "prompt_id": row.prompt_id,
      "sample": row.sample,
      "prompt": row.prompt,
      "completion": row.text,
      "tokens": row.tokens.tolist(),
      "logprobs_mean": float(row.logprobs.mean(dtype=np.float64)),
      "entropy_mean": float(row.entropies.mean(dtype=np.float64)),
      "reward": row.reward,
      "outcome": row.outcome,
      "version": row.version,
      "finish": "stop" if row.finished else "length",
      "answer": row.answer,
    }
