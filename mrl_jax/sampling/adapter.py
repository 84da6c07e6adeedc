"""Sampling by somebody else's engine, under the sampler's own interface.

An engine that runs elsewhere takes requests and answers them in any order;
`adapt` makes it a `Generate`. It is trusted for what it draws and not for
its bookkeeping: an answer that is missing, doubled or malformed would shift
log-probs against tokens in silence, so it is an error.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mrl_jax import collate
from mrl_jax.sampling import engine


class Request(NamedTuple):
  """One completion that is wanted."""

  number: int  # of the row; the answer bears it
  prompt: tuple[int, ...]
  words: tuple[int, ...]  # 32-bit words that name the row, for its key
  limit: int  # most tokens of the completion


class Completion(NamedTuple):
  """The answer to the request of the same number."""

  number: int
  tokens: Sequence[int]  # EOS included
  logprobs: Sequence[float]  # of the exact distribution it was drawn from
  finished: bool  # stopped by an EOS id, not by the limit
  entropies: Sequence[float] | None = None  # in nats; None: not known


Complete = Callable[[Any, Sequence[Request]], Iterable[Completion]]


def adapt(
  complete: Complete, samples: int, limit: int | None = None
) -> engine.Generate:
  """Makes any engine a `Generate`.

  Args:
    complete: takes the parameters and all requests of a call; yields each
      one's completion, in any order.
    samples: G, completions per prompt.
    limit: most completion tokens, told in every request; None: 2^31 - 1.

  Raises:
    ValueError: by `generate`, where a request is not answered exactly once,
      or an answer's lengths do not agree or are not in [1, limit].
  """
  most = 2**31 - 1 if limit is None else limit

  def generate(params, prompts, ids) -> engine.Samples:
    count = len(prompts) * samples
    names = np.asarray(ids, np.uint32).reshape(count, -1).tolist()
    requests = tuple(
      Request(n, tuple(prompts[n // samples]), tuple(names[n]), most)
      for n in range(count)
    )
    found: dict[int, Completion] = {}
    for completion in complete(params, requests):
      _check(completion, count, most, found)
      found[completion.number] = completion
    missing = [n for n in range(count) if n not in found]
    if missing:
      raise ValueError(
        f"requests {missing[:8]} have no completion: each of the {count} "
        "needs exactly one"
      )
    return _samples([found[n] for n in range(count)])

  return generate


def _check(completion, count, most, found) -> None:
  number = completion.number
  if number not in range(count):
    raise ValueError(f"completion number {number} is not in [0, {count})")
  if number in found:
    raise ValueError(f"completion number {number} came twice; allowed is once")
  length = len(completion.tokens)
  if not 1 <= length <= most:
    raise ValueError(
      f"completion number {number} has {length} tokens; allowed is 1 to {most}"
    )
  for name in ("logprobs", "entropies"):
    values = getattr(completion, name)
    if values is not None and len(values) != length:
      raise ValueError(
        f"completion number {number}: {name} has length {len(values)}; it "
        f"must be that of its tokens, {length}"
      )


def _samples(rows: Sequence[Completion]) -> engine.Samples:
  lengths = np.asarray([len(row.tokens) for row in rows], np.int32)
  width = int(lengths.max())

  def join(columns, kind):
    return collate.right_pad([np.asarray(c) for c in columns], width, kind)

  unknown = [np.full(length, np.nan) for length in lengths]
  entropies = [
    nothing if row.entropies is None else row.entropies
    for row, nothing in zip(rows, unknown, strict=True)
  ]
  return engine.Samples(
    join([row.tokens for row in rows], np.int32),
    lengths,
    join([row.logprobs for row in rows], np.float32),
    join(entropies, np.float32),
    np.asarray([row.finished for row in rows], bool),
  )
