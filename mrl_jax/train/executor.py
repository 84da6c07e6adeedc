"""Who runs when: the policies take turns, or a thread each.

A round is a few phases for each policy. `inline` runs a phase for every
policy before the next phase begins, so nobody waits for anybody's records.
`partition` runs each policy's phases in its own thread, on its own devices;
where a phase needs the peers, it waits at the exchange, and no longer than
the deadline. Both end a run when a policy fails, and name it.
"""

import concurrent.futures
import threading
from collections.abc import Callable, Sequence

Phase = Callable[[str], None]  # of the policy's name
Execute = Callable[[Sequence[str], Sequence[Phase]], None]


class PolicyError(RuntimeError):
  """A policy's phase raised; the cause has the trace."""


def inline(names: Sequence[str], phases: Sequence[Phase]) -> None:
  """One policy at a time, in order, phase by phase."""
  for phase in phases:
    for name in names:
      _run(name, phase)


class Partition:
  """A thread per policy; `cancelled` tells those that wait to give up."""

  def __init__(self):
    self._cancel = threading.Event()

  def cancelled(self) -> bool:
    """Whether some policy has failed."""
    return self._cancel.is_set()

  def __call__(self, names: Sequence[str], phases: Sequence[Phase]) -> None:
    """Runs all phases of all policies; returns when all are done.

    Raises:
      PolicyError: the first failure, after every thread has ended.
    """

    def work(name: str) -> None:
      for phase in phases:
        if self.cancelled():
          return
        _run(name, phase)

    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
      futures = [pool.submit(work, name) for name in names]
      for future in concurrent.futures.as_completed(futures):
        if future.exception() is not None:
          self._cancel.set()
          raise future.exception()


def _run(name: str, phase: Phase) -> None:
  try:
    phase(name)
  except Exception as error:
    raise PolicyError(
      f"policy {name} failed: {type(error).__name__}: {error}"
    ) from error
