"""A polite end: the first signal asks a run to stop, the second ends it."""

import signal
from collections.abc import Callable
from typing import Any


class Interrupt:
  """Turns the first SIGTERM or SIGINT into a request; the second ends."""

  def __init__(self, message: Callable[[str], None]):
    self._message = message
    self._old: dict[int, Any] = {}
    self.asked = False

  def __call__(self) -> bool:
    return self.asked

  def __enter__(self) -> "Interrupt":
    for number in (signal.SIGTERM, signal.SIGINT):
      try:
        self._old[number] = signal.signal(number, self._ask)
      except ValueError:  # not the main thread: the caller handles signals
        break
    return self

  def _ask(self, number, frame) -> None:
    del frame
    self.asked = True
    signal.signal(number, self._old[number])
    self._message("stopping where it is safe; again to stop at once")

  def __exit__(self, *unused) -> None:
    for number, handler in self._old.items():
      signal.signal(number, handler)
