"""Scoring completions without trusting them: a pool of killable processes.

A completion is written by a model under training, and a verifier that parses
it can loop, exhaust memory or crash the interpreter. So each verifier runs in
its own process (a fresh interpreter, never a fork: the parent holds JAX's
threads), under a hard deadline per item. What goes wrong costs that item's
row alone: it is scored NaN, which takes the row out of every statistic, and
the process is replaced.
"""

import collections
import enum
import functools
import logging
import math
import multiprocessing
import multiprocessing.connection
import operator
import pickle
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mrl_jax.tasks import process
from mrl_jax.tasks.dataset import Problem, Verifier


class Outcome(enum.StrEnum):
  """What became of one completion; counted apart, never mixed."""

  correct = "correct"
  wrong = "wrong"
  unparsed = "unparsed"  # no answer could be read from the completion
  gold_unparsed = "gold_unparsed"  # nor from the gold answer: no row counts
  timeout = "timeout"
  error = "error"


class Verdict(NamedTuple):
  """A reward, NaN where the completion could not be scored, and why.

  `steps` may say when parts of the reward were earned, as pairs: how many
  characters of the completion are written when a step is over, and what it
  earned. What the steps leave of the reward is earned by the end. A step
  should be judged by what is written until it is over, and by nothing else.
  """

  reward: float
  outcome: Outcome
  steps: tuple[tuple[int, float], ...] = ()


_UNSCORED = (Outcome.gold_unparsed, Outcome.timeout, Outcome.error)
CORRECT = Verdict(1.0, Outcome.correct)
WRONG = Verdict(0.0, Outcome.wrong)
UNPARSED = Verdict(0.0, Outcome.unparsed)
GOLD_UNPARSED = Verdict(math.nan, Outcome.gold_unparsed)
TIMEOUT = Verdict(math.nan, Outcome.timeout)
ERROR = Verdict(math.nan, Outcome.error)


def grade(
  check: Callable[[str, Problem], Any], completion: str, problem: Problem
) -> Verdict:
  """Runs `check` here and now; whatever it raises is an `error`."""
  try:
    return _within(as_verdict(check(completion, problem)), completion)
  except (Exception, SystemExit):
    report(traceback.format_exc(limit=-3))
    return ERROR


def as_verdict(result: Any) -> Verdict:
  """Reads a verifier's answer; a number counts as correct from 1 on.

  Raises:
    TypeError: for anything but a bool, a finite number or a `Verdict`.
    ValueError: for a verdict whose reward and outcome do not fit.
  """
  if isinstance(result, Verdict):
    return _checked(result)
  if isinstance(result, bool | np.bool_):
    return CORRECT if result else WRONG
  number = isinstance(result, int | float | np.integer | np.floating)
  if number and math.isfinite(result):
    outcome = Outcome.correct if result >= 1 else Outcome.wrong
    return Verdict(float(result), outcome)
  raise TypeError(
    "a verifier must return a bool, a finite number or a Verdict, got"
    f" {result!r}"
  )


def _checked(verdict: Verdict) -> Verdict:
  """A verifier's own verdict; a row that counts has a finite reward."""
  reward, outcome = float(verdict.reward), Outcome(verdict.outcome)
  if outcome in _UNSCORED:
    fits = math.isnan(reward)
  else:
    fits = math.isfinite(reward)
  if not fits:
    raise ValueError(f"a verdict of {outcome} cannot have reward {reward}")
  if outcome in _UNSCORED and verdict.steps:
    raise ValueError(f"a verdict of {outcome} cannot have steps")
  return Verdict(reward, outcome, _steps(verdict.steps))


def _steps(steps: Sequence[Any]) -> tuple[tuple[int, float], ...]:
  """The steps in plain numbers; each is over later than the one before."""
  found = tuple((operator.index(end), float(earned)) for end, earned in steps)
  last = 0
  for end, earned in found:
    if end <= last:
      raise ValueError(f"a step's end must be above {last}, got {end}")
    if not math.isfinite(earned):
      raise ValueError(f"the step that ends at {end} cannot earn {earned}")
    last = end
  return found


def _within(verdict: Verdict, completion: str) -> Verdict:
  """The verdict, unless one of its steps ends behind the completion."""
  if verdict.steps and verdict.steps[-1][0] > len(completion):
    raise ValueError(
      f"a step ends at {verdict.steps[-1][0]}, but the completion has"
      f" {len(completion)} characters"
    )
  return verdict


def counts(verdicts: Sequence[Verdict]) -> dict[str, int]:
  """How many verdicts there are of every outcome, zeros included."""
  seen = collections.Counter(verdict.outcome.value for verdict in verdicts)
  return {outcome.value: seen[outcome.value] for outcome in Outcome}


@functools.lru_cache(maxsize=256)
def report(text: str) -> None:
  """Logs a verifier's failure, the same one once per process."""
  logging.getLogger(__name__).warning("verifier failed: %s", text)


