"""What exploration adds to GRPO, and whether it is the entropy that does it.

  python -m experiments.studies.extra --out=runs/extra

From one warm start per seed and task, with equal samples and updates: GRPO;
the novelty bonus, and a louder one; prefix regeneration; both; and controls: a
random prefix, the prefix of highest entropy, and the hard prompt again
from its start, all in the same slots. The tasks are chain arithmetic of 4 to
8 operations, whose answer is one, and countdown with 3 to 5 numbers, whose
right answers are many. Measured on held-out problems: pass@1, pass@4 and
pass@16, by difficulty, and how many right answers there are among 16. Every
run is one `experiments.run` in its own process; what is finished is not
repeated. The results go to extra.json, the figure to extra.png.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from experiments import flags as flags_lib
from experiments.studies import extra_report
from experiments.studies import jobs as jobs_lib
from mrl_jax.train import metrics, turn

KS = (1, 4, 16)
HELD_OUT = ("--problems=200", "--n=16", "--k=1,4,16")


class Task(NamedTuple):
  """A task, and the warm start from which it is learned."""

  name: str
  start: tuple[str, ...]  # flags of the warm start
  arguments: Mapping[str, int]
  limit: int  # completion tokens


TASKS = {
  "chain": Task(
    "chain_arithmetic",
    ("--until=0.45",),
    {"min_operations": 4, "max_operations": 8, "size": 512},
    10,
  ),
  "countdown": Task(
    "countdown",
    (
      "--task=countdown",
      '--task_args={"min_numbers": 3, "max_numbers": 5}',
      "--steps=1000",
      "--until=0",
    ),
    {"min_numbers": 3, "max_numbers": 5, "size": 512},
    12,
  ),
}
_COMMON = (
  "--rounds=64",
  "--prompts=64",
  "--samples=16",
  "--lr=2e-4",
  "--lr_warmup=5",
  "--clip_norm=1.0",
  "--save_every=0",
  "--save_rollouts=false",
  "--progress=plain",
  "--regenerate_boundary=tokens",
  "--regenerate_gap=1",
  "--regenerate_slots=8",
  "--regenerate_warmup=4",
)
START = "start"  # the warm start itself, which is not trained
ARMS = {
  START: (),
  "grpo": ("--recipe=grpo",),
  "novelty": ("--recipe=novelty",),
  # Answers of a dozen characters are all near one another: the usual weight
  # adds a thousandth to an advantage.
  "loud": ("--recipe=novelty", "--novelty_weight=30"),
  "regenerate": ("--recipe=regenerate",),
  "both": ("--recipe=extra",),
  "random": ("--recipe=regenerate", "--regenerate=random"),
  "highest": ("--recipe=regenerate", "--regenerate=highest"),
  "restart": ("--recipe=regenerate", "--regenerate=restart"),
}


def pipeline(
  out: pathlib.Path,
  task: str,
  seed: int,
  arm: str,
  more: Sequence[str] = (),
) -> list[jobs_lib.Job]:
  """Warm start, training and evaluation of one task, seed and arm."""
  root, what = out / task / f"seed{seed}", TASKS[task]
  start, run = root / "char", root / arm
  words = [
    "experiments.warmstart",
    "--tokenizer=char",
    *what.start,
    f"--seed={seed}",
    f"--out={start}",
  ]
  made = jobs_lib.Job(words, start / "model.safetensors")
  about = [
    f"--task={what.name}",
    f"--task_args={json.dumps(what.arguments)}",
    f"--completion_limit={what.limit}",
    "--prompt_limit=32",
    f"--seed={seed}",
  ]
  score = ["experiments.evaluate", *HELD_OUT, f"--out={run / 'eval.json'}"]
  if arm == START:
    score += [f"--policies={start}", *about]
    return [made, jobs_lib.Job(score, run / "eval.json")]
  train = [
    "experiments.run",
    *_COMMON,
    *ARMS[arm],
    *about,
    f"--workdir={run}",
    f"--policies={start}",
    *more,
  ]
  return [
    made,
    jobs_lib.Job(train, run / "export" / "char" / "model.safetensors"),
    jobs_lib.Job([*score, f"--run={run}"], run / "eval.json"),
  ]


def run(
  out: pathlib.Path,
  tasks: Sequence[str],
  arms: Sequence[str],
  seeds: int,
  jobs: int,
  more: Sequence[str],
) -> None:
  """Runs what is missing: first the warm starts, then every arm."""
  lanes = [
    pipeline(out, task, seed, arm, more)
    for seed in range(seeds)
    for task in tasks
    for arm in arms
  ]
  starts = [lane[:1] for lane in lanes[:: len(arms)]]
  jobs_lib.drain("warm starts", starts, jobs, out)
  jobs_lib.drain("runs", [lane[1:] for lane in lanes], jobs, out)


def collect(
  out: pathlib.Path, tasks: Sequence[str], arms: Sequence[str], seeds: int
) -> dict[str, Any]:
  """All finished runs as one JSON value."""
  found = []
  for task in tasks:
    for seed in range(seeds):
      for arm in arms:
        folder = out / task / f"seed{seed}" / arm
        if (folder / "eval.json").exists():
          name = {"task": task, "seed": seed, "arm": arm}
          found.append({**name, **_read(folder)})
  return {
    "tasks": {
      task: {"name": TASKS[task].name, **TASKS[task].arguments}
      for task in tasks
    },
    **jobs_lib.machine(),
    "runs": found,
  }


def _read(folder: pathlib.Path) -> dict[str, Any]:
  scores = json.loads((folder / "eval.json").read_text())["results"]["char"]
  found = {
    **{f"pass@{k}": scores[f"pass@{k}"]["mean"] for k in KS},
    "distinct_right": scores["distinct"],
    "by_difficulty": scores["by_difficulty"],
  }
  if folder.name == START:
    return {**found, "entropy": None, "explored": {}}
  rounds = metrics.read(folder / "metrics.jsonl")
  times = metrics.read(folder / "timings.jsonl")
  keys = sorted({k for r in rounds for k in r if k.startswith("explore/")})
  return {
    **found,
    "curve": [round(r["pass@1"], 4) for r in rounds],
    "explored": {key: _mean(rounds, key) for key in keys},
    "all_wrong": _mean(rounds[-8:], "all_wrong"),
    "all_correct": _mean(rounds[-8:], "all_correct"),
    "entropy": _mean(rounds[-8:], "entropy"),
    "generated": sum(t["generated"] for t in times),
    "cpu": {
      name: round(sum(t[f"cpu/{name}"] for t in times), 3)
      for name in turn.PHASES
    },
    # Of the second half: by then all shapes are compiled.
    "cpu_late": {
      name: round(sum(t[f"cpu/{name}"] for t in times[len(times) // 2 :]), 3)
      for name in turn.PHASES
    },
  }


def _mean(records: Sequence[dict[str, Any]], key: str) -> float | None:
  values = [r[key] for r in records if r.get(key) is not None]
  return round(float(np.mean(values)), 5) if values else None


def main() -> int:
  values = flags.FLAGS
  out = jobs_lib.folder()
  if not values.report:
    run(out, values.tasks, values.arms, values.seeds, values.jobs, values.more)
  results = collect(out, values.tasks, values.arms, values.seeds)
  jobs_lib.publish(
    out,
    "extra",
    results,
    extra_report.figure,
    extra_report.table,
    extra_report.by_difficulty,
    extra_report.explored,
    extra_report.phases,
  )
  return 0


if __name__ == "__main__":
  jobs_lib.define("runs/extra")
  flags.DEFINE_multi_enum("tasks", list(TASKS), list(TASKS), "Which tasks.")
  flags.DEFINE_multi_enum("arms", list(ARMS), list(ARMS), "Which to compare.")
  flags.DEFINE_multi_string("more", [], "Further flags of every run.")
  flags_lib.run(main)
