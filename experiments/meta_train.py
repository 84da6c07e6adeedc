"""Meta-trains a potential for one policy, from right and wrong responses.

  python -m experiments.meta_train --policy=experiments/assets/char --out=DIR

The policy, frozen, reads every pair of responses once; a small network then
learns to tell the right one from the wrong one before either is over, on many
auxiliary tasks at a time, and is judged on tasks that it never saw. The folder
--out holds what `experiments.run --recipe=merla --potential=OUT` needs, the
features (so that a second training starts at once), and a plot.
"""

import dataclasses
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import matplotlib.figure
import numpy as np
from absl import flags
from rich import progress as rich_progress

from experiments import auxiliary, models, plots
from experiments import flags as flags_lib
from mrl_jax import config as config_lib
from mrl_jax import measure
from mrl_jax.model import hf
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.shaping import features as features_lib
from mrl_jax.shaping import meta, pairs, potential
from mrl_jax.text import prompts as prompts_lib
from mrl_jax.text import tokenizer as tokenizer_lib


def encoded(
  found: Sequence[pairs.Pair],
  tokenizer: tokenizer_lib.Tokenizer,
  limit: int,
) -> tuple[list[pairs.Pair], list[features_lib.Encoded], dict[str, int]]:
  """Pairs that the policy can read, in its tokens, and why others are not."""
  kept, ids, dropped = [], [], {}
  for pair in found:
    texts = (pair.chosen, pair.rejected)
    rows = [tokenizer.encode(text) for text in texts]
    context = prompts_lib.render(tokenizer, pair.prompt)
    reason = ""
    if [tokenizer.decode(row) for row in rows] != list(texts):
      reason = "a response is not in the tokenizer's vocabulary"
    elif pair.prompt not in tokenizer.decode(context):
      reason = "the prompt is not in the tokenizer's vocabulary"
    elif len(context) + max(map(len, rows)) + 1 > limit:
      reason = f"more than {limit} tokens"
    if reason:
      dropped[reason] = dropped.get(reason, 0) + 1
      continue
    end = tokenizer.eos_ids[0]
    kept.append(pair)
    ids.append(features_lib.Encoded(context, *([*row, end] for row in rows)))
  return kept, ids, dropped


def read(
  policy: str, found: Sequence[pairs.Pair], out: pathlib.Path, limit: int
) -> tuple[list[pairs.Pair], features_lib.Features, np.ndarray, int]:
  """The pairs' features, the reference's probe and its width."""
  mesh = mesh_lib.make(-1, 1, 1)
  tokenizer = tokenizer_lib.load(policy)
  model, params = hf.load(policy, mesh)
  kept, ids, dropped = encoded(found, tokenizer, limit)
  for reason, count in sorted(dropped.items()):
    print(f"{count} pairs dropped: {reason}")
  if not kept:
    raise config_lib.ConfigError("policy", policy, "can read none of the pairs")
  probe = potential.probe(model, params)
  path = out / f"features-{features_lib.digest(ids, probe)}.npz"
  if not path.exists():
    with rich_progress.Progress() as bar:
      task = bar.add_task("features", total=len(ids))
      read_ = features_lib.extract(
        model, params, mesh, ids, lambda done: bar.update(task, completed=done)
      )
    features_lib.save(read_, path)
  return kept, features_lib.load(path), probe, model.spec.width


def held_out_accuracy(
  records: Sequence[dict[str, Any]], seed: int = 0
) -> dict[str, dict[str, float]]:
  """Per place: mean over held-out tasks, with a 95 % bootstrap over tasks."""
  found = {}
  for place in features_lib.PLACES:
    rights = [
      r[place]["right"]
      for r in records
      if r["held_out"] and r[place]["right"] is not None
    ]
    if rights:
      low, high = measure.bootstrap(rights, seed=seed)
      pairs_ = sum(r[place]["pairs"] for r in records if r["held_out"])
      mean = float(np.mean(rights))
      found[place] = {"mean": mean, "low": low, "high": high, "pairs": pairs_}
  return found


def figure(
  history: Sequence[dict[str, float]],
  records: Sequence[dict[str, Any]],
  path: pathlib.Path,
) -> pathlib.Path:
  """The objective over steps, and what held-out tasks say at each place."""
  canvas = matplotlib.figure.Figure(figsize=(9, 3.6), layout="constrained")
  left, right = canvas.subplots(1, 2)
  steps = [h["step"] for h in history]
  for number, (key, label) in enumerate(
    (("train", "tasks trained on"), ("held_out", "held-out tasks"))
  ):
    values = [h[key] for h in history]
    left.plot(steps, values, color=plots.COLORS[number], label=label)
  left.set_xlabel("steps")
  left.set_ylabel("objective")
  left.legend(frameon=False)
  for number, held in enumerate((False, True)):
    mine = [r for r in records if r["held_out"] == held]
    for place, name in enumerate(features_lib.PLACES):
      values = [r[name]["right"] for r in mine]
      values = [v for v in values if v is not None]
      at = np.full(len(values), place + 0.2 * (number - 0.5))
      right.plot(at, values, ".", color=plots.COLORS[number], alpha=0.4)
  right.axhline(0.5, color=plots.INK, linewidth=1)
  right.set_xticks(range(len(features_lib.PLACES)), features_lib.PLACES)
  right.set_xlabel("share of the response read")
  right.set_ylabel("good prefix above bad, per task")
  canvas.savefig(path, dpi=150, facecolor="white")
  return path


