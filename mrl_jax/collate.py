"""The bridge from host records to device batches: padding and buckets.

This is the only place where lists become the arrays of a `Batch`. Lengths
are rounded up to a short ladder of sizes, so a run compiles a handful of
shapes and not one per batch; what is padded carries weight 0.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mrl_jax import records
from mrl_jax.types import Batch, Peers, Source, Trace


def bucket(length: int, multiple: int = 8) -> int:
  """The least size of the ladder that holds `length` tokens.

  The ladder has four steps per doubling and starts at `multiple`: a padded
  shape is at most a quarter wider than what it holds.
  """
  size = multiple
  while size < length:
    size += max(multiple, 1 << max(0, size.bit_length() - 3))
  return size


def left_pad(
  prompts: Sequence[Sequence[int]],
) -> tuple[np.ndarray, np.ndarray]:
  """[N, P] i32 ids, left-padded to a bucket, and lengths [N] i32."""
  lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
  width = bucket(int(lengths.max()))
  context = np.zeros((len(prompts), width), np.int32)
  for row, prompt in enumerate(prompts):
    context[row, width - len(prompt) :] = prompt
  return context, lengths


def right_pad(rows: Sequence[np.ndarray], width: int, kind) -> np.ndarray:
  """[B, width] of `kind`, zero beyond each row's length."""
  out = np.zeros((len(rows), width), kind)
  for index, row in enumerate(rows):
    out[index, : len(row)] = row
  return out


def batch(
  rows: Iterable[records.Rollout],
  extra: Iterable[records.Foreign] = (),
  slots: int = 0,
  peers: Mapping[str, records.Tally] | None = None,
  *,
  earned: bool = False,
) -> Batch:
  """A `Batch` of NumPy arrays from rollouts whose groups stand together.

  Advantages and clip ranges are NaN until a transform sets them. Weights
  are the loss mask: 1 on every completion token, EOS included. The bonus is
  a row's novelty, 0 where there is none; it and what was earned need a
  transform that makes something of them.

  Args:
    rows: own rollouts, equally many of each prompt.
    extra: peers' completions on the same prompts.
    slots: rows that stand behind each group for them; what is not filled has
      weight 0 and no reward.
    peers: what the peers earned, by prompt id.
    earned: writes as credit what own tokens earned, where that is known, for
      a transform such as `advantages.return_to_go`; else credit is 0.
  """
  rows = _grouped(tuple(rows), extra, slots)
  count = len(rows)
  lengths = np.asarray([len(row.tokens) for row in rows])
  width = bucket(int(lengths.max()))
  context, context_lengths = left_pad([row.context for row in rows])
  names: dict[str, int] = {}
  group = [names.setdefault(row.prompt_id, len(names)) for row in rows]
  mask = np.arange(width)[None, :] < lengths[:, None]
  unset = np.full((count,), np.nan, np.float32)
  return Batch(
    context=context,
    context_lengths=context_lengths,
    tokens=right_pad([row.tokens for row in rows], width, np.int32),
    weights=mask.astype(np.float32),
    behavior_logprobs=right_pad(
      [row.logprobs for row in rows], width, np.float32
    ),
    rewards=np.asarray([row.reward for row in rows], np.float32),
    advantages=unset,
    credit=right_pad(
      [row.earned if earned else _NOTHING for row in rows], width, np.float32
    ),
    bonus=np.asarray([row.novelty for row in rows], np.float32),
    clip_low=unset,
    clip_high=unset,
    group=np.asarray(group, np.int32),
    source=np.asarray([row.source for row in rows], np.int32),
    version=np.asarray([row.version for row in rows], np.int32),
    peers=_peers([(peers or {}).get(row.prompt_id) for row in rows]),
    trace=_trace([row.foreign for row in rows], width),
  )


_NOTHING = np.zeros((0,), np.float32)


class _Row(NamedTuple):
  """A row of a batch, wherever it comes from."""

  prompt_id: str
  context: Sequence[int]
  tokens: np.ndarray
  logprobs: np.ndarray
  reward: float
  source: int
  version: int = 0  # of own rows
  novelty: float = 0.0  # of own rows
  earned: np.ndarray = _NOTHING  # of own rows
  foreign: records.Foreign | None = None


def _grouped(
  own: tuple[records.Rollout, ...],
  extra: Iterable[records.Foreign],
  slots: int,
) -> list[_Row]:
  """Own rows of each prompt, and its slots behind them."""
  by_prompt: dict[str, list[records.Foreign]] = {}
  for row in extra:
    by_prompt.setdefault(row.prompt_id, []).append(row)
  out: list[_Row] = []
  for name, group in itertools.groupby(own, lambda row: row.prompt_id):
    mine = list(group)
    out += [_own(row) for row in mine]
    found = by_prompt.pop(name, [])
    if len(found) > slots:
      raise ValueError(f"slots={slots}: prompt {name!r} has {len(found)} extra")
    where = (name, mine[0].context)
    out += [_foreign(row, *where) for row in found]
    blank = _Row(*where, _NOTHING, _NOTHING, np.nan, int(Source.PEER))
    out += [blank] * (slots - len(found))
  if by_prompt:
    raise ValueError(
      f"extra rows on prompts that are not there: {[*by_prompt]}"
    )
  return out


def _own(row: records.Rollout) -> _Row:
  return _Row(
    row.prompt_id,
    row.context,
    row.tokens,
    row.logprobs,
    row.reward,
    int(Source.REGEN if row.root else Source.OWN),
    row.version,
    row.novelty or 0.0,
    _NOTHING if row.earned is None else row.earned,
  )


def _foreign(
  row: records.Foreign, prompt_id: str, context: Sequence[int]
) -> _Row:
  source = Source.RESCUE if row.rescue else Source.PEER
  return _Row(
    prompt_id,
    context,
    row.tokens,
    _NOTHING,
    row.reward,
    int(source),
    foreign=row,
  )


def _peers(tallies: Sequence[records.Tally | None]) -> Peers:
  """Mean and variance from sums, in float64; no reward has neither."""
  nothing = records.Tally(0.0, 0.0, 0.0)
  sums = np.asarray([tally or nothing for tally in tallies], np.float64)
  count, total, square = sums.T
  mean = total / np.maximum(count, 1.0)
  variance = square / np.maximum(count, 1.0) - mean**2
  found = (count, mean, np.maximum(variance, 0.0))
  return Peers(*(part.astype(np.float32) for part in found))


def _trace(rows: Sequence[records.Foreign | None], width: int) -> Trace | None:
  """The alignments of the rows that have one; None where none has."""
  aligned = [
    row if row is not None and row.alignment is not None else None
    for row in rows
  ]
  if not any(aligned):
    return None
  longest = max(len(row.logprobs) for row in aligned if row)
  columns = {
    name: right_pad(
      [getattr(row.alignment, name) if row else _NOTHING for row in aligned],
      width,
      np.float32 if name.endswith(("part", "share")) else np.int32,
    )
    for name in records.Alignment._fields
  }
  logprobs = [row.logprobs if row else _NOTHING for row in aligned]
  return Trace(
    logprobs=right_pad(logprobs, bucket(longest), np.float32), **columns
  )
