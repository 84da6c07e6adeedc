"""Scores policies on a task: pass@k, avg@k and maj@k, with intervals.

  python -m experiments.evaluate --policies=DIR --task=chain_arithmetic
  python -m experiments.evaluate --run=WORKDIR [--round=N]

The first form takes Hugging Face directories; the second the checkpoints of
a run, with its task unless another is named. Estimates are unbiased in n
samples per problem and the intervals are bootstraps over problems. Built-in
tasks are scored on their held-out split.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import rich.console
import rich.table
from absl import flags
from etils import epath

from experiments import compilation, models, tasks
from experiments import flags as flags_lib
from mrl_jax import config as config_lib
from mrl_jax import config_files, measure, records
from mrl_jax.explore import explorer
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.tasks import dataset, extract, verify
from mrl_jax.train import bucket, checkpoint, rounds
from mrl_jax.train import policy as policy_lib
from mrl_jax.train import state as state_lib

FIELDS = (
  *("policies", "names", "dtype", "seed", "mesh", "cpu_devices", "rows"),
  *("task", "task_args", "verifier", "verifier_workers"),
  *("verifier_deadline", "prompt_format", "system_prompt", "prompt_limit"),
  *("completion_limit", "temperature", "top_k", "top_p"),
)
_ROUND = -1  # of the sampling keys: no training round has this number


def score(
  actor: policy_lib.Actor,
  params: Any,
  problems: Sequence[dataset.Problem],
  pool: verify.Pool,
  config: config_lib.Config,
  samples: int,
) -> list[records.Rollout]:
  """`samples` verified rollouts for each problem."""
  slots = [
    explorer.Slot(problem, at, policy_lib.render(actor, problem.prompt, config))
    for at, problem in enumerate(problems)
  ]
  return draw(actor, params, slots, pool, samples)


def draw(
  actor: policy_lib.Actor,
  params: Any,
  slots: Sequence[explorer.Slot],
  pool: verify.Pool,
  samples: int,
) -> list[records.Rollout]:
  """`samples` verified rollouts for each slot, whose ids are their seeds."""
  rows = policy_lib.sample(actor, params, slots, 2**32 + _ROUND, samples)
  return rounds.judge(pool, rows, [slot.problem for slot in slots], samples)


def report(
  rows: Sequence[records.Rollout], samples: int, ks: Sequence[int]
) -> dict[str, Any]:
  """Estimates and 95% intervals; a problem no row of which counts is out."""
  groups = [
    [row for row in rows[i : i + samples] if np.isfinite(row.reward)]
    for i in range(0, len(rows), samples)
  ]
  whole = [group for group in groups if len(group) == samples]
  out: dict[str, Any] = {
    "problems": len(whole),
    "problems_left_out": len(groups) - len(whole),
    "samples": samples,
    "length": float(np.mean([len(row.tokens) for row in rows])),
    "truncated": float(np.mean([not row.finished for row in rows])),
    "distinct": float(
      np.mean([len({row.text for row in g if _right(row)}) for g in groups])
    ),
    "outcomes": {
      outcome.value: sum(row.outcome == outcome.value for row in rows)
      for outcome in verify.Outcome
    },
  }
  for k in ks if whole else ():
    out[f"pass@{k}"] = _interval(
      [measure.pass_at_k(samples, sum(map(_right, g)), k) for g in whole]
    )
    out[f"maj@{k}"] = _interval(
      [measure.maj_at_k(*_answers(group), k) for group in whole]
    )
  if whole:
    out[f"avg@{samples}"] = _interval(
      [measure.avg_at_k([r.reward for r in g], samples) for g in whole]
    )
  return out


def by_difficulty(
  rows: Sequence[records.Rollout],
  problems: Sequence[dataset.Problem],
  samples: int,
  ks: Sequence[int],
) -> dict[str, dict[str, float]]:
  """Mean pass@k of the problems of each difficulty, where they carry one."""
  found: dict[str, dict[str, list[float]]] = {}
  for index, problem in enumerate(problems):
    if "difficulty" not in problem.extra:
      continue
    group = rows[index * samples : (index + 1) * samples]
    right = sum(map(_right, group))
    here = found.setdefault(str(problem.extra["difficulty"]), {})
    for k in ks:
      passed = measure.pass_at_k(samples, right, k)
      here.setdefault(f"pass@{k}", []).append(passed)
  return {
    level: {
      "problems": len(next(iter(values.values()))),
      **{name: float(np.mean(value)) for name, value in values.items()},
    }
    for level, values in sorted(found.items(), key=_length_first)
  }


def _length_first(pair):
  return len(pair[0]), pair[0]  # 10 comes after 9


def _right(row: records.Rollout) -> bool:
  return row.outcome == verify.Outcome.correct.value


def _answers(group: Sequence[records.Rollout]):
  """What each row votes for, and whether that is right."""
  right = [_right(row) for row in group]
  return extract.votes([row.text for row in group], right), right


def _interval(values: Sequence[float]) -> dict[str, float]:
  low, high = measure.bootstrap(values)
  return {"mean": float(np.mean(values)), "low": low, "high": high}


def table(results: dict[str, dict[str, Any]]) -> None:
  """Prints one line per policy."""
  first = next(iter(results.values()))
  names = [name for name in first if "@" in name]
  grid = rich.table.Table(box=rich.box.ASCII2)
  for name in ("policy", "problems", *names, "length"):
    grid.add_column(name, justify="right" if name != "policy" else "left")
  for policy, result in results.items():
    cells = [
      "{mean:.3f} [{low:.3f}, {high:.3f}]".format(**result[name])
      for name in names
      if name in result
    ]
    length = f"{result['length']:.1f}"
    grid.add_row(policy, str(result["problems"]), *cells, length)
  rich.console.Console(width=max(80, 24 * (len(names) + 2))).print(grid)


def main() -> int:
  values = flags.FLAGS
  config = configured(values)
  compilation.keep(config.compilation_cache)
  ks = _ks(values.k, values.n)
  if config.cpu_devices:
    jax.config.update("jax_num_cpu_devices", config.cpu_devices)
  mesh = mesh_lib.make(*config.mesh)
  task = tasks.load(config)
  count = values.problems
  if task.size is not None:
    count = min(count, task.size)
  problems = [task.problem(index) for index in range(count)]
  results = {}
  with tasks.pool(config, task) as pool:
    for actor, params in actors(config, values, mesh):
      rows = score(actor, params, problems, pool, config, values.n)
      results[actor.name] = {
        **report(rows, values.n, ks),
        "by_difficulty": by_difficulty(rows, problems, values.n, ks),
      }
  text = json.dumps({"task": task.name, "results": results}, indent=2)
  if values.out:
    pathlib.Path(values.out).write_text(text + "\n")
  print(text)
  table(results)
  return 0


def _ks(given: Sequence[str], samples: int) -> list[int]:
  try:
    ks = [int(k) for k in given] or sorted({1, min(4, samples), samples})
  except ValueError:
    ks = [0]
  if any(not 1 <= k <= samples for k in ks):
    raise config_lib.ConfigError(
      "k", tuple(given), f"must be integers in [1, n={samples}]"
    )
  return ks


def configured(
  values: flags.FlagValues, fields: Sequence[str] = FIELDS
) -> config_lib.Config:
  """From a run's folder, or from the flags; then the held-out task."""
  given = {name: values[name] for name in fields if values[name].present}
  if values.run:
    path = pathlib.Path(values.run) / "config.json"
    if not path.exists():
      raise config_lib.ConfigError("run", values.run, "holds no config.json")
    config = config_files.from_dict(json.loads(path.read_text()))
    fresh = flags_lib.config(given, config)
  else:
    fresh = flags_lib.config(
      fields, config_lib.Config(workdir=".", policies=("-",))
    )
  fresh = models.located(fresh)
  arguments = fresh.task_arguments()
  if fresh.task in tasks.BUILT_IN:
    arguments.pop("size", None)  # of the training split
    arguments = {"split": "test", **arguments}
  return dataclasses.replace(fresh, task_args=json.dumps(arguments))


