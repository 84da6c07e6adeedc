"""Where the CPU time of a training step goes, part by part.

  python -m experiments.profile_step --shape=small

One sampling pass and one update of `experiments.bench` run under JAX's
profiler, on one core, where what runs takes turns. Each instruction that was
seen is looked up in the text of the program that it belongs to (see
`profile_parts.py`), and its own share of the call's time, without that of
what it calls, is its share of the call's CPU seconds: wall time would count
others on the machine. Means of --reps passes. What no instruction took is
"outside": Python and dispatch. GFLOP/s are of matrix products, beside those
of one large product on the same core.
"""

import collections
import functools
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import rich.console
import rich.table
from absl import flags

from experiments import bench, profile_parts
from experiments import flags as flags_lib
from mrl_jax.sampling import slots

_SIZE = 1024  # of the product that the parts are compared with
RUNS = (profile_parts.FORWARD, profile_parts.AGAIN, profile_parts.BACKWARD)


class Recorder:
  """Compiles programs and keeps which ran, call by call."""

  def __init__(self, mlp: int):
    self._mlp = mlp
    self._compiled: dict[str, tuple[Any, profile_parts.Program]] = {}
    self.calls: list[profile_parts.Program] = []

  def wrap(self, function: Callable) -> Callable:
    """The jitted function; its arguments of type int are static."""

    def call(*arguments):
      kept = [x for x in arguments if type(x) is not int]
      static = [x for x in arguments if type(x) is int]
      kinds = jax.tree.map(jax.typeof, kept)
      key = f"{id(function)} {kinds} {static}"
      if key not in self._compiled:
        # What jax.numpy traced once would carry the frames of that place.
        jax.clear_caches()
        compiled = function.lower(*arguments).compile()
        program = profile_parts.Program(compiled.as_text(), self._mlp)
        self._compiled[key] = compiled, program
      compiled, program = self._compiled[key]
      self.calls.append(program)
      return compiled(*kept)

    return call


class Spent(NamedTuple):
  """CPU seconds and calls of each instruction of a pass, and of it all."""

  seconds: dict[tuple[profile_parts.Program, str], float]
  times: dict[tuple[profile_parts.Program, str], int]
  cpu: float


def parts_of(shape: bench.Shape, dtype: str, remat: str = "dots"):
  """The bench's parts with recorded programs, and the recorder."""
  recorder = Recorder(shape.mlp)
  make = slots.make

  def made(*args, **kwargs):
    return slots.Programs(*map(recorder.wrap, make(*args, **kwargs)))

  with mock.patch.object(slots, "make", made):
    parts = bench.Parts(shape, dtype, remat, 1)
  parts.update = recorder.wrap(parts.update)
  return parts, recorder


def passes(parts: bench.Parts) -> dict[str, Callable[[], None]]:
  """What is profiled, by name; each call does the same work."""
  samples = parts.shape.samples
  batch = parts.batch(parts.sample())
  scores = parts.score(parts.reference, batch, samples)
  batch = jax.block_until_ready(batch._replace(ref_logprobs=scores.logprobs))

  def update():
    parts.state, report = parts.update(parts.state, batch, samples)
    jax.block_until_ready((parts.state, report))

  return {"sampling": parts.sample, "update": update}


def measure(
  recorder: Recorder, run: Callable[[], Any], reps: int
) -> dict[str, Any]:
  """The parts of one pass; see `summed`."""
  run()  # compiles
  return summed([traced(recorder, run) for _ in range(reps)])


def traced(recorder: Recorder, run: Callable[[], Any]) -> Spent:
  """One pass under the profiler."""
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0
  with tempfile.TemporaryDirectory() as folder:
    recorder.calls = []
    with jax.profiler.trace(folder, profiler_options=options):
      wall, cpu = time.perf_counter(), time.process_time()
      jax.block_until_ready(run())
      cpu = time.process_time() - cpu
      wall = time.perf_counter() - wall
    (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(path))
    found = list(events(data))
  programs = _programs(recorder.calls, found)
  seconds, times = collections.Counter(), collections.Counter()
  for event in found:
    key = programs[event.run], event.name
    seconds[key] += event.own * cpu / wall
    times[key] += 1
  return Spent(dict(seconds), dict(times), cpu)


class Event(NamedTuple):
  """An instruction that ran."""

  name: str
  module: str
  run: int  # of its program
  start: float  # nanoseconds
  own: float  # seconds, without those of what ran inside it


def events(data: jax.profiler.ProfileData) -> Iterable[Event]:
  """The instructions of XLA's programs in a trace, thread by thread."""
  for plane in data.planes:
    for line in plane.lines:
      found = []
      for event in line.events:
        about = dict(event.stats)
        if "hlo_op" in about:
          span = event.start_ns, -event.duration_ns
          found.append((*span, about["hlo_op"], about))
      yield from _own(sorted(found, key=lambda x: x[:3]))


