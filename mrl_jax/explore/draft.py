"""A hard prompt's surest answer, and the item that a cut makes of it."""

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mrl_jax import records
from mrl_jax.explore import prefixes, queue
from mrl_jax.model import encoder
from mrl_jax.tasks import dataset


class Draft(NamedTuple):
  """An answer that is to be cut."""

  like: queue.Item  # with all but the prefix
  tokens: tuple[int, ...]  # of the whole answer
  entropies: np.ndarray  # [T] f32, of its tokens
  places: list[int]  # after how many tokens it may be cut
  decode: Callable[[Sequence[int]], str]

  def responses(self) -> list[encoder.Response]:
    """The candidates, as an embedder reads them."""
    heads = (self.tokens[:place] for place in self.places)
    return [
      encoder.Response(self.like.context, head, self.decode(head))
      for head in heads
    ]

  def random(self, words: Sequence[int | str]) -> int:
    """One of the places, a function of `words` and the item's id alone."""
    text = repr((*words, self.like.problem.id)).encode()
    seed = int.from_bytes(hashlib.sha256(text).digest()[:8], "big")
    return int(np.random.default_rng(seed).choice(self.places))

  def cut(self, place: int) -> queue.Item:
    """The item that keeps the first `place` tokens."""
    return self.like._replace(
      prefix=self.tokens[:place],
      entropies=tuple(self.entropies[:place].tolist()),
    )


def make(
  rows: Sequence[records.Rollout],
  problem: dataset.Problem,
  position: int,
  number: int,
  parent: queue.Item | None,
  rule: prefixes.Rule,
  decode: Callable[[Sequence[int]], str],
) -> Draft | str:
  """The draft of a hard group, or why there is none.

  "too_deep": it was cut as often as allowed; "no_entropy": the engine told
  none; "no_cut": there is no place to cut.

  Args:
    rows: the group's.
    problem: that the group is about.
    position: of its prompt in the task's order.
    number: of the round.
    parent: the item that the group continues, if it does.
    rule: says where to cut.
    decode: from ids to text.
  """
  depth = parent.depth + 1 if parent else 1
  if depth > rule.depth:
    return "too_deep"
  sure = [
    row.entropies.mean(dtype=np.float64)
    if len(row.entropies) and np.isfinite(row.reward)
    else np.nan
    for row in rows
  ]
  if not np.isfinite(sure).any():
    return "no_entropy"
  row = rows[int(np.nanargmin(sure))]
  head = parent.prefix if parent else ()
  tokens = (*head, *row.tokens.tolist())
  before = np.asarray(parent.entropies if parent else (), np.float32)
  lines = rule.boundary == "lines"  # else no piece is looked at
  pieces = [decode([token]) if lines else "" for token in tokens]
  places = prefixes.boundaries(pieces, row.finished, rule, len(head))
  if rule.choice != "restart" and not places:
    return "no_cut"
  like = queue.Item(
    problem=problem._replace(id=f"{problem.id}~{number}"),
    root=row.root or problem.id,
    position=position,
    context=row.context[: len(row.context) - row.prefix],
    prefix=(),
    entropies=(),
    depth=depth,
    round=number,
    passed=float(np.mean([r.outcome == "correct" for r in rows])),
  )
  entropies = np.concatenate([before, row.entropies])
  return Draft(like, tokens, entropies, places, decode)
