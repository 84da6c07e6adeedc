"""Commands of a study, a process each, that are not repeated once done.

A study can be stopped and started again: a job whose file exists is over.
"""

import concurrent.futures
import json
import os
import pathlib
import platform
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags
from rich import progress as rich_progress

from experiments import flags as flags_lib
from mrl_jax.train import metrics


class Job:
  """A command that leaves a file when it is done."""

  def __init__(self, words: Sequence[str], made: pathlib.Path):
    self.words = [sys.executable, "-m", *words]
    self.made = made
    self.process: subprocess.Popen | None = None

  def start(self, core: int, cache: pathlib.Path) -> None:
    """Starts the process; `cache` holds what jobs compiled before it."""
    self.made.parent.mkdir(parents=True, exist_ok=True)
    log = open(f"{self.made}.log", "ab")  # noqa: SIM115 - the child's
    self.process = subprocess.Popen(
      self.words,
      stdout=log,
      stderr=log,
      env={
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
      },
      preexec_fn=lambda: _pin(core),
    )
    log.close()

  def wait(self) -> float:
    """CPU seconds of the process.

    Raises:
      RuntimeError: it failed; the message says where its output is.
    """
    _, status, usage = os.wait4(self.process.pid, 0)
    if status or not self.made.exists():
      raise RuntimeError(f"{' '.join(self.words)}: see {self.made}.log")
    return usage.ru_utime + usage.ru_stime


def _pin(core: int) -> None:
  """One core for each job: small products gain nothing from two."""
  if hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[core % len(cores)]})


def drain(
  title: str, lanes: Sequence[Sequence[Job]], width: int, out: pathlib.Path
) -> None:
  """Runs each lane's jobs in order, `width` lanes at once."""
  cores: queue.SimpleQueue[int] = queue.SimpleQueue()
  for core in range(width):
    cores.put(core)

  def work(lane: Sequence[Job]) -> None:
    core = cores.get()
    try:
      for job in lane:
        if not job.made.exists():
          job.start(core, out / "compiled")
          _note(out, job, job.wait())
    finally:
      cores.put(core)

  with concurrent.futures.ThreadPoolExecutor(width) as pool:
    done = pool.map(work, lanes)
    for _ in rich_progress.track(done, title, total=len(lanes)):
      pass


def _note(out: pathlib.Path, job: Job, seconds: float) -> None:
  made = str(job.made.relative_to(out))
  with open(out / "seconds.jsonl", "a") as file:
    file.write(json.dumps({"made": made, "cpu": seconds}) + "\n")


def seconds(out: pathlib.Path) -> dict[str, float]:
  """CPU seconds of each job, by the file it left."""
  path = out / "seconds.jsonl"
  if not path.exists():
    return {}
  return {r["made"]: round(r["cpu"], 1) for r in metrics.read(path)}


def define(out: str) -> None:
  """Defines the flags that the studies of several runs share."""
  flags.DEFINE_string("out", out, "Folder of all runs.")
  flags.DEFINE_integer("seeds", 5, "How many.", 1)
  flags.DEFINE_integer("jobs", 2, "Processes at a time, one core each.", 1)
  flags.DEFINE_boolean("report", False, "Only report what is finished.")
  flags_lib.show("out", "seeds", "jobs", "report")


def folder() -> pathlib.Path:
  """Where --out says, made if it is not there."""
  out = pathlib.Path(flags.FLAGS.out).expanduser().absolute()
  out.mkdir(parents=True, exist_ok=True)
  return out


def machine() -> dict[str, Any]:
  """What a study's results are of."""
  return {
    "machine": platform.processor() or platform.machine(),
    "cores": os.cpu_count(),
    "date": time.strftime("%Y-%m-%d"),
  }


def publish(
  out: pathlib.Path,
  name: str,
  results: dict[str, Any],
  figure: Callable[[dict[str, Any], pathlib.Path], pathlib.Path],
  *tables: Callable[[dict[str, Any]], str],
) -> None:
  """Writes the results and their figure, and prints the tables."""
  path = out / f"{name}.json"
  path.write_text(json.dumps(results, indent=1) + "\n")
  print(path)
  print(figure(results, out / f"{name}.png"))
  for table in tables:
    print(table(results))
