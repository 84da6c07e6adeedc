"""What large stages save: many small rounds against four stages, by phase.

  python -m experiments.studies.mu_grpo_speed --out=runs/mu_grpo_speed.json

Random weights, a vocabulary of 64 with one stop id: completions are about
geometric in length, mean 64, at most 512 tokens. Both schedules draw the same
rows with the same sampler in the same number of slots; a round has as many
rows as there are slots, a stage four times as many. Passes of the two take
turns, and what is compared are CPU seconds of the whole process. Scoring and
updating are timed on some of the batches of the rows that were drawn.

A small machine can show what full slots save. It cannot show what a large
accelerator saves beside that: there, a step costs the same for few rows and
for many, and going from sampling to training and back has a price of its own.
"""

import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments import bench
from experiments import flags as flags_lib
from experiments.studies import jobs as jobs_lib
from mrl_jax import collate, compose, losses, records
from mrl_jax.model import transformer
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.parallel import sharding
from mrl_jax.sampling import engine
from mrl_jax.train import state as state_lib
from mrl_jax.train import update as update_lib
from mrl_jax.transforms import advantages, clipping, weights
from mrl_jax.types import Batch, Distribution

SIZES = {
  "tiny": bench.Shape(2, 128, 256, 4, 2, 32, 64, prompt_length=16),
  "small": bench.Shape(vocab=64, prompt_length=16),
}
SAMPLES, SLOTS, LIMIT, STOP = 8, 64, 512, 2
STAGES, ROUNDS, TIMED = 4, 16, 4  # rounds whose scores and update are timed
PAPER = {"generation": 1.82, "end to end": 1.53}


class Setup:
  """One size: its sampler, its update, and the prompts of a whole run."""

  def __init__(self, shape: bench.Shape):
    self.mesh = mesh_lib.make(1, 1, 1, devices=jax.devices()[:1])
    model = transformer.make(bench.model_spec(shape, "float32", "dots"))
    params = model.init(jax.random.key(0))
    places = sharding.tree(model.axes, params, self.mesh)
    params = jax.device_put(params, places)
    optimizer = state_lib.make_optimizer(1e-6, 1000, clip_norm=1.0)
    self.state = state_lib.init(optimizer, params, self.mesh)
    options = {
      "allowed": np.ones(shape.vocab, bool),
      "distribution": Distribution(),
    }
    self.generate = engine.make(
      model,
      self.mesh,
      samples=SAMPLES,
      limit=LIMIT,
      stop_ids=(STOP,),
      seed=0,
      rows=SLOTS,
      **options,
    )
    self.score = update_lib.make_score(model, self.mesh, **options)
    self.update = update_lib.make(
      model,
      optimizer,
      compose.chain(
        advantages.group_advantages(),
        clipping.relaxed(),
        weights.token_mean(),
      ),
      losses.policy_gradient(3.0),
      state_lib.of(optimizer, params, self.mesh),
      self.mesh,
      **options,
    )
    rng = np.random.default_rng(0)
    count = ROUNDS * SLOTS // SAMPLES
    size = (count, shape.prompt_length)
    self.prompts = rng.integers(3, shape.vocab, size).tolist()

  def draw(self, calls: int) -> list[engine.Samples]:
    """All rows of a run, in so many calls."""
    size = len(self.prompts) // calls
    found = []
    for start in range(0, len(self.prompts), size):
      rows = np.arange(start * SAMPLES, (start + size) * SAMPLES)
      found.append(
        self.generate(
          self.state.params,
          self.prompts[start : start + size],
          rows.astype(np.uint32)[:, None],
        )
      )
    return found

  def batches(self, drawn: list[engine.Samples]) -> list[Batch]:
    """The rows of each round as the batch of an update."""
    prompts = SLOTS // SAMPLES
    place = sharding.batch(self.mesh)
    return [
      jax.device_put(
        collate.batch(_rollouts(self.prompts[i * prompts :], out)), place
      )
      for i, out in enumerate(drawn)
    ]

  def score_all(self, batches: list[Batch]) -> None:
    for batch in batches:
      jax.block_until_ready(self.score(self.state.params, batch, SAMPLES))

  def update_all(self, batches: list[Batch]) -> None:
    for batch in batches:
      self.state, report = self.update(self.state, batch, SAMPLES)
    jax.block_until_ready(report)


