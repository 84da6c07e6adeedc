"""GRPO, PRP, XGRPO and SGT on two tiny policies, over several seeds.

  python -m experiments.studies.mutual --out=runs/mutual

Each seed makes its own warm starts, shared by all methods, and each method
then trains on the same prompts with the same number of samples. What is
measured: pass@1 and pass@16 on held-out problems, the learning curves, and
stability, the variance of pass@1 over the last rounds. Every run is one
`experiments.run` in its own process, so the study can be stopped and started
again; what is finished is not repeated. The results go to mutual.json, the
figure to mutual.png, and a table is printed.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from experiments import flags as flags_lib
from experiments.studies import jobs as jobs_lib
from experiments.studies import mutual_report
from mrl_jax.train import metrics

KINDS = {"char": 0.45, "merged": 1.05}  # and the loss that warm starts stop at
# The flagfile of each method, and what it changes.
METHODS = {
  "grpo": ("grpo",),
  "prp": ("prp",),
  "xgrpo": ("xgrpo",),
  "sgt": ("sgt",),
  "sgt_prompts": ("sgt", "--rescue_mean=prompts", "--rescue_weight=1.0"),
}
HELD_OUT = ("--problems=200", "--n=16", "--k=1,16")
FLAGFILE = "experiments/flagfiles/{}.flags"


def pipeline(
  out: pathlib.Path, seed: int, method: str, rounds: int
) -> list[jobs_lib.Job]:
  """Warm starts, training and evaluation of one seed and method, in order."""
  root = out / f"seed{seed}"
  run = root / method
  jobs = [
    jobs_lib.Job(
      [
        "experiments.warmstart",
        f"--tokenizer={kind}",
        f"--until={until}",
        f"--seed={seed}",
        f"--out={root / kind}",
      ],
      root / kind / "model.safetensors",
    )
    for kind, until in KINDS.items()
  ]
  train = [
    "experiments.run",
    f"--flagfile={FLAGFILE.format(METHODS[method][0])}",
    *METHODS[method][1:],
    f"--workdir={run}",
    f"--policies={','.join(str(root / kind) for kind in KINDS)}",
    f"--seed={seed}",
    f"--rounds={rounds}",
    f"--save_every={rounds}",
    "--progress=plain",
    "--save_rollouts=false",
    "--exchange=memory",
  ]
  jobs.append(
    jobs_lib.Job(train, run / "export" / "merged" / "model.safetensors")
  )
  score = ["experiments.evaluate", f"--run={run}", *HELD_OUT]
  jobs.append(
    jobs_lib.Job([*score, f"--out={run / 'eval.json'}"], run / "eval.json")
  )
  return jobs


def run(
  out: pathlib.Path, methods: Sequence[str], seeds: int, rounds: int, jobs: int
) -> None:
  """Runs what is missing: first all warm starts, then every method."""
  lanes = [
    pipeline(out, seed, method, rounds)
    for seed in range(seeds)
    for method in methods
  ]
  first = len(KINDS)
  starts = [lane[:first] for lane in lanes[:: len(methods)]]
  jobs_lib.drain("warm starts", starts, jobs, out)
  jobs_lib.drain("runs", [lane[first:] for lane in lanes], jobs, out)


def collect(
  out: pathlib.Path, methods: Sequence[str], seeds: int
) -> dict[str, Any]:
  """All finished runs as one JSON value: curves, held-out scores, counts."""
  found: list[dict[str, Any]] = []
  seconds = jobs_lib.seconds(out)
  for seed in range(seeds):
    for method in methods:
      root = out / f"seed{seed}" / method
      if not (root / "eval.json").exists():
        continue
      scores = json.loads((root / "eval.json").read_text())["results"]
      records = metrics.read(root / "metrics.jsonl")
      for policy in KINDS:
        mine = [r for r in records if r["policy"] == policy]
        found.append(
          {
            "seed": seed,
            "method": method,
            "policy": policy,
            "curve": [round(r["pass@1"], 4) for r in mine],
            "pass@1": scores[policy]["pass@1"]["mean"],
            "pass@16": scores[policy]["pass@16"]["mean"],
            "cpu_seconds": seconds.get(
              f"seed{seed}/{method}/export/merged/model.safetensors"
            ),
            **_sums(mine),
          }
        )
  return {
    "task": "chain_arithmetic, 1 to 4 operations",
    **jobs_lib.machine(),
    "runs": found,
  }


_SUMS = ("exchange/admitted", "exchange/used", "exchange/refused")
_MEANS = ("peer/chi2", "peer/ess", "rescue/share", "values/shift")


def _sums(records: Sequence[dict[str, Any]]) -> dict[str, float]:
  values = {}
  for key in (*_SUMS, *_MEANS):
    mine = [r[key] for r in records if r.get(key) is not None]
    if mine:
      value = sum(mine) if key in _SUMS else float(np.mean(mine))
      values[key] = round(value, 5)
  return values


def main() -> int:
  values = flags.FLAGS
  out = jobs_lib.folder()
  if not values.report:
    run(out, values.methods, values.seeds, values.rounds, values.jobs)
  results = collect(out, values.methods, values.seeds)
  jobs_lib.publish(
    out,
    "mutual",
    results,
    mutual_report.figure,
    mutual_report.table,
  )
  return 0


if __name__ == "__main__":
  jobs_lib.define("runs/mutual")
  flags.DEFINE_multi_enum(
    "methods", list(METHODS), list(METHODS), "Which to compare."
  )
  flags.DEFINE_integer("rounds", 60, "Rounds of each run.", 1)
  flags_lib.run(main)
