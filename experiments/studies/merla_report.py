"""The MeRLa study's tables and figure, from its results alone."""

import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib.figure
import numpy as np

from experiments import plots
from experiments.studies import mu_grpo_report, mutual_report
from mrl_jax.shaping import features

BASE = "grpo"
NAMES = {
  "start": "the warm start",
  "grpo": "GRPO",
  "token": "token, meta-trained",
  "token_light": "token, meta-trained, alpha 0.1",
  "token_untrained": "token, untrained",
  "token_zero": "token, alpha 0",
  "sequence": "sequence, meta-trained",
  "sequence_untrained": "sequence, untrained",
  "sequence_zero": "sequence, alpha 0",
  "bounded": "bounded, meta-trained",
  "bounded_untrained": "bounded, untrained",
  "bounded_zero": "bounded, alpha 0",
  "ppo": "PPO-style",
  "dapo": "DAPO-style",
}
_CURVES = ("grpo", "token", "sequence", "bounded", "ppo", "dapo")


def by_seed(results: dict[str, Any], arm: str, key: str) -> dict[int, float]:
  """One number per seed."""
  return {
    run["seed"]: run[key]
    for run in results["runs"]
    if run["arm"] == arm and key in run
  }


def gains(results: dict[str, Any], arm: str, key: str) -> list[float]:
  """Paired differences: each seed's arm minus the same seed's GRPO."""
  ones, base = by_seed(results, arm, key), by_seed(results, BASE, key)
  return [ones[seed] - base[seed] for seed in ones if seed in base]


def ratios(results: dict[str, Any], arm: str, key: str) -> list[float]:
  """Paired logarithms of ratios to GRPO of the same seed."""
  ones, base = by_seed(results, arm, key), by_seed(results, BASE, key)
  return [float(np.log(ones[s] / base[s])) for s in ones if s in base]


def table(results: dict[str, Any]) -> str:
  """Markdown: means over seeds with 95 % intervals, and against GRPO."""
  keys = ("pass@1", "pass@16")
  lines = [
    "| arm | "
    + " | ".join(f"{key} | minus GRPO" for key in keys)
    + " | mean reward while training | minus GRPO | length |",
    "|---|" + "---|" * (2 * len(keys) + 3),
  ]
  runs = [
    {**run, "area": float(np.mean(run["curve"]))} if "curve" in run else run
    for run in results["runs"]
  ]
  results = {**results, "runs": runs}
  for arm in _arms(results):
    cells = [NAMES[arm]]
    for key in (*keys, "area"):
      cells.append(_cell(by_seed(results, arm, key).values()))
      cells.append("" if arm == BASE else _cell(gains(results, arm, key), "+"))
    cells.append(_cell(by_seed(results, arm, "length").values(), "", 2))
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def collapsed(run: dict[str, Any]) -> bool:
  """Whether a run ended lower than it began."""
  curve = run["curve"]
  return bool(np.mean(curve[-16:]) < np.mean(curve[:8]))


def stability(results: dict[str, Any]) -> str:
  """Markdown: how fast and how steadily; ratios to GRPO with intervals.

  Of the runs that did not collapse: one that stays at 0 is steady too.
  """
  trained = [run for run in results["runs"] if "curve" in run]
  fallen = [run["arm"] for run in trained if collapsed(run)]
  runs = [run for run in trained if not collapsed(run)]
  results = {**results, "runs": runs}
  keys = {
    "reward_variance": "variance of the last 16 rounds' reward",
    "rest_variance": "the same around a line, last 32",
    "norm_variance": "variance of the gradient norm, last 16",
    "norm": "gradient norm",
  }
  lines = [
    "| arm | collapsed | rounds to 90 % of the rise | minus GRPO | "
    + " | ".join(f"{name}, over GRPO's" for name in keys.values())
    + " |",
    "|---|---|---|---|" + "---|" * len(keys),
  ]
  for arm in _arms({"runs": trained}):
    rounds = by_seed(results, arm, "to_ninety")
    fell = fallen.count(arm)
    count = f"{fell} of {fell + len(rounds)}"
    cells = [NAMES[arm], count, _cell(rounds.values(), "", 1)]
    gain = gains(results, arm, "to_ninety")
    cells.append("" if arm == BASE else _cell(gain, "+", 1))
    for key in keys:
      cells.append("" if arm == BASE else _factor(ratios(results, arm, key)))
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def _factor(logs: Sequence[float]) -> str:
  """The geometric mean of ratios, with its 95 % interval."""
  if len(logs) < 2:
    return f"{np.exp(np.mean(logs)):.2f}" if logs else ""
  mean, half = mutual_report.interval(list(logs))
  low, high = np.exp(mean - half), np.exp(mean + half)
  return f"{np.exp(mean):.2f} [{low:.2f}, {high:.2f}]"


