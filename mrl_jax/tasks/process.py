"""The parent's end of one verifier process: start it, talk to it, end it.

A process is a fresh interpreter that runs `mrl_jax.tasks.worker`, in a group
of its own, so that whatever it has started can be ended with it.
"""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time

START_SECONDS = 120.0  # imports, on a busy machine; no item is waiting yet
GRACE_SECONDS = 0.5  # between asking a process to end and ending it


class Worker:
  """One process, the pipe to it, and the item it works on."""

  def __init__(self, settings: tuple):
    self.connection, theirs = multiprocessing.Pipe()
    environment = os.environ | {
      "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
      "JAX_PLATFORMS": "cpu",
      "CUDA_VISIBLE_DEVICES": "",
      "OMP_NUM_THREADS": "1",
      "OPENBLAS_NUM_THREADS": "1",
    }
    # Not multiprocessing's spawn: that re-imports the main program, which
    # here is the trainer, JAX and all.
    self.process = subprocess.Popen(
      [sys.executable, "-m", "mrl_jax.tasks.worker", str(theirs.fileno())],
      env=environment,
      pass_fds=[theirs.fileno()],
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      start_new_session=True,  # Ctrl-C is the parent's; a group to kill
    )
    theirs.close()
    self.item: int | None = None
    self.ready = False
    self.until = time.monotonic() + START_SECONDS
    with contextlib.suppress(OSError):  # a dead one is noticed by receiving
      self.connection.send(settings)

  def end(self) -> None:
    """Terminates, then kills, then reaps the process and what it started."""
    self._signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
      self.process.wait(GRACE_SECONDS)
    self._signal(signal.SIGKILL)
    self.process.wait()
    self.connection.close()

  def _signal(self, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(self.process.pid, number)


def end(workers: list[Worker]) -> None:
  """Ends all of `workers` and empties the list."""
  while workers:
    workers.pop().end()
