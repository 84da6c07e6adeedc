"""Learning curves of a run as one PNG, drawn from its logs alone.

    python -m experiments.plots WORKDIR [WORKDIR ...] [--out=FILE] [--updates]

One small panel per quantity that was measured and one colour per policy; a
smooth line lies over the faint raw values. Several working directories are
laid over each other in one figure. With --updates there is a point for each
update and not for each round, where a round has many.
"""

import argparse
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import matplotlib
import matplotlib.axes
import matplotlib.figure
import matplotlib.ticker
import numpy as np

from experiments import panels as panels_lib
from mrl_jax.train import metrics

# Told apart by all common kinds of colour blindness: Okabe and Ito, 2008,
# https://jfly.uni-koeln.de/color/, darkest on white first.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)))
INK, FAINT = "#333333", "#8A8A8A"


class Curve(NamedTuple):
  """One policy of one run: its rounds (or updates), a column per metric."""

  label: str
  rounds: np.ndarray
  values: dict[str, np.ndarray]  # NaN where a round has none


def curves(
  workdirs: Sequence[str | os.PathLike[str]], updates: bool = False
) -> list[Curve]:
  """Reads every policy's metrics from every working directory."""
  result = []
  paths = [pathlib.Path(workdir) for workdir in workdirs]
  unique = len({path.name for path in paths}) == len(paths)
  for workdir in paths:
    path = workdir / ("updates.jsonl" if updates else "metrics.jsonl")
    if not path.exists():
      raise ValueError(f"{path}: no such file; is {workdir} a workdir?")
    records = metrics.read(path)
    for policy in dict.fromkeys(record["policy"] for record in records):
      mine = [r for r in records if r["policy"] == policy]
      run = workdir.name if unique else str(workdir)
      label = policy if len(paths) == 1 else f"{run} {policy}"
      rounds = np.arange(len(mine))
      if not updates:
        rounds = np.asarray([r["round"] for r in mine])
      keys = dict.fromkeys(key for record in mine for key in record)
      result.append(Curve(label, rounds, _columns(mine, keys)))
  return result


def smooth(values: np.ndarray) -> np.ndarray:
  """A running mean with Gaussian weights; gaps (NaN) take no part."""
  width = len(values) / 40  # standard deviation, in rounds
  reach = int(np.ceil(3 * width))
  kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
  known = np.isfinite(values)
  total = np.convolve(np.where(known, values, 0.0), kernel)
  weight = np.convolve(known.astype(float), kernel)
  inside = slice(reach, reach + len(values))
  total, weight = total[inside], weight[inside]
  return np.where(known, total / np.where(known, weight, 1.0), np.nan)


def panels(data: Sequence[Curve]) -> list[tuple[panels_lib.Panel, list[str]]]:
  """The panels there is something to show in, with their metrics.

  Metrics of one source of rows, as in "peer/clip_low", get their own panels.
  """
  present = {
    key
    for curve in data
    for key, column in curve.values.items()
    if np.isfinite(column).any()
    and (key not in panels_lib.WHEN_NOT_ZERO or np.nanmax(np.abs(column)) > 0)
    and not key.startswith("stale/")  # the plot of updates shows these
  }
  prefixes = sorted({key.rpartition("/")[0] for key in present})
  result = []
  for prefix in prefixes:
    for panel in panels_lib.PANELS:
      pattern = re.escape(f"{prefix}/" if prefix else "") + panel.keys
      keys = [key for key in present if re.fullmatch(pattern, key)]
      if keys:
        title = f"{panel.title}, {prefix} rows" if prefix else panel.title
        result.append((panel._replace(title=title), sorted(keys, key=_order)))
  return result


def plot(
  workdir: str | os.PathLike[str],
  *more: str | os.PathLike[str],
  out: str | os.PathLike[str] | None = None,
  updates: bool = False,
) -> list[pathlib.Path]:
  """Draws the runs; returns the files written, none if there is no data.

  Args:
    workdir: The run's directory, with a `metrics.jsonl`.
    *more: Runs to lay over it.
    out: The PNG's path; `plots.png` (`updates.png`) in the first directory
      unless given.
    updates: Whether to draw updates instead of rounds.
  """
  data = curves([workdir, *more], updates)
  shown = panels(data)
  if not shown:
    return []
  columns = min(3, len(shown))
  rows = -(-len(shown) // columns)
  size = (4.2 * columns, 2.7 * rows + 0.7)
  with matplotlib.rc_context({"font.size": 9, "text.color": INK}):
    figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, squeeze=False)
    grid = grid.ravel()
    for axes, (panel, keys) in zip(grid, shown, strict=False):
      _draw(axes, panel, keys, data)
    for i, axes in enumerate(grid):
      if i >= len(shown):
        axes.set_visible(False)
      elif i + columns >= len(shown):
        axes.set_xlabel("update" if updates else "round", color=INK)
      axes.tick_params(labelbottom=True)
    handles = [
      matplotlib.lines.Line2D([], [], color=color, linewidth=3, label=c.label)
      for c, color in zip(data, _colors(), strict=False)
    ]
    figure.get_layout_engine().set(hspace=0.08, wspace=0.04)
    figure.legend(
      handles=handles,
      loc="outside upper left",
      ncols=min(len(handles), 2 * columns),
      frameon=False,
      fontsize=11,
    )
    name = "updates.png" if updates else "plots.png"
    path = pathlib.Path(workdir) / name if out is None else out
    figure.savefig(path, dpi=150, facecolor="white")
  return [pathlib.Path(path)]


