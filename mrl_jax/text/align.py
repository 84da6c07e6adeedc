"""One text in two tokenizers: which tokens of the two sides belong together.

Both sides are cut into chunks, the smallest spans whose ends are token ends
on both. Everything counts bytes, never characters: a token may begin or end
inside a character, where an offset in characters says nothing. A text is
first spelled by its producer's ids and then encoded again by the receiver;
what is not the same bytes on both sides is refused with a reason, so
log-probs are never put on tokens that spell something else.
"""

import codecs
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from mrl_jax import records
from mrl_jax.text import tokenizer as tokenizer_lib


class Spelling(NamedTuple):
  """A completion as its text, its ids and the bytes at which they end."""

  text: str
  tokens: np.ndarray  # [U] i32
  ends: np.ndarray  # [U] i32, counted in bytes of the text's UTF-8


class Residuals(NamedTuple):
  """How far two tokenizations of one text are apart."""

  chunks: int
  split: int  # chunks that are not one token on each side


def spell(
  tokenizer: tokenizer_lib.Tokenizer, ids: tokenizer_lib.Ids, finished: bool
) -> Spelling | str:
  """What sampled ids say, in the producer's own tokens.

  A finished completion keeps its EOS as a last token without bytes. One that
  is not is cut back to the last token end that is the end of a character.

  Returns:
    The spelling, or why there is none: "undecodable" (an id without a token,
    bytes that are no UTF-8), "control" (a control or special token inside the
    text) or "unended" (finished, but the last id is no EOS).
  """
  ids = list(map(int, ids))
  body = ids[:-1] if finished else ids
  if finished and (not ids or ids[-1] not in tokenizer.eos_ids):
    return "unended"
  if body and not 0 <= min(body) <= max(body) < tokenizer.vocab_size:
    return "undecodable"
  if not tokenizer.holes.isdisjoint(body):
    return "undecodable"
  table = tokenizer.token_bytes
  pieces = [table[i] for i in body]
  if None in pieces or not tokenizer.control_ids.isdisjoint(body):
    return "control"
  joined, ends = _join(pieces, tokenizer.spaced)
  if not finished:
    ends = _whole(joined, ends)
    joined = joined[: ends[-1]] if len(ends) else b""
  try:
    text = joined.decode("utf-8")
  except UnicodeDecodeError:
    return "undecodable"
  return _spelling(text, body[: len(ends)], ends, ids[-1:] if finished else [])


def retokenize(
  tokenizer: tokenizer_lib.Tokenizer, text: str, finished: bool
) -> Spelling | str:
  """A peer's text in the receiver's own tokens; ends in EOS if finished.

  Returns:
    The spelling, or why the tokens do not spell the text: "surrogate" (the
    text is no UTF-8), "unknown" (a character outside the vocabulary) or
    "changed" (normalised, or implied spaces are not where the text's are).
  """
  try:
    wanted = text.encode("utf-8")
  except UnicodeEncodeError:
    return "surrogate"
  ids = tokenizer.encode(text)
  table = tokenizer.token_bytes
  pieces = [table[i] for i in ids]
  if None in pieces:
    return "unknown"
  joined, ends = _join(pieces, tokenizer.spaced)
  if joined != wanted:
    return "changed"
  return _spelling(text, ids, ends, tokenizer.eos_ids[:1] if finished else [])


def align(
  source_ends: Int[np.ndarray, "U"], ends: Int[np.ndarray, "T"], finished: bool
) -> records.Alignment:
  """How the tokens of one side lie on those of the other.

  Tokens without bytes (BOS, a prefix that the text does not hold) belong to
  the chunk that follows, and to the last one if none does. What a source
  token without bytes carries goes to the receiver token that covers the next
  byte, so that every chunk keeps all its log-prob.

  Args:
    source_ends: bytes of the text at which the source's tokens end.
    ends: those of the receiver's tokens.
    finished: the last token of both sides is EOS, which is its own chunk.

  Raises:
    ValueError: the ends cannot be those of two tokenizations of one text.
  """
  source, own = _bodies(source_ends, ends, finished)
  found = _align(source, own) if len(own) else _NOTHING
  if not finished:
    return found
  last, place = len(source), len(own)
  eos = records.Alignment(last, 1.0, last, 0.0, place, place + 1, 1.0)
  columns = zip(found, eos, strict=True)
  return records.Alignment(*(_longer(c, x) for c, x in columns))


def chunks(
  source_ends: Int[np.ndarray, "U"],
  ends: Int[np.ndarray, "T"],
  finished: bool = False,
) -> list[tuple[list[int], list[int]]]:
  """The chunks as lists of source and of receiver indices, for people."""
  source, own = _bodies(source_ends, ends, finished)
  found = []
  if len(own):
    common = _common(source, own)
    sides = [_chunk_of(side, common) for side in (source, own)]
    found = [
      tuple(np.flatnonzero(side == c).tolist() for side in sides)
      for c in range(len(common))
    ]
  return [*found, ([len(source)], [len(own)])] if finished else found


def residuals(alignment: records.Alignment, count: int) -> Residuals:
  """Counts chunks, and those that are not one token on each side.

  Args:
    alignment: of a row.
    count: the number of its source's tokens.

  Raises:
    ValueError: the alignment is onto another number of source tokens.
  """
  covered = int(alignment.last.max(initial=-1)) + 1
  if covered != count:
    raise ValueError(
      f"count={count}: the alignment is onto {covered} source tokens"
    )
  width = alignment.chunk_stop - alignment.chunk_start
  first = alignment.chunk_start == np.arange(len(width))
  same = (alignment.first == alignment.last) & (alignment.first_part == 1)
  total = int(first.sum())
  return Residuals(total, total - int((first & same & (width == 1)).sum()))