class Pool:
  """Scores completions; processes start on first use and are kept.

  Callable from any thread; calls take turns. Use it as a context manager or
  call `close`; a pool that is forgotten ends its processes with it.
  """

  def __init__(
    self,
    verifier: Verifier,
    workers: int = 2,
    deadline_seconds: float | int = 10.0,
    memory_bytes: int | None = 4 << 30,
  ):
    """Prepares `workers` processes of `memory_bytes` address space each."""
    if workers < 1:
      raise ValueError(f"workers must be 1 or more, got {workers}")
    if not deadline_seconds > 0:
      raise ValueError(
        f"deadline_seconds must be positive, got {deadline_seconds}"
      )
    self._verifier = verifier
    self._count = workers
    self._deadline = deadline_seconds
    self._lock = threading.Lock()
    self._workers: list[process.Worker] = []
    self._closed = False
    self._settings = (deadline_seconds, memory_bytes, _portable(verifier))
    self._finalizer = weakref.finalize(self, process.end, self._workers)

  def score(self, items: Sequence[tuple[str, Problem]]) -> list[Verdict]:
    """Returns the verdict of each (completion, problem), in order.

    Raises:
      RuntimeError: where the verifier cannot be loaded in a process at all.
    """
    if self._verifier.quick:
      return [grade(self._verifier.check, *item) for item in items]
    with self._lock:
      if self._closed:
        raise RuntimeError("this pool is closed")
      try:
        return self._run(list(items))
      except BaseException:
        # A busy process would answer the next call with this call's verdict.
        process.end(self._workers)
        raise

  def close(self) -> None:
    """Ends all processes and waits for them; scoring is over."""
    with self._lock:
      self._closed = True
      process.end(self._workers)

  def __enter__(self) -> "Pool":
    return self

  def __exit__(self, *unused) -> None:
    self.close()

  def _run(self, items: list[tuple[str, Problem]]) -> list[Verdict]:
    verdicts: list[Verdict] = [ERROR] * len(items)
    pending = collections.deque(range(len(items)))
    while True:
      self._dispatch(items, pending)
      busy = [worker for worker in self._workers if worker.item is not None]
      if not pending and not busy:
        return verdicts
      waiting = [w for w in self._workers if w.item is not None or not w.ready]
      if not waiting:
        continue  # those that were idle had died; dispatch starts others
      until = min(worker.until for worker in waiting)
      answered = multiprocessing.connection.wait(
        [worker.connection for worker in waiting],
        max(0.0, until - time.monotonic()),
      )
      now = time.monotonic()  # before any kill below takes its time
      for worker in waiting:
        if worker.connection in answered:
          self._receive(worker, verdicts)
        elif now >= worker.until:
          self._overdue(worker, verdicts)

  def _dispatch(self, items: list, pending: collections.deque) -> None:
    """Gives every idle process an item, starting processes as needed."""
    idle = sum(worker.item is None for worker in self._workers)
    wanted = min(self._count - len(self._workers), len(pending) - idle)
    for _ in range(wanted):
      self._workers.append(process.Worker(self._settings))
    for worker in list(self._workers):
      if not worker.ready or worker.item is not None or not pending:
        continue
      index = pending.popleft()
      try:
        worker.connection.send_bytes(pickle.dumps(items[index]))
      except OSError:  # it died while idle, which is not the item's fault
        pending.appendleft(index)
        self._remove(worker)
      else:
        worker.item = index
        worker.until = time.monotonic() + self._deadline

  def _receive(self, worker: process.Worker, verdicts: list[Verdict]) -> None:
    try:
      answer = worker.connection.recv()
    except (EOFError, OSError, pickle.UnpicklingError):
      if not worker.ready:
        raise RuntimeError("a verifier process died while starting") from None
      self._remove(worker)
      code = worker.process.returncode
      # Its own alarm, should this process have been too busy to end it.
      late = code == -signal.SIGALRM
      verdicts[worker.item] = TIMEOUT if late else ERROR
      if not late:
        report(f"its process ended with code {code} before answering")
      return
    if not worker.ready:
      if answer is not None:
        raise RuntimeError(f"the verifier could not be loaded:\n{answer}")
      worker.ready = True
      return
    verdicts[worker.item] = answer
    worker.item = None

  def _overdue(self, worker: process.Worker, verdicts: list[Verdict]) -> None:
    if not worker.ready:
      raise RuntimeError(
        f"a verifier process did not start in {process.START_SECONDS} seconds"
      )
    verdicts[worker.item] = TIMEOUT
    self._remove(worker)

  def _remove(self, worker: process.Worker) -> None:
    self._workers.remove(worker)
    worker.end()


def _portable(verifier: Verifier) -> bytes:
  """Returns the check pickled, as its processes will receive it."""
  if verifier.quick:
    return b""
  check = getattr(verifier.check, "func", verifier.check)
  module = getattr(check, "__module__", None)
  try:
    if module == "__main__":
      raise pickle.PicklingError("it is defined in the main program")
    return pickle.dumps(verifier.check)
  except (pickle.PicklingError, AttributeError, TypeError) as error:
    raise ValueError(
      f"verifier {verifier.check!r} cannot be sent to a process: {error};"
      " it must be a module-level function of an importable module"
    ) from None
