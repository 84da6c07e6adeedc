"""The Mu-GRPO study's tables and figure, from its results alone."""

import math
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib.figure
import numpy as np

from experiments import plots
from experiments.studies import mutual_report

BASE = "on_policy"
COLORS = dict(
  zip(
    (BASE, "standard", "relaxed", "open", "unclipped"),
    plots.COLORS,
    strict=False,
  )
)
_WORDS = {
  "on_policy": "on-policy",
  "standard": "staged, standard clip",
  "relaxed": "staged, relaxed",
  "open": "staged, no lower bound",
  "unclipped": "staged, no clip",
}


def name(arm: str) -> str:
  """An arm in words."""
  if arm in _WORDS:
    return _WORDS[arm]
  base, _, variant = arm.partition("_")
  if arm.startswith("on_policy"):
    base, variant = "on_policy", arm.removeprefix("on_policy_")
  veto = "veto" if variant == "veto" else f"veto: {variant.replace('_', ' ')}"
  return f"{_WORDS[base]}, {veto}"


def arms(results: dict[str, Any]) -> list[str]:
  return list(dict.fromkeys(run["arm"] for run in results["runs"]))


def by_seed(results: dict[str, Any], arm: str, key: str) -> dict[int, float]:
  """One number per seed."""
  return {
    run["seed"]: run[key]
    for run in results["runs"]
    if run["arm"] == arm and run[key] is not None
  }


def table(results: dict[str, Any]) -> str:
  """Markdown: means over seeds with 95 % intervals, and against on-policy.

  The difference is paired: each seed's arm minus the same seed's on-policy
  run.
  """
  lines = [
    "| arm | pass@1 | minus on-policy | pass@16 | minus on-policy | "
    "entropy at the end | least ESS | vetoed tokens |",
    "|---|---|---|---|---|---|---|---|",
  ]
  for arm in arms(results):
    cells = [name(arm)]
    for key in ("pass@1", "pass@16"):
      ones, base = by_seed(results, arm, key), by_seed(results, BASE, key)
      gain = [ones[seed] - base[seed] for seed in ones if seed in base]
      cells.append(cell(list(ones.values())))
      cells.append("" if arm == BASE else cell(gain, "+"))
    cells.append(cell([_last(run, "entropy") for run in _of(results, arm)]))
    cells.append(cell([_least(run, "ess") for run in _of(results, arm)], "", 2))
    share = [_share(run, "veto") for run in _of(results, arm)]
    cells.append("" if None in share else f"{np.mean(share):.1%}")
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def phases(results: dict[str, Any]) -> str:
  """Markdown: CPU seconds (wall in brackets) of a run's phases.

  Medians over seeds: the first run of an arm compiles, which others read.
  """
  lines: list[str] = []
  for arm in arms(results):
    mine = [run["phases"] for run in _of(results, arm)]
    names = list(mine[0]["cpu"])
    if not lines:
      lines.append(f"| arm | {' | '.join(names)} | all |")
      lines.append(f"|---|{'---|' * (len(names) + 1)}")
    cells = [name(arm)]
    for phase in names:
      cpu = np.median([m["cpu"][phase] for m in mine])
      wall = np.median([m["seconds"][phase] for m in mine])
      cells.append(f"{cpu:.1f} ({wall:.1f})")
    cpu = np.median([sum(m["cpu"].values()) for m in mine])
    wall = np.median([sum(m["seconds"].values()) for m in mine])
    lines.append(f"| {' | '.join(cells)} | {cpu:.1f} ({wall:.1f}) |")
  return "\n".join(lines)


def cell(values: Sequence[float], sign: str = "", digits: int = 3) -> str:
  """Mean and half the 95 % interval."""
  if not values:
    return ""
  mean, half = mutual_report.interval(list(values))
  return f"{mean:{sign}.{digits}f} ± {half:.{digits}f}"


