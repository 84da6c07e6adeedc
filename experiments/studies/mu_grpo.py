"""How stale may GRPO's samples be, and what clipping and the veto do then.

  python -m experiments.studies.mu_grpo --out=runs/mu_grpo

From one warm start per seed, with equal updates and equal samples: on-policy
GRPO, a round for each update; four stages of 16 updates under the standard
window of the ratio, under the relaxed one, under one without a lower bound,
and without any; each with and without the negative-advantage veto; and the
variants of the veto. What is measured: pass@1 and pass@16 on held-out
problems, the phases' wall and CPU seconds, and what happens as samples grow
stale. Every run is one `experiments.run` in its own process; what is finished
is not repeated. The results go to mu_grpo.json, the figure to mu_grpo.png.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from experiments import flags as flags_lib
from experiments.studies import jobs as jobs_lib
from experiments.studies import mu_grpo_report
from mrl_jax import config_names
from mrl_jax.train import metrics, turn

FLAGFILE = "experiments/flagfiles/mu_grpo.flags"
STAGES, UPDATES, PROMPTS = 4, 16, 64  # prompts of an update
BINS = 4  # of updates, in which a stage is summed up

_STAGED = (
  f"--rounds={STAGES}",
  f"--updates={UPDATES}",
  f"--prompts={UPDATES * PROMPTS}",
  "--part=0",
)
_ROUNDS = (
  f"--rounds={STAGES * UPDATES}",
  "--updates=1",
  f"--prompts={PROMPTS}",
  "--part=0",
)
_WINDOWS = {
  "standard": ("--clip_low=0.2", "--clip_high=0.28", "--dual_clip=0"),
  "relaxed": (),  # of the flagfile: 0.5, 1.0 and a dual clip at 3
  "open": ("--clip_low=1.0",),
  "unclipped": ("--clip_low=1.0", "--clip_high=1e9", "--dual_clip=0"),
}
_TAU = "--veto_tau=0.5"  # one for all windows
_VARIANTS = [v for v in config_names.VETOES if v not in ("none", "suffix")]


def _arms() -> dict[str, tuple[str, ...]]:
  found = {}
  for veto in ("none", "suffix"):
    end = "" if veto == "none" else "_veto"
    stop = (f"--veto={veto}", _TAU)
    found[f"on_policy{end}"] = (*_ROUNDS, *_WINDOWS["standard"], *stop)
    for name, window in _WINDOWS.items():
      found[f"{name}{end}"] = (*_STAGED, *window, *stop)
  for name in _VARIANTS:
    tau = () if name == "cumulative" else (_TAU,)
    found[f"relaxed_{name}"] = (*_STAGED, f"--veto={name}", *tau)
  return found


ARMS = _arms()
HELD_OUT = ("--problems=200", "--n=16", "--k=1,16")


def pipeline(
  out: pathlib.Path, seed: int, arm: str, more: Sequence[str] = ()
) -> list[jobs_lib.Job]:
  """Warm start, training and evaluation of one seed and arm, in order."""
  root = out / f"seed{seed}"
  start, run = root / "char", root / arm
  words = [
    "experiments.warmstart",
    "--tokenizer=char",
    "--until=0.45",
    f"--seed={seed}",
    f"--out={start}",
  ]
  train = [
    "experiments.run",
    f"--flagfile={FLAGFILE}",
    *ARMS[arm],
    f"--workdir={run}",
    f"--policies={start}",
    f"--seed={seed}",
    "--save_every=0",
    "--save_updates=0",
    "--save_rollouts=false",
    "--progress=plain",
    *more,
  ]
  score = ["experiments.evaluate", f"--run={run}", *HELD_OUT]
  return [
    jobs_lib.Job(words, start / "model.safetensors"),
    jobs_lib.Job(train, run / "export" / "char" / "model.safetensors"),
    jobs_lib.Job([*score, f"--out={run / 'eval.json'}"], run / "eval.json"),
  ]


def run(
  out: pathlib.Path,
  arms: Sequence[str],
  seeds: int,
  jobs: int,
  more: Sequence[str],
) -> None:
  """Runs what is missing: first the warm starts, then every arm."""
  lanes = [
    pipeline(out, seed, arm, more) for seed in range(seeds) for arm in arms
  ]
  starts = [lane[:1] for lane in lanes[:: len(arms)]]
  jobs_lib.drain("warm starts", starts, jobs, out)
  jobs_lib.drain("runs", [lane[1:] for lane in lanes], jobs, out)


def collect(
  out: pathlib.Path, arms: Sequence[str], seeds: int
) -> dict[str, Any]:
  """All finished runs as one JSON value."""
  seconds = jobs_lib.seconds(out)
  found = []
  for seed in range(seeds):
    for arm in arms:
      folder = out / f"seed{seed}" / arm
      if (folder / "eval.json").exists():
        made = f"seed{seed}/{arm}/export/char/model.safetensors"
        spent = {"process_cpu": seconds.get(made)}
        found.append({"seed": seed, "arm": arm, **_read(folder), **spent})
  return {
    "task": "chain_arithmetic, 1 to 4 operations",
    "stages": STAGES,
    "updates": UPDATES,
    "prompts": PROMPTS,
    **jobs_lib.machine(),
    "runs": found,
  }


def _read(folder: pathlib.Path) -> dict[str, Any]:
  scores = json.loads((folder / "eval.json").read_text())["results"]["char"]
  rounds = metrics.read(folder / "metrics.jsonl")
  updates = metrics.read(folder / "updates.jsonl")
  times = metrics.read(folder / "timings.jsonl")
  return {
    "pass@1": scores["pass@1"]["mean"],
    "pass@16": scores["pass@16"]["mean"],
    "curve": [round(r["pass@1"], 4) for r in rounds],
    "binned": {
      key: _binned(updates, key)
      for key in ("entropy", "clip_low", "clip_high", "ess", "veto", "kl")
    },
    "veto_rows": _mean(updates, "veto_rows"),
    "veto_position": _mean(updates, "veto_position"),
    "first_gap": max(u["log_ratio_max"] for u in updates if not u["staleness"]),
    "least_ratio_max": min(u["ratio_max"] for u in updates),
    "updates_made": len(updates),
    "generated": sum(t["generated"] for t in times),
    "phases": {
      kind: {
        name: round(sum(t[f"{kind}/{name}"] for t in times), 3)
        for name in turn.PHASES
      }
      for kind in ("seconds", "cpu")
    },
  }


def _binned(records: Sequence[dict[str, Any]], key: str) -> list[float | None]:
  """Means over BINS updates in turn, all stages after one another."""
  values = [r.get(key) for r in records]
  means = []
  for start in range(0, len(values), BINS):
    here = [v for v in values[start : start + BINS] if v is not None]
    means.append(round(float(np.mean(here)), 5) if here else None)
  return means


def _mean(records: Sequence[dict[str, Any]], key: str) -> float | None:
  values = [r[key] for r in records if r.get(key) is not None]
  return round(float(np.mean(values)), 5) if values else None


def main() -> int:
  values = flags.FLAGS
  out = jobs_lib.folder()
  if not values.report:
    run(out, values.arms, values.seeds, values.jobs, values.more)
  results = collect(out, values.arms, values.seeds)
  jobs_lib.publish(
    out,
    "mu_grpo",
    results,
    mu_grpo_report.figure,
    mu_grpo_report.table,
    mu_grpo_report.phases,
  )
  return 0


if __name__ == "__main__":
  jobs_lib.define("runs/mu_grpo")
  flags.DEFINE_multi_enum("arms", list(ARMS), list(ARMS), "Which to compare.")
  flags.DEFINE_multi_string("more", [], "Further flags of every run.")
  flags_lib.run(main)
