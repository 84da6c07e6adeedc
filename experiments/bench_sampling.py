"""Times sampling where completions differ in length, and where none does.

A sampler that keeps its slots full spends its time on tokens that are asked
for. `skewed` lets one id in 64 stop a row: under random weights lengths are
about geometric, and a lockstep batch would wait for its longest row. `full`
has no stop id: every row is as long as allowed, and no slot is ever idle.

  python -m experiments.bench --shape=skewed --reps=2

CPU seconds are of the whole process, per token that was returned.
"""

import dataclasses
import statistics
import time
from typing import Any

import jax
import numpy as np

from mrl_jax.model import spec as spec_lib
from mrl_jax.model import transformer
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.sampling import engine
from mrl_jax.types import Distribution


@dataclasses.dataclass(frozen=True)
class Case:
  """What is sampled; lengths are in tokens."""

  vocab: int
  prompts: int
  samples: int
  limit: int
  stop: bool
  prompt_length: int = 64
  slots: int = 64


CASES = {
  "skewed": Case(64, 32, 8, 512, True),
  "skewed_single": Case(64, 256, 1, 512, True),
  "full": Case(4096, 8, 8, 128, False),
}


def measure(case: Case, spec: spec_lib.Spec, reps: int) -> dict[str, Any]:
  """Seconds and tokens of `reps` calls after the one that compiles.

  Every call draws the same rows, so that it meets the same shapes.
  """
  model = transformer.make(spec)
  generate = engine.make(
    model,
    mesh_lib.make(1, 1, 1, devices=jax.devices()[:1]),
    samples=case.samples,
    limit=case.limit,
    stop_ids=(2,) if case.stop else (case.vocab,),
    allowed=np.ones(case.vocab, bool),
    distribution=Distribution(),
    seed=0,
    rows=case.slots,
  )
  params = model.init(jax.random.key(0))
  rng = np.random.default_rng(0)
  size = (case.prompts, case.prompt_length)
  prompts = rng.integers(3, case.vocab, size).tolist()
  ids = np.arange(case.prompts * case.samples, dtype=np.uint32)[:, None]
  walls, cpus = [], []
  for _ in range(reps + 1):
    wall, cpu = time.perf_counter(), time.process_time()
    out = generate(params, prompts, ids)
    walls.append(time.perf_counter() - wall)
    cpus.append(time.process_time() - cpu)
  tokens = int(out.lengths.sum())
  cpu = statistics.median(cpus[1:])
  return {
    "case": dataclasses.asdict(case),
    "tokens": tokens,
    "longest": int(out.lengths.max()),
    "first_call": round(walls[0], 3),
    "wall": round(statistics.median(walls[1:]), 4),
    "cpu": round(cpu, 4),
    "cpu_ms_per_token": round(1e3 * cpu / tokens, 4),
  }
