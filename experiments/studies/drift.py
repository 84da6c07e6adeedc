"""A potential on a frozen against an evolving encoder.

  python -m experiments.studies.drift --policies=DIR --potential=DIR
  python -m experiments.studies.drift --run=RUN --potential=DIR

The first form trains the policy by GRPO on chain arithmetic and keeps a
checkpoint every few rounds; what is finished is not repeated. The second takes
a run that is there. On one fixed set of held-out answers of the initial policy,
the potential is read from the states of the initial policy, as training does,
and from those of every checkpoint, as it would be if the encoder were the
policy itself: how much each value moves, how well it still tells right from
wrong, and what shaping would add to a response in whose middle the encoder
changes its version: with one version it is nothing, exactly.
"""

import functools
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import matplotlib.figure
import numpy as np
from absl import flags

from experiments import evaluate, plots, tasks
from experiments import flags as flags_lib
from experiments.studies import jobs as jobs_lib
from mrl_jax import collate, records
from mrl_jax import config as config_lib
from mrl_jax.kernels import potentials
from mrl_jax.model import transformer
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.shaping import features, potential
from mrl_jax.train import checkpoint
from mrl_jax.train import policy as policy_lib

TRAINING = (
  "--task=chain_arithmetic",
  '--task_args={"min_operations": 4, "max_operations": 8, "size": 512}',
  "--completion_limit=10",
  "--prompt_limit=32",
  "--rounds=64",
  "--prompts=64",
  "--samples=16",
  "--lr=2e-4",
  "--lr_warmup=5",
  "--clip_norm=1.0",
  "--reduction=constant_mean",
  "--save_every=8",
  "--keep=99",
  "--save_rollouts=false",
  "--progress=plain",
)


class View(NamedTuple):
  """What the potential says of the answers, read by one encoder."""

  phi: np.ndarray  # [B, T]
  whole: np.ndarray  # [B] Phi, of each answer but for its last token
  mask: np.ndarray  # [B, T] bool


def read(
  model: transformer.Model,
  params: Any,
  found: potential.Potential,
  rows: Sequence[records.Rollout],
  samples: int,
) -> View:
  """The potential of every prefix of the rows, by this encoder."""
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

  return View(*map(np.asarray, run(params)), np.asarray(mask))


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
  frozen: View, now: View, right: np.ndarray, samples: int
) -> dict[str, Any]:
  """One encoder's numbers beside the frozen one's."""
  mask = frozen.mask
  places = np.asarray([features.places(int(n)) for n in mask.sum(1)])
  moved = np.abs(now.phi - frozen.phi)
  rows = np.arange(len(places))
  radius = np.ptp(now.whole.reshape(-1, samples), axis=1) / 2
  return {
    "phi_std": float(now.phi[mask].std()),
    "moved": float(moved[mask].mean()),
    "moved_whole": float(np.abs(now.whole - frozen.whole).mean()),
    # Old until halfway, new from there: phi_old - phi_new is left over.
    "residual": float(moved[rows, places[:, 1]].mean()),
    "radius": float(radius.mean()),
    "right": {
      name: accuracy(now.phi[rows, places[:, number]], right, samples)
      for number, name in enumerate(features.PLACES)
    },
  }