def potentials(results: dict[str, Any]) -> str:
  """Markdown: how well each potential tells good prefixes, held-out tasks."""
  names = list(dict.fromkeys(p["potential"] for p in results["potentials"]))
  places = features.PLACES
  lines = [
    f"| potential | {' | '.join(places)} | CPU seconds |",
    "|---|" + "---|" * (len(places) + 1),
  ]
  for name in names:
    mine = [p for p in results["potentials"] if p["potential"] == name]
    cells = [name]
    for place in places:
      cells.append(_cell([p["held_out"][place]["mean"] for p in mine]))
    cells.append(_cell([p["cpu_seconds"] for p in mine], "", 0))
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def _cell(values, sign: str = "", digits: int = 3) -> str:
  return mu_grpo_report.cell(list(values), sign, digits)


def _arms(results: dict[str, Any]) -> list[str]:
  there = {run["arm"] for run in results["runs"]}
  return [arm for arm in NAMES if arm in there]


def figure(results: dict[str, Any], path: pathlib.Path) -> pathlib.Path:
  """Learning curves, and what each arm gains over GRPO of the same seed."""
  canvas = matplotlib.figure.Figure(figsize=(11, 4.4), layout="constrained")
  left, right = canvas.subplots(1, 2)
  shown = [arm for arm in _CURVES if by_seed(results, arm, "to_ninety")]
  for number, arm in enumerate(shown):
    curves = [r["curve"] for r in results["runs"] if r["arm"] == arm]
    _band(left, curves, plots.COLORS[number % len(plots.COLORS)], NAMES[arm])
  left.set_xlabel("rounds")
  left.set_ylabel("reward of the task (mean of 8 rounds)")
  left.legend(frameon=False, fontsize=8)
  arms = [arm for arm in _arms(results) if arm not in (BASE, "start")]
  for number, key in enumerate(("pass@1", "pass@16")):
    _gains(right, results, arms, key, number)
  right.set_yticks(range(len(arms)), [NAMES[arm] for arm in reversed(arms)])
  right.axvline(0, color=plots.INK, linewidth=1)
  right.set_xlabel("held out, minus GRPO of the same seed")
  right.legend(frameon=False, fontsize=8)
  for axes in (left, right):
    axes.spines[["top", "right"]].set_visible(False)
  canvas.savefig(path, dpi=150, facecolor="white")
  return path


def _band(axes, curves, color: str, label: str, width: int = 8) -> None:
  """The mean over seeds of running means, with its 95 % band."""
  kernel = np.ones(width) / width
  means = np.stack([np.convolve(c, kernel, mode="valid") for c in curves])
  rounds = np.arange(width, width + means.shape[1])
  axes.plot(rounds, means.mean(0), color=color, label=label)
  if len(curves) > 1:
    pairs = [mutual_report.interval(list(column)) for column in means.T]
    mean, half = np.asarray(pairs).T
    axes.fill_between(
      rounds, mean - half, mean + half, color=color, alpha=0.08, linewidth=0
    )


def _gains(axes, results, arms: Sequence[str], key: str, number: int) -> None:
  """An arm per line; dots are seeds, bars 95 % of their mean."""
  color = plots.COLORS[number]
  for row, arm in enumerate(reversed(arms)):
    gain = gains(results, arm, key)
    if not gain:
      continue
    mean, half = mutual_report.interval(gain)
    at = row + 0.2 * (0.5 - number)
    axes.plot(gain, [at] * len(gain), ".", color=color, alpha=0.35)
    label = key if row == 0 else None
    axes.errorbar(
      mean, at, xerr=half, fmt="o", color=color, markersize=4, label=label
    )
