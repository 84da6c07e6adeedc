"""From what a verifier says of a completion's steps to its tokens.

A verifier reads text, so it counts characters; a policy learns from tokens.
What a step earned is earned by the token that wrote its last character: a
token may hold several characters, or a part of one that a later token
completes.
"""

import codecs
import math

import numpy as np
from jaxtyping import Int

from mrl_jax import records
from mrl_jax.tasks import verify
from mrl_jax.text import tokenizer as tokenizer_lib


def earned(
  tokenizer: tokenizer_lib.Tokenizer,
  row: records.Rollout,
  verdict: verify.Verdict,
) -> np.ndarray | None:
  """What was earned when each of the row's tokens was written, [T] f32.

  None where the verifier speaks of the end alone. The last token earns what
  the steps leave of the reward. What a prefix had earned already is left
  out: it is the same for all rows that continue it, so it leaves their
  advantages, which compare whole rewards, as they are.
  """
  if not verdict.steps:
    return None
  before = row.context[len(row.context) - row.prefix :]
  ids = [*before, *row.tokens.tolist()]
  ends, rewards = zip(*verdict.steps, strict=True)
  found = np.zeros(len(ids))
  places = np.searchsorted(characters(tokenizer, ids), ends)
  np.add.at(found, places, rewards)
  found[-1] += verdict.reward - math.fsum(rewards)
  return found[row.prefix :].astype(np.float32)


def characters(
  tokenizer: tokenizer_lib.Tokenizer, ids: tokenizer_lib.Ids
) -> Int[np.ndarray, "T"]:
  """How many characters of `tokenizer.decode(ids)` are there after each."""
  decoder = codecs.getincrementaldecoder("utf-8")("replace")
  table = tokenizer.token_bytes
  started = not tokenizer.spaced  # else the text's first space is implied
  lengths = []
  for number in map(int, ids):
    known = 0 <= number < len(table) and number not in tokenizer.holes
    piece = (table[number] if known else None) or b""
    if piece and not started:
      piece, started = piece.removeprefix(b" "), True
    lengths.append(len(decoder.decode(piece)))
  return np.cumsum(lengths, dtype=np.int64)
