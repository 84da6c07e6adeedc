"""What a meta-trained potential adds to GRPO, in each of its three modes.

  python -m experiments.studies.merla --out=runs/merla_study

Per seed: one warm start, its answers to auxiliary tasks (those with the
operators and operands of the task that is learned only judge), potentials
meta-trained on these and untrained ones, and from the same start GRPO; GRPO
shaped on tokens, on the sequence's reward, and on it bounded, each by a
trained, an untrained and a weightless potential; and two baselines,
PPO-style (symmetric clip, four minibatches, KL to the start; no critic) and
DAPO-style (token mean, tied groups left out). Chain arithmetic of 4 to 8
operations. Measured is the task's own reward, never the shaped one: held-out
pass@1, pass@4 and pass@16, rounds to nine tenths of the rise, variance of the
last rounds' reward and of the gradient norm. Every run is one
`experiments.run` in its own process; what is finished is not repeated.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from experiments import flags as flags_lib
from experiments.studies import jobs as jobs_lib
from experiments.studies import merla_report
from mrl_jax.train import metrics, turn

KS = (1, 4, 16)
ARGUMENTS = {"min_operations": 4, "max_operations": 8, "size": 512}
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
)
START = "start"  # the warm start itself, which is not trained
LAST = 16  # rounds whose variance is the instability


class Kind(NamedTuple):
  """A potential: flags of its meta-training."""

  mode: str
  bound: int
  steps: int


POTENTIALS = {
  "token": Kind("token", 1, 2000),
  "sequence": Kind("sequence", 4, 2000),
  "bounded": Kind("bounded", 1, 2000),
  "untrained": Kind("token", 1, 0),
  "untrained_wide": Kind("sequence", 4, 0),
}
_CONSTANT = "--reduction=constant_mean"


def _shaped(mode: str, potential: str, *more: str) -> tuple[str, ...]:
  """Flags of GRPO shaped by a potential; {} is where potentials are."""
  return (
    "--recipe=merla",
    f"--shaping={mode}",
    f"--potential={{}}/{potential}",
    _CONSTANT,
    *more,
  )


ARMS = {
  START: (),
  "grpo": (_CONSTANT,),
  "token": _shaped("token", "token"),
  "token_light": _shaped("token", "token", "--shaping_alpha=0.1"),
  "sequence": _shaped("sequence", "sequence"),
  "bounded": _shaped("bounded", "bounded"),
  "token_untrained": _shaped("token", "untrained"),
  "sequence_untrained": _shaped("sequence", "untrained_wide"),
  "bounded_untrained": _shaped("bounded", "untrained"),
  "ppo": (
    "--clip_low=0.2",
    "--clip_high=0.2",
    "--updates=4",
    "--kl_coefficient=0.01",
    "--reduction=token_mean",
  ),
  "dapo": ("--drop_degenerate=true", "--reduction=token_mean"),
  "token_zero": _shaped("token", "token", "--shaping_alpha=0"),
  "sequence_zero": _shaped("sequence", "sequence", "--shaping_alpha=0"),
  "bounded_zero": _shaped("bounded", "bounded", "--shaping_alpha=0"),
}


def starts(root: pathlib.Path, seed: int) -> list[jobs_lib.Job]:
  """The warm start of a seed, and its answers to the auxiliary tasks."""
  start, pairs = root / "char", root / "pairs.jsonl"
  made = [
    *("experiments.warmstart", "--tokenizer=char", "--until=0.45"),
    *(f"--seed={seed}", f"--out={start}"),
  ]
  asked = [
    *("experiments.auxiliary", f"--policy={start}", f"--seed={seed}"),
    f"--out={pairs}",
  ]
  return [
    jobs_lib.Job(made, start / "model.safetensors"),
    jobs_lib.Job(asked, pairs),
  ]


def potential(root: pathlib.Path, seed: int, name: str) -> jobs_lib.Job:
  """One potential of a seed."""
  kind, out = POTENTIALS[name], root / "potentials" / name
  words = [
    "experiments.meta_train",
    f"--policy={root / 'char'}",
    f"--data={root / 'pairs.jsonl'}",
    f"--out={out}",
    f"--mode={kind.mode}",
    f"--bound={kind.bound}",
    f"--steps={kind.steps}",
    f"--seed={seed}",
  ]
  return jobs_lib.Job(words, out / "potential.json")


def pipeline(
  root: pathlib.Path, seed: int, arm: str, more: Sequence[str] = ()
) -> list[jobs_lib.Job]:
  """Training and evaluation of one seed and arm."""
  start, run = root / "char", root / arm
  about = [
    "--task=chain_arithmetic",
    f"--task_args={json.dumps(ARGUMENTS)}",
    "--completion_limit=10",
    "--prompt_limit=32",
    f"--seed={seed}",
  ]
  score = [
    *("experiments.evaluate", "--problems=200", "--n=16"),
    *(f"--k={','.join(map(str, KS))}", f"--out={run / 'eval.json'}"),
  ]
  if arm == START:
    score += [f"--policies={start}", *about]
    return [jobs_lib.Job(score, run / "eval.json")]
  train = [
    "experiments.run",
    *_COMMON,
    *(flag.replace("{}", str(root / "potentials")) for flag in ARMS[arm]),
    *about,
    f"--workdir={run}",
    f"--policies={start}",
    *more,
  ]
  return [
    jobs_lib.Job(train, run / "export" / "char" / "model.safetensors"),
    jobs_lib.Job([*score, f"--run={run}"], run / "eval.json"),
  ]


def run(
  out: pathlib.Path,
  arms: Sequence[str],
  seeds: int,
  jobs: int,
  more: Sequence[str],
) -> None:
  """Runs what is missing: warm starts, potentials, and then every arm."""
  roots = [(out / f"seed{seed}", seed) for seed in range(seeds)]
  jobs_lib.drain("warm starts", [starts(*r) for r in roots], jobs, out)
  made = [[potential(*r, name)] for r in roots for name in POTENTIALS]
  jobs_lib.drain("potentials", made, jobs, out)
  lanes = [pipeline(*r, arm, more) for r in roots for arm in arms]
  jobs_lib.drain("runs", lanes, jobs, out)


def collect(
  out: pathlib.Path, arms: Sequence[str], seeds: int
) -> dict[str, Any]:
  """All finished runs as one JSON value."""
  found, judged = [], []
  for seed in range(seeds):
    root = out / f"seed{seed}"
    for arm in arms:
      if (root / arm / "eval.json").exists():
        found.append({"seed": seed, "arm": arm, **_read(root / arm)})
    for name in POTENTIALS:
      path = root / "potentials" / name / "potential.json"
      if path.exists():
        report = json.loads(path.read_text())["report"]
        kept = {k: report[k] for k in ("held_out", "cpu_seconds", "pairs")}
        judged.append({"seed": seed, "potential": name, **kept})
  return {
    "task": {"name": "chain_arithmetic", **ARGUMENTS},
    **jobs_lib.machine(),
    "potentials": judged,
    "runs": found,
  }


def _read(folder: pathlib.Path) -> dict[str, Any]:
  scores = json.loads((folder / "eval.json").read_text())["results"]["char"]
  found = {
    **{f"pass@{k}": scores[f"pass@{k}"]["mean"] for k in KS},
    "length": scores["length"],
  }
  if folder.name == START:
    return found
  rounds = metrics.read(folder / "metrics.jsonl")
  times = metrics.read(folder / "timings.jsonl")
  curve = [r["reward"] for r in rounds]
  norms = [r["grad_norm"] for r in rounds]
  keys = sorted({k for r in rounds for k in r if k.startswith("shaping/")})
  late = times[len(times) // 2 :]
  return {
    **found,
    "curve": [round(value, 4) for value in curve],
    "to_ninety": to_ninety(curve),
    "reward_variance": float(np.var(curve[-LAST:], ddof=1)),
    "rest_variance": rest_variance(curve),
    "norm_variance": float(np.var(norms[-LAST:], ddof=1)),
    "norm": float(np.mean(norms[-LAST:])),
    "shaping": {k: float(np.mean([r[k] for r in rounds])) for k in keys},
    "cpu_late": {
      name: round(sum(t[f"cpu/{name}"] for t in late), 3)
      for name in turn.PHASES
    },
  }


def to_ninety(curve: Sequence[float], width: int = 8) -> int:
  """Rounds until a running mean has made nine tenths of its whole rise."""
  means = np.convolve(curve, np.ones(width) / width, mode="valid")
  goal = means[0] + 0.9 * (means[-width:].mean() - means[0])
  return int(np.argmax(means >= goal)) + width


def rest_variance(curve: Sequence[float]) -> float:
  """Variance of the reward around a straight line through the last half."""
  late = np.asarray(curve[len(curve) // 2 :])
  line = np.polyfit(np.arange(len(late)), late, 1)
  rest = late - np.polyval(line, np.arange(len(late)))
  return float((rest**2).sum() / (len(late) - 2))


def main() -> int:
  values = flags.FLAGS
  out = jobs_lib.folder()
  if not values.report:
    run(out, values.arms, values.seeds, values.jobs, values.more)
  results = collect(out, values.arms, values.seeds)
  jobs_lib.publish(
    out,
    "merla",
    results,
    merla_report.figure,
    merla_report.table,
    merla_report.stability,
    merla_report.potentials,
  )
  return 0


if __name__ == "__main__":
  jobs_lib.define("runs/merla_study")
  flags.DEFINE_multi_enum("arms", list(ARMS), list(ARMS), "Which to compare.")
  flags.DEFINE_multi_string("more", [], "Further flags of every run.")
  flags_lib.run(main)