def _rollouts(prompts: list[list[int]], out: engine.Samples):
  """Rows whose reward differs: the parity of their length."""
  for index, length in enumerate(out.lengths):
    yield records.Rollout(
      prompt_id=str(index // SAMPLES),
      sample=index % SAMPLES,
      prompt="",
      context=tuple(prompts[index // SAMPLES]),
      tokens=out.tokens[index, :length],
      logprobs=out.logprobs[index, :length],
      entropies=out.entropies[index, :length],
      finished=bool(out.finished[index]),
      text="",
      answer="",
      reward=float(length % 2),
      outcome="",
    )


def measure(shape: bench.Shape, reps: int) -> dict[str, Any]:
  """CPU and wall seconds of each phase of one size, for both schedules."""
  setup = Setup(shape)
  rounds, stages = setup.draw(ROUNDS), setup.draw(STAGES)  # compiles
  tokens = sum(int(out.lengths.sum()) for out in rounds)
  if tokens != sum(int(out.lengths.sum()) for out in stages):
    raise RuntimeError("rounds and stages drew different rows")
  batches = setup.batches(rounds[:TIMED])
  setup.score_all(batches)
  setup.update_all(batches)
  phases: dict[str, Callable[[], Any]] = {
    "generate_rounds": lambda: setup.draw(ROUNDS),
    "generate_stages": lambda: setup.draw(STAGES),
    "score": lambda: setup.score_all(batches),
    "update": lambda: setup.update_all(batches),
  }
  times: dict[str, list[tuple[float, float]]] = {name: [] for name in phases}
  for _ in range(reps):
    for name, work in phases.items():
      wall, cpu = time.perf_counter(), time.process_time()
      work()
      times[name].append(
        (time.process_time() - cpu, time.perf_counter() - wall)
      )
  scale = {"score": ROUNDS / TIMED, "update": ROUNDS / TIMED}
  found = {
    kind: {
      name: scale.get(name, 1.0) * statistics.median(t[at] for t in taken)
      for name, taken in times.items()
    }
    for at, kind in enumerate(("cpu", "wall"))
  }
  return {
    "tokens": tokens,
    "rows": ROUNDS * SLOTS,
    **{
      kind: {name: round(value, 3) for name, value in seconds.items()}
      for kind, seconds in found.items()
    },
    **ratios(found["cpu"]),
  }


def ratios(seconds: dict[str, float]) -> dict[str, float]:
  """What stages save in generation, and end to end with their own scoring.

  `share` is the part of a round that is generation.
  """
  rounds = seconds["generate_rounds"] + seconds["update"]
  stages = seconds["generate_stages"] + seconds["score"] + seconds["update"]
  return {
    "generation": round(
      seconds["generate_rounds"] / seconds["generate_stages"], 3
    ),
    "end to end": round(rounds / stages, 3),
    "share": round(seconds["generate_rounds"] / rounds, 3),
  }


def implied_share(generation: float, whole: float) -> float:
  """The share f of generation in a round for which both ratios hold.

  whole = 1 / (f / generation + 1 - f), Amdahl's law.
  """
  return (1 - 1 / whole) / (1 - 1 / generation)


def table(results: dict[str, Any]) -> str:
  """Markdown, one line per size, and what the paper's figures imply."""
  lines = [
    "| size | generate, rounds | generate, stages | score | update | "
    "generation | end to end | generation's share |",
    "|---|---|---|---|---|---|---|---|",
  ]
  for name, found in results["sizes"].items():
    cells = [f"{value:.1f}" for value in found["cpu"].values()]
    cells += [f"{found[key]:.2f}x" for key in PAPER]
    lines.append(f"| {name} | {' | '.join(cells)} | {found['share']:.0%} |")
  share = implied_share(*PAPER.values())
  ends = " | ".join(f"{value:.2f}x" for value in PAPER.values())
  lines.append(f"| the paper's | | | | | {ends} | {share:.0%}, implied |")
  return "\n".join(lines)


def main() -> int:
  values = flags.FLAGS
  results = {
    **jobs_lib.machine(),
    "jax": jax.__version__,
    "schedules": {"rounds": ROUNDS, "stages": STAGES, "slots": SLOTS},
    "sizes": {name: measure(SIZES[name], values.reps) for name in values.sizes},
  }
  if values.out:
    path = pathlib.Path(values.out).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
  print(json.dumps(results, indent=1))
  print(table(results))
  return 0


if __name__ == "__main__":
  flags.DEFINE_multi_enum("sizes", list(SIZES), list(SIZES), "Which sizes.")
  flags.DEFINE_integer("reps", 2, "Passes of each schedule.", 1)
  flags.DEFINE_string("out", "", "Also write the JSON here.")
  flags_lib.run(main)
