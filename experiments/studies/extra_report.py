"""The ExTra study's tables and figure, from its results alone."""

import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib.figure
import numpy as np

from experiments import plots
from experiments.studies import mu_grpo_report, mutual_report

BASE = "grpo"
NAMES = {
  "start": "the warm start",
  "grpo": "GRPO",
  "novelty": "novelty",
  "loud": "novelty, weight 30",
  "regenerate": "regeneration",
  "both": "both (ExTra)",
  "random": "control: random prefix",
  "highest": "control: highest entropy",
  "restart": "control: no prefix",
}
_KS = ("pass@1", "pass@4", "pass@16")


def by_seed(
  results: dict[str, Any], task: str, arm: str, key: str
) -> dict[int, float]:
  """One number per seed."""
  return {
    run["seed"]: run[key]
    for run in _of(results, task, arm)
    if run[key] is not None
  }


def gains(
  results: dict[str, Any], task: str, arm: str, key: str
) -> list[float]:
  """Paired differences: each seed's arm minus the same seed's GRPO."""
  ones = by_seed(results, task, arm, key)
  base = by_seed(results, task, BASE, key)
  return [ones[seed] - base[seed] for seed in ones if seed in base]


def table(results: dict[str, Any]) -> str:
  """Markdown: means over seeds with 95 % intervals, and against GRPO."""
  lines = [
    "| task | arm | "
    + " | ".join(f"{key} | minus GRPO" for key in _KS)
    + " | right answers among 16 | entropy at the end |",
    "|---|---|" + "---|" * (2 * len(_KS) + 2),
  ]
  for task, arm in _pairs(results):
    cells = [task, NAMES[arm]]
    for key in _KS:
      cells.append(_cell(by_seed(results, task, arm, key).values()))
      gain = gains(results, task, arm, key)
      cells.append("" if arm == BASE else _cell(gain, "+"))
    for key in ("distinct_right", "entropy"):
      cells.append(_cell(by_seed(results, task, arm, key).values(), "", 2))
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def by_difficulty(results: dict[str, Any], key: str = "pass@1") -> str:
  """Markdown: one line per task and arm, a column per difficulty."""
  lines: list[str] = []
  for task in results["tasks"]:
    mine = [run for run in results["runs"] if run["task"] == task]
    levels = {level for run in mine for level in run["by_difficulty"]}
    levels = sorted(levels, key=int)
    lines.append(f"| {task}: {key} at difficulty | {' | '.join(levels)} |")
    lines.append("|---|" + "---|" * len(levels))
    for arm in _arms(results):
      cells = [NAMES[arm]]
      for level in levels:
        here = [r["by_difficulty"][level][key] for r in mine if r["arm"] == arm]
        cells.append(_cell(here))
      lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
  return "\n".join(lines)


def explored(results: dict[str, Any]) -> str:
  """Markdown: what exploring found, and its share of the CPU seconds."""
  keys = {
    "explore/novelty": "novelty of right answers",
    "explore/hard": "hard groups per round",
    "explore/regenerated": "continued groups",
    "explore/parent_pass": "pass rate, parent",
    "explore/regenerated_pass": "pass rate, continued",
    "explore/queue": "queue",
    "explore/queue_age": "age (rounds)",
  }
  lines = [
    f"| task | arm | {' | '.join(keys.values())} | share of CPU seconds |",
    "|---|---|" + "---|" * (len(keys) + 1),
  ]
  for task, arm in _pairs(results):
    mine = _of(results, task, arm)
    if not any(run["explored"] for run in mine):
      continue
    cells = [task, NAMES[arm]]
    for key in keys:
      values = [run["explored"].get(key) for run in mine]
      known = [value for value in values if value is not None]
      cells.append(f"{np.mean(known):.3f}" if known else "")
    spent = [
      r["cpu_late"]["explore"] / sum(r["cpu_late"].values()) for r in mine
    ]
    cells.append(f"{np.mean(spent):.1%}")
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def phases(results: dict[str, Any]) -> str:
  """Markdown: CPU seconds of a run's phases, compilation included.

  Medians over seeds: the first run of an arm compiles, which others read.
  """
  lines: list[str] = []
  for task, arm in _pairs(results):
    mine = [run["cpu"] for run in _of(results, task, arm) if "cpu" in run]
    if not mine:
      continue
    names = list(mine[0])
    if not lines:
      lines.append(f"| task | arm | {' | '.join(names)} | all |")
      lines.append(f"|---|---|{'---|' * (len(names) + 1)}")
    spent = [np.median([run[name] for run in mine]) for name in names]
    spent.append(np.median([sum(run.values()) for run in mine]))
    cells = [task, NAMES[arm], *(f"{seconds:.1f}" for seconds in spent)]
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def _cell(values, sign: str = "", digits: int = 3) -> str:
  return mu_grpo_report.cell(list(values), sign, digits)


def _of(results: dict[str, Any], task: str, arm: str) -> list[dict[str, Any]]:
  return [
    run for run in results["runs"] if (run["task"], run["arm"]) == (task, arm)
  ]


def _arms(results: dict[str, Any]) -> list[str]:
  there = {run["arm"] for run in results["runs"]}
  return [arm for arm in NAMES if arm in there]


def _pairs(results: dict[str, Any]) -> list[tuple[str, str]]:
  return [(task, arm) for task in results["tasks"] for arm in _arms(results)]


def figure(results: dict[str, Any], path: pathlib.Path) -> pathlib.Path:
  """What each arm gains over GRPO of the same seed, a panel per task."""
  tasks = list(results["tasks"])
  canvas = matplotlib.figure.Figure(
    figsize=(5.6 * len(tasks), 4.2), layout="constrained"
  )
  grid = canvas.subplots(1, len(tasks), squeeze=False, sharey=True)[0]
  arms = [arm for arm in _arms(results) if arm not in (BASE, "start")]
  for axes, task in zip(grid, tasks, strict=True):
    _gains(axes, results, task, arms)
    axes.set_title(task, loc="left", fontsize=11, color=plots.INK)
    axes.set_xlabel("held out, minus GRPO of the same seed", color=plots.INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, colors="#555555")
  grid[0].set_yticks(range(len(arms)), [NAMES[arm] for arm in reversed(arms)])
  canvas.legend(
    *grid[0].get_legend_handles_labels(),
    loc="outside lower center",
    ncols=len(_KS),
    frameon=False,
    labelcolor=plots.INK,
    fontsize=9,
  )
  canvas.savefig(path, dpi=150, facecolor="white")
  return path


def _gains(axes, results, task: str, arms: Sequence[str]) -> None:
  """An arm per line; dots are seeds, bars 95 % of their mean."""
  for number, key in enumerate(_KS):
    color = plots.COLORS[number]
    for row, arm in enumerate(reversed(arms)):
      gain = gains(results, task, arm, key)
      if not gain:
        continue
      mean, half = mutual_report.interval(gain)
      at = row + 0.22 * (1 - number)
      axes.plot(gain, [at] * len(gain), ".", color=color, alpha=0.35)
      label = key if row == 0 else None
      axes.errorbar(
        mean, at, xerr=half, fmt="o", color=color, markersize=4, label=label
      )
  axes.axvline(0, color=plots.INK, linewidth=1)