def train(
  policy: str,
  found: Sequence[pairs.Pair],
  held_out: set[str],
  out: pathlib.Path,
  spec: potential.Spec,
  settings: meta.Settings,
  limit: int,
) -> dict[str, Any]:
  """Writes a potential to `out`; returns its report."""
  start, begun = time.perf_counter(), time.process_time()
  kept, features, probe, width = read(policy, found, out, limit)
  name = pathlib.PurePath(policy).name
  spec = dataclasses.replace(
    spec, width=width, reference=name, steps=settings.steps
  )
  data = meta.data(
    features,
    [pair.task for pair in kept],
    np.asarray(pairs.standardised(kept)),
    np.asarray([pair.share for pair in kept]),
    held_out,
  )

  def look(step: int, values: dict[str, float]) -> None:
    shown = ", ".join(f"{k} {v:.4f}" for k, v in values.items() if k != "step")
    print(f"step {step}: {shown}")

  params, history = meta.train(spec, data, settings, look)
  records = meta.accuracy(spec, params, data)
  report = {
    "settings": dataclasses.asdict(settings),
    "tasks": len(data.names),
    "pairs": len(kept),
    "held_out": held_out_accuracy(records),
    "history": history,
    "accuracy": records,
    "seconds": round(time.perf_counter() - start, 1),
    "cpu_seconds": round(time.process_time() - begun, 1),
  }
  potential.save(potential.Potential(spec, params, probe), out, report)
  if history:
    print(f"plot: {figure(history, records, out / 'meta.png')}")
  return report


def table(report: dict[str, Any]) -> str:
  """Markdown: how often the good prefix stands above the bad one."""
  lines = [
    "| held-out tasks, share read | pairs that differ | good above bad |",
    "|---|---|---|",
  ]
  for place, found in report["held_out"].items():
    shown = f"{found['mean']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
    lines.append(f"| {place} | {found['pairs']:,} | {shown} |")
  return "\n".join(lines)


def _pairs(values) -> list[pairs.Pair]:
  """Those of --data, or the built-in tasks'."""
  if not values.data:
    return auxiliary.build(
      values.responses,
      values.policy,
      values.prompts,
      values.samples,
      values.seed,
      values.families,
    )
  try:
    found, told = pairs.read(pathlib.Path(values.data).expanduser())
  except (ValueError, OSError) as error:
    raise config_lib.ConfigError("data", values.data, str(error)) from None
  for reason, count in sorted(told.dropped.items()):
    print(f"{count} rows dropped: {reason}")
  return found


def _held_out(values, found: Sequence[pairs.Pair]) -> set[str]:
  names = [pair.task for pair in found]
  try:
    try:
      chosen: float | list[str] = float(values.held_out)
    except ValueError:
      chosen = values.held_out.split(",")
    return pairs.held_out(names, chosen, values.seed)
  except ValueError as error:
    raise config_lib.ConfigError(
      "held_out", values.held_out, str(error)
    ) from None


def _made(kind, values, **more):
  """A dataclass from the flags that its fields define."""
  names = {field.name for field in dataclasses.fields(kind)}
  given = {n: values[n].value for n in names if n in values and n not in more}
  return kind(**given, **more)


def main() -> int:
  values = flags.FLAGS
  out = pathlib.Path(values.out).expanduser().absolute()
  out.mkdir(parents=True, exist_ok=True)
  values.policy = models.locate(values.policy, "policy")
  found = _pairs(values)
  report = train(
    values.policy,
    found,
    _held_out(values, found),
    out,
    _made(potential.Spec, values, width=1, steps=0, reference=""),
    _made(meta.Settings, values),
    values.limit,
  )
  print(table(report))
  print(f"{report['seconds']} s, {report['cpu_seconds']} CPU s; wrote {out}")
  return 0


_HELP = {
  "steps": "Of training at most; 0 writes an untrained potential.",
  "tasks": "Of a step.",
  "pairs": "Of a task in a step.",
  "lr": "Adam's learning rate.",
  "alpha": "Weight that sequence and bounded shaping will give it.",
  "entropy_weight": "Of the entropy of its values.",
  "consistency_weight": "Of its drift (token) or variance within a prompt.",
  "inner_lr": "Of one first-order step inside each task; 0: none.",
  "every": "Steps between looks at the held-out tasks.",
  "patience": "Such looks without a gain, before it stops.",
  "hidden": "Units of a hidden layer.",
  "depth": "Hidden layers.",
  "bound": "On the potential's absolute value.",
  "cap": "On the spectral norm of each layer.",
}


_LEAST = {"steps": 0, "bound": 1e-6, "cap": 1e-6}


def define() -> None:
  """One flag for each setting, and where the pairs come from."""
  auxiliary.define()
  flags.DEFINE_string("out", None, "Folder to write.", required=True)
  flags.DEFINE_string(
    "data", "", "JSON lines of task, prompt, chosen, rejected; else built in."
  )
  flags.DEFINE_string(
    "held_out",
    "chain/0-9/+-*/",
    "Tasks that only judge: what their names begin with, or their share.",
  )
  flags.DEFINE_integer("limit", 512, "Most tokens of prompt and response.", 1)
  flags.DEFINE_enum("mode", "token", meta.MODES, "Whose objective.")
  for kind in (meta.Settings, potential.Spec):
    for field in dataclasses.fields(kind):
      if field.name not in _HELP or field.name in flags.FLAGS:
        continue
      is_float = isinstance(field.default, float)
      make = flags.DEFINE_float if is_float else flags.DEFINE_integer
      least = _LEAST.get(field.name, 0.0 if is_float else 1)
      make(field.name, field.default, _HELP[field.name], least)


if __name__ == "__main__":
  define()
  flags_lib.run(main)