def study(
  model: transformer.Model,
  encoders: Sequence[tuple[int, Any]],
  found: potential.Potential,
  rows: Sequence[records.Rollout],
  samples: int,
) -> dict[str, Any]:
  """The numbers of every encoder, the frozen one first."""
  right = np.asarray([row.outcome == "correct" for row in rows])
  view = functools.partial(read, model, found=found, rows=rows, samples=samples)
  seen = [(rounds, view(params)) for rounds, params in encoders]
  frozen = seen[0][1]
  phi = np.stack([now.phi for _, now in seen])[:, frozen.mask]
  whole = np.stack([now.whole for _, now in seen])
  return {
    "answers": len(rows),
    "pass@1": float(right.mean()),
    # Of one value over the encoders, which is 0 with a frozen one, beside
    # that over the values of the frozen one.
    "variance": {
      "phi_over_training": float(phi.var(axis=0).mean()),
      "phi": float(phi[0].var()),
      "whole_over_training": float(whole.var(axis=0).mean()),
      "whole": float(whole[0].var()),
    },
    "encoders": [
      {"rounds": rounds, **compare(frozen, now, right, samples)}
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
  }
  names = [
    *keys.values(),
    *(f"right above wrong, {p}" for p in features.PLACES),
  ]
  lines = [
    f"| encoder after rounds | {' | '.join(names)} |",
    "|---|" + "---|" * len(names),
  ]
  for found in results["encoders"]:
    numbers = [found[key] for key in keys]
    numbers += [found["right"][place] for place in features.PLACES]
    cells = [str(found["rounds"]) if found["rounds"] else "0 (frozen)"]
    cells += ["-" if n is None else f"{n:.3f}" for n in numbers]
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def variances(results: dict[str, Any]) -> str:
  """Markdown: how much of a value's variance is the encoder's drift."""
  found = results["variance"]
  lines = ["| value | over training | over answers |", "|---|---|---|"]
  for name, label in (("phi", "phi"), ("whole", "Phi")):
    numbers = (found[f"{name}_over_training"], found[name])
    cells = " | ".join(f"{n:.4f}" for n in numbers)
    lines.append(f"| {label} | {cells} |")
  return "\n".join(lines)


def figure(results: dict[str, Any], path: pathlib.Path) -> pathlib.Path:
  """How far values move, and what they still tell."""
  canvas = matplotlib.figure.Figure(figsize=(8, 3.2), layout="constrained")
  left, right = canvas.subplots(1, 2)
  found = results["encoders"]
  rounds = [e["rounds"] for e in found]
  moved = {key: [e[key] for e in found] for key in ("moved", "residual")}
  told = {
    place: [
      np.nan if e["right"][place] is None else e["right"][place] for e in found
    ]
    for place in features.PLACES
  }
  for axes, lines, label in (
    (left, moved, "potential"),
    (right, told, "right above wrong"),
  ):
    for number, (name, values) in enumerate(lines.items()):
      axes.plot(rounds, values, "o-", color=plots.COLORS[number], label=name)
    axes.set_xlabel("rounds of the encoder")
    axes.set_ylabel(label)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
  right.axhline(0.5, color=plots.INK, linewidth=1)
  canvas.savefig(path, dpi=150, facecolor="white")
  return path


def train(
  out: pathlib.Path, policies: Sequence[str], more: Sequence[str]
) -> pathlib.Path:
  """A run of GRPO that keeps its checkpoints, unless it is there."""
  if len(policies) != 1:
    raise config_lib.ConfigError(
      "policies", tuple(policies), "must be one folder, unless --run is given"
    )
  policy, run = pathlib.Path(policies[0]).absolute(), out / "run"
  words = [
    *("experiments.run", *TRAINING),
    *(f"--policies={policy}", "--names=policy", f"--workdir={run}", *more),
  ]
  made = run / "export" / "policy" / "model.safetensors"
  jobs_lib.drain("training", [[jobs_lib.Job(words, made)]], 1, out)
  return run


def _encoders(config, values, mesh, initial) -> list[tuple[int, Any]]:
  """The initial policy's parameters, and those of every checkpoint."""
  found = [(0, initial)]
  folder = evaluate.checkpoints_of(values.run)
  with checkpoint.Checkpoints(folder) as checkpoints:
    numbers = checkpoints.all()
  for number in numbers:
    values.round = checkpoint.round_of(number)
    ((_, params),) = evaluate.actors(config, values, mesh)
    found.append((values.round, params))
  return found


def _potential(folder, model, params) -> potential.Potential:
  try:
    found = potential.load(folder)
    potential.check(found, model, params)
  except (ValueError, OSError) as error:
    raise config_lib.ConfigError("potential", folder, str(error)) from None
  return found


def main() -> int:
  values = flags.FLAGS
  out = jobs_lib.folder()
  if not values.run:
    values.run = str(train(out, values.policies, values.more))
  config = evaluate.configured(values)
  if len(config.policies) > 1:
    raise config_lib.ConfigError("run", values.run, "must be of one policy")
  mesh = mesh_lib.make(*config.mesh)
  task = tasks.load(config)
  problems = [task.problem(index) for index in range(values.problems)]
  actor, initial = policy_lib.load_actor(config, 0, mesh, values.n)
  found = _potential(values.potential, actor.model, initial)
  with tasks.pool(config, task) as pool:
    rows = evaluate.score(actor, initial, problems, pool, config, values.n)
  encoders = _encoders(config, values, mesh, initial)
  results = study(actor.model, encoders, found, rows, values.n)
  results |= jobs_lib.machine()
  jobs_lib.publish(out, "drift", results, figure, table, variances)
  return 0


if __name__ == "__main__":
  evaluate.define()
  flags.DEFINE_string("potential", None, "Of meta_train.", required=True)
  flags.DEFINE_string("out", "runs/drift", "Folder of the study.")
  flags.DEFINE_multi_string("more", [], "Further flags of the training.")
  flags_lib.run(main)
