"""What a task is: problems by index, and a verifier of completions.

A problem is a prompt with a stable id; the id, and not the position in a
batch, is what sampling keys, peers' records and memories hang on. An `Order`
says which problem stands at a position of the run: the whole state of a data
pipeline is then one integer, and resuming is to ask for the next position.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Problem(NamedTuple):
  """A prompt, its gold answer, and what else its verifier needs."""

  id: str
  prompt: str
  answer: str = ""
  extra: dict[str, Any] = {}  # noqa: RUF012 (never written to)


class Verifier(NamedTuple):
  """How a completion is scored.

  `check(completion, problem)` returns a bool, a float reward or a
  `verify.Verdict`. A quick verifier is pure, total and takes microseconds, so
  it runs in the calling process; any other runs in killable processes and
  must therefore be picklable: a module-level function or a partial of one.
  """

  check: Callable[[str, Problem], Any]
  quick: bool = False


class Task(NamedTuple):
  """Problems by index and their verifier; `size` None means endless."""

  name: str
  size: int | None
  problem: Callable[[int], Problem]
  verify: Verifier


def indexed(
  problem: Callable[[int], Problem], size: int | None
) -> Callable[[int], Problem]:
  """Returns `problem`, refusing every index that the task does not have."""

  def apply(index: int) -> Problem:
    if index < 0 or (size is not None and index >= size):
      there = "0 or more" if size is None else f"0 to {size - 1}"
      raise IndexError(f"index must be {there}, got {index}")
    return problem(index)

  return apply


class Order:
  """The problem at every position of a run, the same in every process.

  A finite task is reshuffled each epoch under `seed`; an endless one is its
  own order, and its seed is the one it was made with.
  """

  def __init__(self, task: Task, seed: int):
    self._task = task
    self._indices = None
    if task.size is None:
      return
    if seed < 0:
      raise ValueError(f"seed must be 0 or more, got {seed}")
    if task.size < 1:
      raise ValueError(f"task {task.name!r} has no problems to put in order")
    # Imported here because grain brings JAX in, and the verifiers' processes,
    # which read this module, must start fast and never touch a device.
    import grain

    self._indices = grain.MapDataset.range(task.size).seed(seed).shuffle()
    self._indices = self._indices.repeat()

  def at(self, position: int) -> Problem:
    """Returns the problem at `position` (0, 1, ...) of the run."""
    if position < 0:
      raise ValueError(f"position must be 0 or more, got {position}")
    if self._indices is None:
      return self._task.problem(position)
    return self._task.problem(int(self._indices[position]))
