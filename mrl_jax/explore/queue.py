"""The prefixes that wait to be continued, and what each is graded against.

An item is a problem of its own: it carries the answer of the prompt that it
was cut from, so it is graded right whichever prompt's slot it takes. On disk
it is kept by its position in the task's order, from which the problem comes
back whole.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mrl_jax.tasks import dataset


class Item(NamedTuple):
  """A prompt and the beginning of an answer to it."""

  problem: dataset.Problem  # its id is this item's own
  root: str  # the id of the task's prompt
  position: int  # of that prompt in the task's order
  context: tuple[int, ...]  # the rendered prompt's ids
  prefix: tuple[int, ...]  # ids that the policy sampled; may be empty
  entropies: tuple[float, ...]  # of the prefix's tokens, in nats
  depth: int  # 1: cut from an answer to the prompt itself
  round: int  # of that answer
  passed: float  # pass rate of the group that it was cut from

  @property
  def whole(self) -> tuple[int, ...]:
    """The ids that the policy continues from."""
    return (*self.context, *self.prefix)


class Queue(NamedTuple):
  """Items in the order in which they came."""

  items: tuple[Item, ...] = ()
  dropped: int = 0  # by `push`, so far: the oldest, for want of room

  def push(self, found: Sequence[Item], most: int) -> "Queue":
    items = (*self.items, *found)
    over = max(0, len(items) - most)
    return Queue(items[over:], self.dropped + over)

  def pop(self, count: int) -> tuple[tuple[Item, ...], "Queue"]:
    """The oldest items, and the queue without them."""
    return self.items[:count], self._replace(items=self.items[count:])

  def pack(self) -> dict[str, Any]:
    """JSON values from which `unpack` makes the same again."""
    rows = []
    for item in self.items:
      row = item._asdict()
      row["problem"] = item.problem.id
      rows.append(row)
    return {"items": rows, "dropped": self.dropped}


def unpack(
  plain: dict[str, Any], problem_at: Callable[[int], dataset.Problem]
) -> Queue:
  """A queue as it was packed.

  Args:
    plain: what `pack` returned.
    problem_at: the task's problem at a position of its order.

  Raises:
    ValueError: the task has another prompt there than it had.
  """
  items = []
  for row in plain["items"]:
    problem = problem_at(row["position"])
    if problem.id != row["root"]:
      raise ValueError(
        f"the queue holds a prefix of prompt {row['root']!r}, but position "
        f"{row['position']} of the task is {problem.id!r} now: the task has "
        "changed since the checkpoint"
      )
    lists = {k: tuple(row[k]) for k in ("context", "prefix", "entropies")}
    problem = problem._replace(id=row["problem"])
    items.append(Item(**{**row, **lists, "problem": problem}))
  return Queue(tuple(items), plain["dropped"])