def _columns(
  records: Sequence[dict], keys: Sequence[str]
) -> dict[str, np.ndarray]:
  columns = {}
  for key in keys:
    values = [record.get(key) for record in records]
    numbers = [v if isinstance(v, int | float) else None for v in values]
    columns[key] = np.asarray(numbers, dtype=float)
  return columns


def _colors() -> Iterator[str]:
  while True:
    yield from COLORS


def _order(key: str) -> tuple[str, int]:
  """Sorts pass@2 before pass@16, and low before high."""
  name, _, number = key.partition("@")
  return (name.replace("clip_low", "clip_a"), int(number or 0))


def _draw(
  axes: matplotlib.axes.Axes,
  panel: panels_lib.Panel,
  keys: Sequence[str],
  data: Sequence[Curve],
) -> None:
  for curve, color in zip(data, _colors(), strict=False):
    for key, dash in zip(keys, DASHES * len(keys), strict=False):
      if key in curve.values:
        _line(axes, curve.rounds, curve.values[key], color, dash)
  axes.set_title(panel.title, loc="left", fontsize=11, color=INK)
  axes.set_ylabel(panel.unit, color=INK)
  axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
  axes.set_axisbelow(True)
  axes.spines[["top", "right", "left"]].set_visible(False)
  axes.spines["bottom"].set_color("#B0B0B0")
  axes.tick_params(length=0, colors="#555555")
  axes.xaxis.set_major_locator(
    matplotlib.ticker.MaxNLocator(nbins=6, integer=True)
  )
  axes.yaxis.set_major_locator(
    matplotlib.ticker.MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10])
  )
  axes.ticklabel_format(
    axis="y", scilimits=(-2, 5), useMathText=True, useOffset=False
  )
  _limits(axes, panel.limits)
  if len(keys) > 1:
    handles = [
      matplotlib.lines.Line2D(
        [], [], color=FAINT, linestyle=dash, label=key.rpartition("/")[2]
      )
      for key, dash in zip(keys, DASHES * len(keys), strict=False)
    ]
    axes.legend(handles=handles, frameon=False, fontsize=8, labelcolor=INK)


def _line(
  axes: matplotlib.axes.Axes,
  rounds: np.ndarray,
  values: np.ndarray,
  color: str,
  dash: str | tuple,
) -> None:
  if len(rounds) == 1:  # a line through one point cannot be seen
    axes.plot(rounds, values, "o", color=color, markersize=5)
    return
  axes.plot(rounds, values, color=color, alpha=0.22, linewidth=0.9)
  axes.plot(rounds, smooth(values), color=color, linewidth=1.8, linestyle=dash)


def _limits(
  axes: matplotlib.axes.Axes, limits: tuple[float | None, float | None]
) -> None:
  """Applies limits with room for a line that lies on them."""
  low, high = limits
  if low is not None:
    axes.set_ylim(bottom=low)
  if high is not None:
    axes.set_ylim(top=high)
  bottom, top = axes.get_ylim()
  margin = 0.03 * (top - bottom)
  axes.set_ylim(
    bottom - (margin if low is not None else 0.0),
    top + (margin if high is not None else 0.0),
  )


def main(arguments: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    prog="python -m experiments.plots",
    description="Draws the learning curves of runs as one PNG.",
    allow_abbrev=False,
  )
  parser.add_argument("workdir", nargs="+")
  parser.add_argument("--out", help="default: plots.png in the first workdir")
  parser.add_argument("--updates", action="store_true", help="not rounds")
  options = parser.parse_args(arguments)
  try:
    paths = plot(*options.workdir, out=options.out, updates=options.updates)
  except ValueError as error:
    parser.error(str(error))
  if not paths:
    parser.error(f"no metrics yet in {', '.join(options.workdir)}")
  for path in paths:
    print(path)


if __name__ == "__main__":
  main()