def _join(pieces: list[bytes], spaced: bool) -> tuple[bytes, np.ndarray]:
  """The bytes that tokens spell, and where each of them ends."""
  joined = b"".join(pieces)
  sizes = np.fromiter(map(len, pieces), np.int32, len(pieces))
  ends = np.cumsum(sizes, dtype=np.int32)
  if spaced and joined.startswith(b" "):  # implied, not in the text
    return joined[1:], ends - 1
  return joined, ends


def _whole(joined: bytes, ends: np.ndarray) -> np.ndarray:
  """The token ends up to the last one that ends a whole character."""
  decoder = codecs.getincrementaldecoder("utf-8")("replace")
  decoder.decode(joined)
  limit = len(joined) - len(decoder.getstate()[0])
  codes = np.frombuffer(joined + b"\0", np.uint8)[ends]  # what follows each
  good = np.flatnonzero((ends <= limit) & (codes & 0xC0 != 0x80))
  return ends[: good[-1] + 1] if len(good) else ends[:0]


def _spelling(text, ids, ends, eos) -> Spelling:
  total = ends[-1:] if len(ends) else [0]
  if len(eos):
    ends = np.concatenate([ends, total])
  tokens = np.fromiter([*ids, *eos], np.int32)
  return Spelling(text, tokens, ends.astype(np.int32))


_KINDS = {"first_part": "f4", "last_part": "f4", "byte_share": "f4"}
_NOTHING = records.Alignment(
  *(np.zeros(0, _KINDS.get(name, "i4")) for name in records.Alignment._fields)
)


def _align(source: np.ndarray, own: np.ndarray) -> records.Alignment:
  """The alignment of two nonempty sides without EOS."""
  total = own[-1]
  starts, source_starts = _starts(own), _starts(source)
  # The source token over the first byte, or one without bytes before it.
  first = np.minimum(
    np.searchsorted(source, starts, "right"),
    np.searchsorted(source_starts, starts, "left"),
  )
  last = np.searchsorted(source_starts, own, "left") - 1
  last[own == total] = len(source) - 1
  if total == 0:  # no bytes at all: the last token has everything
    holds = np.arange(len(own)) == len(own) - 1
  else:
    holds = own > starts
  common = _common(source, own)
  chunk = _chunk_of(own, common)
  heads = _heads(chunk)
  head = _heads(_chunk_of(source, common))[chunk]
  first = np.where(holds, first, head)
  last = np.where(holds, last, head)

  def part(index):
    width = source[index] - source_starts[index]
    low = np.maximum(starts, source_starts[index])
    high = np.minimum(own, source[index])
    return np.where(width > 0, (high - low) / np.maximum(width, 1), 1.0)

  chunk_width = (common - _starts(common))[chunk]
  share = (own - starts) / np.maximum(chunk_width, 1)
  columns = {
    "first": first,
    "first_part": part(first) * holds,
    "last": last,
    "last_part": part(last) * (holds & (last > first)),
    "chunk_start": heads[chunk],
    "chunk_stop": _longer(heads[1:], len(own))[chunk],
    "byte_share": np.where(chunk_width > 0, share, holds),
  }
  return records.Alignment(
    **{k: v.astype(_KINDS.get(k, "i4")) for k, v in columns.items()}
  )


def _common(source: np.ndarray, own: np.ndarray) -> np.ndarray:
  """The bytes at which both sides end a token, increasing; never empty."""
  shared = own[source[np.searchsorted(source, own)] == own]
  # A shared end at 0 only says that both begin with tokens without bytes.
  fresh = shared > _starts(shared)
  return shared[fresh] if own[-1] else own[-1:]


def _chunk_of(ends: np.ndarray, common: np.ndarray) -> np.ndarray:
  """The chunk of each token: the first that ends behind the token's start."""
  found = np.searchsorted(common, _starts(ends), "right")
  return np.minimum(found, len(common) - 1)


def _heads(chunk: np.ndarray) -> np.ndarray:
  """The first token of each chunk."""
  new = np.empty(len(chunk), bool)
  new[0] = True
  np.not_equal(chunk[1:], chunk[:-1], out=new[1:])
  return np.flatnonzero(new)


def _starts(ends: np.ndarray) -> np.ndarray:
  """Where each token starts: 0, and where the one before it ends."""
  starts = np.zeros_like(ends)  # np.append costs as much as all the rest here
  starts[1:] = ends[:-1]
  return starts


def _longer(values: np.ndarray, last: int | float) -> np.ndarray:
  found = np.empty(len(values) + 1, values.dtype)
  found[:-1], found[-1] = values, last
  return found


def _bodies(source_ends, ends, finished) -> tuple[np.ndarray, np.ndarray]:
  """Both sides, checked and without their EOS."""
  sides = {"source_ends": source_ends, "ends": ends}
  bodies = []
  for name, side in sides.items():
    side = np.asarray(side)
    steps = side - _starts(side)
    if (steps < 0).any():
      raise ValueError(f"{name} must not decrease, from 0 on: {side.tolist()}")
    if finished and (not len(side) or steps[-1] != 0):
      raise ValueError(
        f"finished=True: {name} must end in an EOS without bytes, and ends in"
        f" {side[-2:].tolist()}"
      )
    bodies.append(side[:-1] if finished else side)
  source, own = bodies
  totals = [int(side[-1]) if len(side) else 0 for side in bodies]
  if totals[0] != totals[1] or bool(len(source)) != bool(len(own)):
    raise ValueError(
      f"source_ends and ends must be of one text: {len(source)} tokens end at"
      f" byte {totals[0]}, {len(own)} at byte {totals[1]}"
    )
  return source, own
