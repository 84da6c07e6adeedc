"""Leases of devices: policies in threads share them without deadlock.

A phase of a policy (generate, score, update) takes all its devices at once
or waits; it never holds some while it waits for others, so no circle of
waiting can form. Requests stand in one queue: one starts when its devices are
free and nobody who came before wants any of them. Disjoint requests run side
by side, and no request is overtaken by a later one that overlaps it, so a
wide policy does not starve among narrow ones.
"""

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator


class Stopped(RuntimeError):
  """The devices were closed: another policy failed, or the run has ended."""


class Devices:
  """A set of devices that threads lease from."""

  def __init__(self, ids: Iterable[int]):
    self._ids = frozenset(ids)
    if not self._ids:
      raise ValueError("ids=() must hold at least one device")
    self._changed = threading.Condition()
    self._held: dict[int, frozenset[int]] = {}  # by thread
    self._queue: dict[int, frozenset[int]] = {}  # by ticket, oldest first
    self._tickets = 0
    self._closed = False
    self._error: BaseException | None = None

  @contextlib.contextmanager
  def lease(self, ids: Iterable[int]) -> Iterator[float]:
    """Holds the devices `ids` inside the with; yields the seconds waited.

    Raises:
      Stopped: if `close` was called before the devices were free.
      ValueError: for ids that this set of devices does not have.
      RuntimeError: in a thread that holds a lease already: threads that held
        some devices while they wait for others could wait for each other.
    """
    start = time.monotonic()
    self._acquire(self._known(ids))
    try:
      yield time.monotonic() - start
    finally:
      self._release()

  def close(self, error: BaseException | None = None) -> None:
    """Sends `Stopped` to all who wait, and to all who will ask.

    Leases that are held stay valid until they end. Of several calls the
    first counts, so the error that is told is the one that came first.
    """
    with self._changed:
      if not self._closed:
        self._closed, self._error = True, error
      self._changed.notify_all()

  def waiting(self) -> int:
    """How many requests stand in the queue."""
    with self._changed:
      return len(self._queue)

  def _known(self, ids: Iterable[int]) -> frozenset[int]:
    wanted = list(ids)
    found = frozenset(wanted)
    if not found or len(found) < len(wanted) or found - self._ids:
      raise ValueError(
        f"lease of devices {wanted}: must be one or more, each once, of "
        f"{sorted(self._ids)}"
      )
    return found

  def _acquire(self, wanted: frozenset[int]) -> None:
    thread = threading.get_ident()
    with self._changed:
      if thread in self._held:
        raise RuntimeError(
          f"lease of devices {sorted(wanted)}: this thread still holds "
          f"{sorted(self._held[thread])}"
        )
      ticket = self._tickets
      self._tickets += 1
      self._queue[ticket] = wanted
      try:
        self._changed.wait_for(lambda: self._closed or self._turn(ticket))
        if self._closed:
          raise Stopped(self._reason()) from self._error
        self._held[thread] = wanted
      finally:
        # Also where the wait is interrupted: those behind must not wait for it.
        del self._queue[ticket]
        self._changed.notify_all()

  def _turn(self, ticket: int) -> bool:
    """Whether the devices are free and nobody earlier wants one of them."""
    wanted = self._queue[ticket]
    earlier = [ids for other, ids in self._queue.items() if other < ticket]
    return wanted.isdisjoint(frozenset().union(*self._held.values(), *earlier))

  def _release(self) -> None:
    with self._changed:
      del self._held[threading.get_ident()]
      self._changed.notify_all()

  def _reason(self) -> str:
    if self._error is None:
      return "the devices were closed"
    return f"the devices were closed after {self._error!r}"