def _of(results: dict[str, Any], arm: str) -> list[dict[str, Any]]:
  return [run for run in results["runs"] if run["arm"] == arm]


def _values(run: dict[str, Any], key: str) -> list[float]:
  return [v for v in run["binned"][key] if v is not None]


def _last(run: dict[str, Any], key: str) -> float:
  values = _values(run, key)
  return values[-1] if values else math.nan


def _least(run: dict[str, Any], key: str) -> float:
  return min(_values(run, key), default=math.nan)


def _share(run: dict[str, Any], key: str) -> float | None:
  values = _values(run, key)
  return float(np.mean(values)) if values else None


def figure(results: dict[str, Any], path: pathlib.Path) -> pathlib.Path:
  """What each arm gains, and what its samples look like as they grow stale."""
  canvas = matplotlib.figure.Figure(figsize=(12.6, 7.2), layout="constrained")
  grid = canvas.subplots(2, 3)
  _gains(grid[0, 0], results, "pass@1")
  _gains(grid[1, 0], results, "pass@16")
  panels = (
    (grid[0, 1], "ess", "effective share of the samples"),
    (grid[0, 2], "entropy", "entropy (nats)"),
    (grid[1, 1], "clip_low", "clipped, negative advantage"),
    (grid[1, 2], "veto", "vetoed tokens"),
  )
  for axes, key, title in panels:
    _stale(axes, results, key)
    axes.set_title(title, loc="left", fontsize=10, color=plots.INK)
  for axes in grid.flat:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, colors="#555555", labelsize=8)
  for axes in grid[1, 1:]:
    axes.set_xlabel("update", color=plots.INK)
  canvas.legend(
    *grid[0, 1].get_legend_handles_labels(),
    loc="outside lower center",
    ncols=5,
    frameon=False,
    labelcolor=plots.INK,
    fontsize=8,
  )
  canvas.savefig(path, dpi=150, facecolor="white")
  return path


def _gains(axes, results: dict[str, Any], key: str) -> None:
  """Paired differences to on-policy, 95 % of their mean, an arm per line."""
  base = by_seed(results, BASE, key)
  shown = [arm for arm in arms(results) if arm != BASE]
  for row, arm in enumerate(reversed(shown)):
    ones = by_seed(results, arm, key)
    gain = [ones[seed] - base[seed] for seed in ones if seed in base]
    if not gain:
      continue
    mean, half = mutual_report.interval(gain)
    color = COLORS[_family(arm)]
    axes.plot(gain, [row] * len(gain), ".", color=color, alpha=0.35)
    axes.errorbar(mean, row, xerr=half, fmt="o", color=color, markersize=4)
  axes.axvline(0, color=COLORS[BASE], linewidth=1)
  axes.set_yticks(range(len(shown)), [name(a) for a in reversed(shown)])
  title = f"{key} held out, minus on-policy"
  axes.set_title(title, loc="left", fontsize=10, color=plots.INK)


def _stale(axes, results: dict[str, Any], key: str) -> None:
  """Means over seeds; dashed with a veto."""
  width = results["updates"]
  for arm in arms(results):
    dashed = arm.endswith("_veto")
    if not dashed and arm not in COLORS:
      continue
    curves = [run["binned"][key] for run in _of(results, arm)]
    longest = max(map(len, curves))
    whole = [c for c in curves if len(c) == longest and None not in c]
    if not whole:
      continue
    total = results["stages"] * width
    at = (np.arange(longest) + 0.5) * total / longest
    axes.plot(
      at,
      np.mean(whole, axis=0),
      color=COLORS[_family(arm)],
      linestyle="--" if dashed else "-",
      linewidth=1.4,
      label=name(arm),
    )
  for stage in range(1, results["stages"]):
    axes.axvline(stage * width, color="#E6E6E6", linewidth=0.8)


def _family(arm: str) -> str:
  return next(base for base in COLORS if arm.startswith(base))
