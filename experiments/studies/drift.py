"""A potential on a frozen against an evolving encoder.

  python -m experiments.studies.drift --run=RUN --potential=DIR --out=drift.json

RUN is a run of GRPO that kept several checkpoints. On one fixed set of
held-out answers of the initial policy, the potential is read from the states
of the initial policy, as training does, and from those of every checkpoint, as
it would be if the encoder were the policy itself: how much each value moves,
how well it still tells right from wrong, and what shaping would add to a
response in whose middle the encoder changes its version: with one version it
is nothing, exactly.
"""

import functools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import matplotlib.figure
import numpy as np
from absl import flags

from experiments import evaluate, plots, tasks
from experiments import flags as flags_lib
from mrl_jax import collate, records
from mrl_jax import config as config_lib
from mrl_jax.kernels import potentials
from mrl_jax.model import transformer
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.shaping import potential
from mrl_jax.train import checkpoint
from mrl_jax.train import policy as policy_lib


def read(
  model: transformer.Model,
  params: Any,
  found: potential.Potential,
  rows: Sequence[records.Rollout],
  samples: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """phi(s_t) [B, T] and Phi [B] of the rows under one encoder, and the mask."""
  batch = jax.device_put(collate.batch(rows))
  mask = batch.weights != 0

  @jax.jit
  def run(params):
    states = model.hidden(
      params,
      batch.context[::samples],
      batch.context_lengths[::samples],
      batch.tokens,
    )
    values = potential.values(found.spec, found.params, states, mask)
    phi = potentials.telescoping(values, mask)
    return phi, potentials.last(values, mask)

  return *map(np.asarray, run(params)), np.asarray(mask)


def accuracy(
  values: np.ndarray, right: np.ndarray, samples: int
) -> float | None:
  """How often a right answer's value is above a wrong one's, per prompt."""
  scores = []
  for start in range(0, len(values), samples):
    group, good = (
      values[start : start + samples],
      right[start : start + samples],
    )
    if good.any() and not good.all():
      apart = group[good][:, None] - group[~good][None, :]
      scores.append(float(((apart > 0) + 0.5 * (apart == 0)).mean()))
  return float(np.mean(scores)) if scores else None


def compare(
  first: tuple[np.ndarray, np.ndarray, np.ndarray],
  now: tuple[np.ndarray, np.ndarray, np.ndarray],
  right: np.ndarray,
  samples: int,
) -> dict[str, float | None]:
  """One checkpoint's numbers; `first` is the frozen encoder's."""
  (frozen, whole, mask), (phi, moved, _) = first, now
  lengths = mask.sum(1)
  middle = np.maximum(lengths // 2, 0)
  rows = np.arange(len(lengths))
  radius = np.ptp(moved.reshape(-1, samples), axis=1) / 2
  return {
    "phi_std": float(phi[mask].std()),
    "moved": float(np.abs(phi - frozen)[mask].mean()),
    "moved_whole": float(np.abs(moved - whole).mean()),
    "residual": float(np.abs(phi - frozen)[rows, middle].mean()),
    "radius": float(radius.mean()),
    "middle": accuracy(phi[rows, middle], right, samples),
    "whole": accuracy(moved, right, samples),
  }


def study(
  actor: policy_lib.Actor,
  encoders: Sequence[tuple[int, Any]],
  found: potential.Potential,
  rows: Sequence[records.Rollout],
  samples: int,
) -> dict[str, Any]:
  """The numbers of every encoder, the frozen one first."""
  right = np.asarray([row.outcome == "correct" for row in rows])
  view = functools.partial(
    read, actor.model, found=found, rows=rows, samples=samples
  )
  seen = [(rounds, view(params)) for rounds, params in encoders]
  first = seen[0][1]
  mask = first[2]
  over = np.stack([phi for _, (phi, _, _) in seen])
  return {
    "answers": len(rows),
    "pass@1": float(right.mean()),
    # Of each value over the checkpoints; with a frozen encoder it is 0.
    "variance_over_training": float(over.var(axis=0)[mask].mean()),
    "variance_of_values": float(first[0][mask].var()),
    "encoders": [
      {"rounds": rounds, **compare(first, now, right, samples)}
      for rounds, now in seen
    ],
  }


def table(results: dict[str, Any]) -> str:
  """Markdown, a line per encoder."""
  keys = {
    "phi_std": "deviation of phi",
    "moved": "mean change of phi",
    "residual": "added in all, if the version changes midway",
    "radius": "radius of Phi within a prompt",
    "middle": "right above wrong, halfway",
    "whole": "at the end",
  }
  lines = [
    f"| encoder after rounds | {' | '.join(keys.values())} |",
    "|---|" + "---|" * len(keys),
  ]
  for found in results["encoders"]:
    cells = [str(found["rounds"]) if found["rounds"] else "0 (frozen)"]
    cells += [f"{found[key]:.3f}" for key in keys]
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def figure(results: dict[str, Any], path: pathlib.Path) -> pathlib.Path:
  """How far values move, and what they still tell."""
  canvas = matplotlib.figure.Figure(figsize=(8, 3.2), layout="constrained")
  left, right = canvas.subplots(1, 2)
  rounds = [e["rounds"] for e in results["encoders"]]
  for axes, keys, label in (
    (left, ("moved", "residual"), "potential"),
    (right, ("middle", "whole"), "right above wrong"),
  ):
    for number, key in enumerate(keys):
      values = [e[key] for e in results["encoders"]]
      axes.plot(rounds, values, "o-", color=plots.COLORS[number], label=key)
    axes.set_xlabel("rounds of the encoder")
    axes.set_ylabel(label)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
  right.axhline(0.5, color=plots.INK, linewidth=1)
  canvas.savefig(path, dpi=150, facecolor="white")
  return path


def _encoders(config, values, mesh, initial) -> list[tuple[int, Any]]:
  """The initial policy's parameters, and those of every checkpoint."""
  found = [(0, initial)]
  folder = pathlib.Path(values.run) / "checkpoints"
  with checkpoint.Checkpoints(folder) as checkpoints:
    numbers = checkpoints.all()
  for number in numbers:
    values.round = checkpoint.round_of(number)
    ((_, params),) = evaluate.actors(config, values, mesh)
    found.append((values.round, params))
  return found


def main() -> int:
  values = flags.FLAGS
  config = evaluate.configured(values)
  if len(config.policies) > 1:
    raise config_lib.ConfigError("run", values.run, "must be of one policy")
  mesh = mesh_lib.make(*config.mesh)
  task = tasks.load(config)
  problems = [task.problem(index) for index in range(values.problems)]
  actor, initial = policy_lib.load_actor(config, 0, mesh, values.n)
  found = potential.load(values.potential)
  potential.check(found, actor.model, initial)
  with tasks.pool(config, task) as pool:
    rows = evaluate.score(actor, initial, problems, pool, config, values.n)
  encoders = _encoders(config, values, mesh, initial)
  results = study(actor, encoders, found, rows, values.n)
  out = pathlib.Path(values.out)
  out.write_text(json.dumps(results, indent=1) + "\n")
  print(figure(results, out.with_suffix(".png")))
  for key in ("variance_over_training", "variance_of_values"):
    print(f"{key}: {results[key]:.4f}")
  print(table(results))
  return 0


if __name__ == "__main__":
  evaluate.define()
  flags.DEFINE_string("potential", None, "Of meta_train.", required=True)
  flags.DEFINE_string("out", None, "The JSON file to write.", required=True)
  flags_lib.run(main)