def _own(spans) -> Iterable[Event]:
  """Takes from each span what is inside it; spans are nested or apart."""
  open_: list[list] = []  # [end, own, name, about, start]
  for start, negative, name, about in spans:
    while open_ and open_[-1][0] <= start:
      yield _event(*open_.pop())
    if open_:
      open_[-1][1] += negative
    open_.append([start - negative, -negative, name, about, start])
  while open_:
    yield _event(*open_.pop())


def _event(_, own, name, about, start) -> Event:
  return Event(name, about["hlo_module"], about["run_id"], start, own / 1e9)


def _programs(
  calls: list[profile_parts.Program], found: list[Event]
) -> dict[int, profile_parts.Program]:
  """The program of each run: those of one name began in the calls' order."""
  first: dict[tuple[str, int], float] = {}
  for event in found:
    key = event.module, event.run
    first[key] = min(event.start, first.get(key, event.start))
  by_name = collections.defaultdict(collections.deque)
  for program in calls:
    by_name[program.name].append(program)
  out = {}
  for module, run in sorted(first, key=first.get):
    if not by_name[module]:
      raise ValueError(f"the trace has a run of {module} that was not called")
    out[run] = by_name[module].popleft()
  left = [name for name, programs in by_name.items() if programs]
  if left:
    raise ValueError(f"the trace lacks a run of {left[0]}")
  return out


def summed(spent: list[Spent]) -> dict[str, Any]:
  """CPU seconds and operations of each part and run, means of the passes.

  "cpu" is of the whole call, "outside" what of it no instruction took.
  """
  parts: dict[str, dict[str, Any]] = {}
  total = 0.0
  for key, times in spent[0].times.items():
    program, name = key
    place = program.place(name)
    seconds = statistics.fmean(one.seconds.get(key, 0.0) for one in spent)
    here = parts.setdefault(
      place.part, {"seconds": 0.0, "flops": 0, **dict.fromkeys(RUNS, 0.0)}
    )
    here["seconds"] += seconds
    here[place.run] += seconds
    here["flops"] += times * place.flops
    total += seconds
  cpu = statistics.fmean(one.cpu for one in spent)
  return {"cpu": cpu, "outside": cpu - total, "parts": parts}


def peak(dtype: str, reps: int = 5) -> float:
  """Operations per CPU second of one large product that sums in float32."""
  a = jnp.ones((_SIZE, _SIZE), dtype)
  product = jax.jit(
    functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
  )
  product(a, a).block_until_ready()
  seconds = []
  for _ in range(reps):
    start = time.process_time()
    product(a, a).block_until_ready()
    seconds.append(time.process_time() - start)
  return 2 * _SIZE**3 / min(seconds)


def show(name: str, found: dict[str, Any], most: float) -> None:
  """Prints one pass as a table, the costliest part first."""
  grid = rich.table.Table(title=name, box=rich.box.ASCII2)
  heads = ("part", *RUNS, "CPU s", "share", "GFLOP", "GFLOP/s", "of peak")
  for head in heads:
    grid.add_column(head, justify="left" if head == "part" else "right")
  empty = dict.fromkeys((*RUNS, "flops"), 0)
  rows = {**found["parts"], "outside": {**empty, "seconds": found["outside"]}}
  for part, row in sorted(rows.items(), key=lambda x: -x[1]["seconds"]):
    runs = [f"{row[run]:.3f}" if row[run] else "" for run in RUNS]
    share = f"{row['seconds'] / found['cpu']:.1%}"
    speed = row["flops"] / max(row["seconds"], 1e-9)
    figures = [f"{row['flops'] / 1e9:.2f}", f"{speed / 1e9:.0f}"]
    figures = [*figures, f"{speed / most:.0%}"] if row["flops"] else [""] * 3
    grid.add_row(part, *runs, f"{row['seconds']:.3f}", share, *figures)
  grid.add_section()
  grid.add_row("all", *[""] * 3, f"{found['cpu']:.3f}", "100.0%")
  rich.console.Console(width=110).print(grid)


def main() -> int:
  values = flags.FLAGS
  if hasattr(os, "sched_setaffinity"):  # before JAX makes its threads
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
  shape = bench.SHAPES[values.shape]
  parts, recorder = parts_of(shape, values.dtype, values.remat)
  most = peak(values.dtype)
  out = {
    "name": values.shape,
    "dtype": values.dtype,
    "jax": jax.__version__,
    "peak_gflops": most / 1e9,
  }
  print(f"{values.dtype}, one core; {most / 1e9:.0f} GFLOP/s at {_SIZE}^3")
  for name, run in passes(parts).items():
    out[name] = measure(recorder, run, values.reps)
    show(name, out[name], most)
  if values.out:
    pathlib.Path(values.out).write_text(json.dumps(out, indent=1) + "\n")
  return 0


if __name__ == "__main__":
  flags_lib.define(("dtype", "remat"))
  flags.DEFINE_enum("shape", "small", sorted(bench.SHAPES), "Which shape.")
  flags.DEFINE_integer("reps", 3, "Passes of each.", 1)
  flags.DEFINE_string("out", "", "Also write the figures here, as JSON.")
  flags_lib.run(main)
