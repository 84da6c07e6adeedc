"""The bridge from host records to device batches: padding and buckets.

This is the only place where lists become the arrays of a `Batch`. Lengths
are rounded up to a short ladder of sizes, so a run compiles a handful of
shapes and not one per batch; what is padded carries weight 0.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from mrl_jax import records
from mrl_jax.types import Batch, Peers, Source


def bucket(length: int, multiple: int = 16) -> int:
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


def batch(rows: Iterable[records.Rollout]) -> Batch:
  """A `Batch` of NumPy arrays from rollouts whose groups stand together.

  Advantages and clip ranges are NaN until a transform sets them. Weights
  are the loss mask: 1 on every completion token, EOS included.
  """
  rows = tuple(rows)
  count = len(rows)
  lengths = np.asarray([len(row.tokens) for row in rows])
  width = bucket(int(lengths.max()))
  context, context_lengths = left_pad([row.context for row in rows])
  names: dict[str, int] = {}
  group = [names.setdefault(row.prompt_id, len(names)) for row in rows]
  mask = np.arange(width)[None, :] < lengths[:, None]
  nothing = np.zeros((count,), np.float32)
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
    credit=np.zeros((count, width), np.float32),
    bonus=nothing,
    clip_low=unset,
    clip_high=unset,
    group=np.asarray(group, np.int32),
    source=np.full((count,), int(Source.OWN), np.int32),
    peers=Peers(nothing, nothing, nothing),
  )
