"""Checks and times this code on a GPU, in one command of a few minutes.

  pip install -e '.[test]' 'jax[cuda12]'
  python -m experiments.bench_gpu --out=gpu.json

First the tests marked `gpu`, then sampling, scoring and a training step of a
Qwen3-0.6B with random weights in bfloat16: tokens per second, and the share
of the GPU's peak that the model's own arithmetic takes (model/arithmetic.py:
what is computed twice, or for padding, does not count). Without a GPU it
times what there is (--spec=tiny is enough for a CPU). No part is started once
--budget seconds are over, and --out holds every part as soon as it is done.
It has not run on a GPU yet.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
from absl import flags

from experiments import bench
from experiments import flags as flags_lib
from mrl_jax import config as config_lib
from mrl_jax.model import arithmetic, catalog
from mrl_jax.model import spec as spec_lib

ROOT = pathlib.Path(__file__).parent.parent

# Dense bfloat16 with sums in float32, in FLOP/s, as NVIDIA gives them. The
# first name that the device's kind holds counts.
PEAKS = (
  ("GB200", 2500e12),
  ("B200", 2250e12),
  ("GH200", 989e12),
  ("H200", 989e12),
  ("H100 PCIe", 756e12),
  ("H100 NVL", 835e12),
  ("H100", 989e12),
  ("H20", 148e12),
  ("A100", 312e12),
  ("A30", 165e12),
  ("A10G", 70e12),
  ("L40S", 362e12),
  ("L40", 181e12),
  ("L4", 121e12),
  ("RTX 4090", 165e12),
)
# Rows for a GPU of 24 GB or more, and for the CPU of a test.
_ROWS = {"prompts": 16, "samples": 8}
_LENGTHS = {"prompt_length": 256, "completion_length": 256}
_QUICK = {"prompts": 8, "completion_length": 64}
TINY = bench.Shape(1, 32, 64, 4, 2, 8, 64, 4, 2, 8, 8)


def peak(kind: str) -> float | None:
  """FLOP/s of a device, or None: not in the table, or a slice of one."""
  if "MIG" in kind:
    return None
  return next((rate for name, rate in PEAKS if name in kind), None)


def names() -> list[str]:
  """What --spec may be: `bench.Shape` tells only these apart."""
  tied = [n for n in catalog.names() if n.startswith("qwen3")]
  return ["tiny", *(n for n in tied if catalog.get(n).tied)]


def shape_of(name: str, quick: bool) -> bench.Shape:
  """The model of that name, and the batch it is timed on."""
  if name == "tiny":
    return TINY
  spec = catalog.get(name)
  own = (f.name for f in dataclasses.fields(bench.Shape))
  sizes = {n: getattr(spec, n) for n in own if hasattr(spec, n)}
  rows = {**_ROWS, **_LENGTHS, **(_QUICK if quick else {})}
  return bench.Shape(**sizes, **rows)


def work(spec: spec_lib.Spec, shape: bench.Shape) -> dict[str, int]:
  """FLOPs of each part, nothing computed twice."""
  rows = arithmetic.Rows(
    shape.prompts, shape.prompt_length, shape.samples, shape.completion_length
  )
  count = shape.prompts * shape.samples
  first = arithmetic.prefill(spec, shape.prompts, shape.prompt_length)
  behind = range(shape.prompt_length, shape.prompt_length + rows.completion - 1)
  return {
    "sampling": first
    + arithmetic.logits(spec, count)
    + sum(arithmetic.decode(spec, count, b) for b in behind),
    "scoring": arithmetic.forward(spec, rows),
    "training": arithmetic.training(spec, rows),
  }


def parts(
  shape: bench.Shape, dtype: str, remat: str, microbatches: int, reps: int
) -> dict[str, Callable[[], dict[str, Any]]]:
  """What is timed, in order; the first also builds the model."""
  made: dict[str, Any] = {}

  def sampling():
    made["parts"] = own = bench.Parts(shape, dtype, remat, microbatches)
    return bench.timed(own.sample, reps)

  def scoring():
    own = made["parts"]
    batch = own.batch(own.sample())
    score = own.score
    out = bench.timed(
      lambda _: score(own.reference, batch, shape.samples), reps
    )
    reference = score(own.reference, batch, shape.samples).logprobs
    made["batch"] = batch._replace(ref_logprobs=reference)
    return out

  def training():
    own = made["parts"]

    def step(_):
      own.state, report = own.update(own.state, made["batch"], shape.samples)
      return report

    return bench.timed(step, reps)

  return {"sampling": sampling, "scoring": scoring, "training": training}


def rates(
  out: dict[str, Any], tokens: int, flops: int, rate: float | None
) -> dict[str, Any]:
  """The times of a part, and what follows from them."""
  wall = out["wall"]["median"]
  done = {
    **out,
    "tokens_per_second": round(tokens / wall, 1),
    "tflops_per_second": round(flops / wall / 1e12, 4),
  }
  return done if rate is None else {**done, "of_peak": flops / wall / rate}


def tests(limit: float) -> dict[str, Any]:
  """Runs the tests marked `gpu`, in a process that has the GPU to itself."""
  command = [sys.executable, "-m", "pytest", "-q", "-rs", "-m", "gpu"]
  command += ["-p", "no:cacheprovider", "tests/test_gpu.py"]
  try:
    done = subprocess.run(
      command,
      cwd=ROOT,
      env={**os.environ, "MRL_TEST_GPU": "1"},
      capture_output=True,
      text=True,
      timeout=max(limit, 1),
    )
  except subprocess.TimeoutExpired:
    return {"passed": False, "said": f"not done in {limit:.0f} s"}
  lines = (done.stdout + done.stderr).strip().splitlines()
  return {"passed": done.returncode == 0, "said": "\n".join(lines[-12:])}


class Report:
  """What is known so far: printed as it comes, kept in a file."""

  def __init__(self, path: str):
    self.path = path
    self.values: dict[str, Any] = {}

  def add(self, name: str, value: Any) -> None:
    self.values[name] = value
    print(f"{name}: {json.dumps(value)}", flush=True)
    if self.path:
      text = json.dumps(self.values, indent=1) + "\n"
      pathlib.Path(self.path).write_text(text)


def measure(
  report: Report,
  timed: dict[str, Callable[[], dict[str, Any]]],
  finish: Callable[[str, dict[str, Any]], dict[str, Any]],
  over: Callable[[], bool],
) -> bool:
  """Reports each part that is started before it is over; False: one failed."""
  well = True
  for name, run in timed.items():
    if over():
      report.add(name, "not started: --budget is used up")
      continue
    try:
      report.add(name, finish(name, run()))
    except Exception as error:  # such as too little memory: the rest may fit
      report.add(name, f"failed: {type(error).__name__}: {error}"[:400])
      well = False
  return well


def main() -> int:
  start, values = time.monotonic(), flags.FLAGS
  shape = shape_of(values.spec, values.quick)
  if values.microbatches < 1 or shape.prompts % values.microbatches:
    raise config_lib.ConfigError(
      "microbatches",
      values.microbatches,
      f"must divide the {shape.prompts} prompts",
    )
  end = start + values.budget
  report = Report(values.out)
  well = True
  if values.tests:  # before this process takes the GPU's memory
    report.add("tests", tests(end - time.monotonic()))
    well = report.values["tests"]["passed"]
  kind = jax.devices()[0].device_kind
  rate = peak(kind)
  report.add("device", kind)
  report.add("jax", jax.__version__)
  if rate is None:
    known = ", ".join(name for name, _ in PEAKS)
    report.add("peak", f"unknown for {kind!r}; known: {known}")
  report.add("shape", {"model": values.spec, **dataclasses.asdict(shape)})
  flops = work(bench.model_spec(shape, values.dtype, values.remat), shape)
  tokens = shape.prompts * shape.samples * shape.completion_length
  reps = 1 if values.quick else values.reps
  well &= measure(
    report,
    parts(shape, values.dtype, values.remat, values.microbatches, reps),
    lambda name, out: rates(out, tokens, flops[name], rate),
    lambda: time.monotonic() >= end,
  )
  report.add("seconds", round(time.monotonic() - start, 1))
  return 0 if well else 1


if __name__ == "__main__":
  flags_lib.define(("dtype", "remat", "microbatches"))
  flags.FLAGS.set_default("dtype", "bfloat16")
  flags.FLAGS.set_default("microbatches", 8)
  flags.DEFINE_enum("spec", "qwen3-0.6b", names(), "Which model.")
  flags.DEFINE_boolean("tests", True, "First run the tests marked gpu.")
  flags.DEFINE_boolean("quick", False, "Fewer and shorter rows, timed once.")
  flags.DEFINE_integer("reps", 3, "Timed calls of each part.", 1)
  flags.DEFINE_integer(
    "budget", 240, "Seconds after which no further part is started.", 0
  )
  flags.DEFINE_string("out", "", "Also write the results here, as JSON.")
  flags_lib.run(main)
