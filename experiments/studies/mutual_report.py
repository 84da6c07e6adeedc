"""The mutual study's table and figure, from its results alone."""

import math
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib.figure
import numpy as np
from scipy import stats

from experiments import plots

AVERAGE = "average"
LAST = 20  # rounds whose variance is the stability
NAMES = {
  "grpo": "GRPO",
  "prp": "PRP",
  "xgrpo": "XGRPO",
  "sgt": "SGT",
  "sgt_prompts": "SGT, mean over prompts",
}
COLORS = dict(zip(NAMES, plots.COLORS, strict=False))


def interval(values: Sequence[float]) -> tuple[float, float]:
  """Mean over seeds and half the width of its 95 % Student interval."""
  count = len(values)
  half = math.nan
  if count > 1:
    error = np.std(values, ddof=1) / math.sqrt(count)
    half = float(stats.t.ppf(0.975, count - 1) * error)
  return float(np.mean(values)), half


def by_seed(
  results: dict[str, Any], method: str, policy: str, key: str
) -> dict[int, float]:
  """One number per seed; the policies' mean for `AVERAGE`."""
  found: dict[int, list[float]] = {}
  for run in results["runs"]:
    if run["method"] == method and policy in (run["policy"], AVERAGE):
      found.setdefault(run["seed"], []).append(_value(run, key))
  return {seed: float(np.mean(values)) for seed, values in found.items()}


def _value(run: dict[str, Any], key: str) -> float:
  if key == "variance":
    return float(np.var(run["curve"][-LAST:], ddof=1))
  if key == "early":  # the mean of the first half of the curve
    return float(np.mean(run["curve"][: len(run["curve"]) // 2]))
  return run[key]


def methods(results: dict[str, Any]) -> list[str]:
  return list(dict.fromkeys(run["method"] for run in results["runs"]))


def policies(results: dict[str, Any]) -> list[str]:
  return [*dict.fromkeys(run["policy"] for run in results["runs"]), AVERAGE]


def table(results: dict[str, Any]) -> str:
  """Markdown: means over seeds with 95 % intervals, and against GRPO.

  The difference is paired: each seed's method minus the same seed's GRPO.
  """
  lines = [
    "| policy | method | pass@1 | minus GRPO | pass@16 | minus GRPO | "
    "first half of the curve | variance of the last rounds (1e-4) |",
    "|---|---|---|---|---|---|---|---|",
  ]
  for policy in policies(results):
    for method in methods(results):
      cells = [policy, NAMES[method]]
      for key in ("pass@1", "pass@16"):
        ones = by_seed(results, method, policy, key)
        base = by_seed(results, "grpo", policy, key)
        gain = [ones[s] - base[s] for s in ones if s in base]
        cells.append(_cell(ones.values()))
        cells.append("" if method == "grpo" else _cell(gain, "+"))
      early = by_seed(results, method, policy, "early").values()
      variance = by_seed(results, method, policy, "variance").values()
      cells.append(_cell(early))
      cells.append(_cell([v * 1e4 for v in variance], digits=1))
      lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def _cell(values: Sequence[float], sign: str = "", digits: int = 3) -> str:
  mean, half = interval(list(values))
  return f"{mean:{sign}.{digits}f} ± {half:.{digits}f}"


def figure(results: dict[str, Any], path: pathlib.Path) -> pathlib.Path:
  """Learning curves above, and below them what a method gains over GRPO.

  One column per policy and one for their average. Lines are means over
  seeds, smoothed as in the other plots. Seeds differ far more than methods
  do, so the band is that of the paired difference: 95 % of its mean.
  """
  shown = policies(results)
  canvas = matplotlib.figure.Figure(
    figsize=(4.2 * len(shown), 5.6), layout="constrained"
  )
  grid = canvas.subplots(2, len(shown), squeeze=False, sharex=True)
  for column, policy in enumerate(shown):
    base = _curves(results, "grpo", policy)
    for method in methods(results):
      curves = _curves(results, method, policy)
      look = {"color": COLORS[method], "linewidth": 1.8}
      both = [seed for seed in curves if seed in base]
      grid[0, column].plot(
        np.mean(list(curves.values()), axis=0), label=NAMES[method], **look
      )
      if method != "grpo" and both:
        _gain(
          grid[1, column], np.stack([curves[s] - base[s] for s in both]), look
        )
    grid[0, column].set_title(policy, loc="left", fontsize=11, color=plots.INK)
    grid[1, column].axhline(0, color=COLORS["grpo"], linewidth=1.8)
    grid[1, column].set_xlabel("round", color=plots.INK)
  for axes in grid.flat:
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, colors="#555555")
  grid[0, 0].set_ylabel("pass@1 while training", color=plots.INK)
  grid[1, 0].set_ylabel("minus GRPO of the same seed", color=plots.INK)
  grid[0, 0].legend(frameon=False, labelcolor=plots.INK, fontsize=9)
  canvas.savefig(path, dpi=150, facecolor="white")
  return path


def _gain(axes, gains: np.ndarray, look: dict[str, Any]) -> None:
  mean = gains.mean(0)
  axes.plot(mean, **look)
  if len(gains) > 1:
    error = stats.sem(gains, axis=0)
    half = stats.t.ppf(0.975, len(gains) - 1) * error
    axes.fill_between(
      range(len(mean)), mean - half, mean + half, color=look["color"], alpha=0.1
    )


def _curves(
  results: dict[str, Any], method: str, policy: str
) -> dict[int, np.ndarray]:
  """A smooth curve per seed; the policies' mean for `AVERAGE`."""
  found: dict[int, list[list[float]]] = {}
  for run in results["runs"]:
    if run["method"] == method and policy in (run["policy"], AVERAGE):
      found.setdefault(run["seed"], []).append(run["curve"])
  return {
    seed: plots.smooth(np.mean(curves, axis=0))
    for seed, curves in found.items()
  }