def checkpoints_of(run: str) -> epath.Path:
  """Where a run keeps its checkpoints: its folder, or its bucket."""
  folder = pathlib.Path(run)
  saved = config_files.from_dict(
    json.loads((folder / "config.json").read_text())
  )
  return bucket.checkpoints(saved.bucket, folder.absolute())


def actors(
  config: config_lib.Config, values: flags.FlagValues, mesh: jax.sharding.Mesh
) -> Iterator[tuple[policy_lib.Actor, Any]]:
  """The policies of directories or of a checkpoint, one at a time."""
  if not values.run:
    for number in range(len(config.policies)):
      yield policy_lib.load_actor(config, number, mesh, values.n)
    return
  with checkpoint.Checkpoints(checkpoints_of(values.run)) as checkpoints:
    number = checkpoints.latest()
    if values.round is not None:
      number = checkpoint.number(values.round)
    if number is None:
      raise config_lib.ConfigError("run", values.run, "has no checkpoint")
    targets, found = {}, []
    for policy in range(len(config.policies)):
      actor, params = policy_lib.load_actor(config, policy, mesh, values.n)
      optimizer = policy_lib.make_optimizer(config, policy)
      shardings = state_lib.of(optimizer, params, mesh)
      state = state_lib.init(optimizer, params, mesh)
      targets[actor.name] = state_lib.abstract(state, shardings)
      found.append(actor)
    states, *_ = checkpoints.restore(number, targets)
  for actor in found:
    yield actor, states[actor.name].params


def define(fields: Sequence[str] = FIELDS) -> None:
  """Defines the flags that `configured` and `actors` read."""
  flags_lib.define(fields)
  flags.DEFINE_string("run", "", "Folder of a run whose checkpoint to score.")
  flags.DEFINE_integer("round", None, "Which checkpoint; default: the last.")
  flags.DEFINE_integer("problems", 200, "Most problems scored.", 1)
  flags.DEFINE_integer("n", 16, "Samples per problem.", 1)
  flags_lib.show("run", "round", "problems", "n")


if __name__ == "__main__":
  define()
  flags.DEFINE_list("k", [], "The k of pass@k and maj@k; default: 1,4,n.")
  flags.DEFINE_string("out", "", "Also write the JSON result here.")
  flags_lib.run(main)
