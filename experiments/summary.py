"""The table at the end of a run, read off its folder."""

import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TextIO

import rich.box
import rich.console
import rich.table
import rich.text

from experiments import progress
from mrl_jax.train import metrics, turn


class Row(NamedTuple):
  """One policy's line of the final table; None where nothing was measured."""

  policy: str
  rounds: int
  pass_first: float | None  # mean pass@1 of the first rounds
  pass_last: float | None  # and of the last ones, as all that follow
  reward: float | None
  length: float | None  # tokens
  entropy: float | None  # nats
  tokens_per_second: float | None
  unscored: float | None  # completions, over the whole run
  exchange: Mapping[str, float] = {}  # EXCHANGE's titles: sums over the run


def summary(workdir: str | os.PathLike[str]) -> list[Row]:
  """Reads the final table off a working directory."""
  workdir = pathlib.Path(workdir)
  timings = workdir / "timings.jsonl"
  return rows(
    metrics.read(workdir / "metrics.jsonl"),
    metrics.read(timings) if timings.exists() else (),
  )


def rows(
  records: Sequence[Mapping[str, Any]],
  times: Sequence[Mapping[str, Any]] = (),
  window: int = 10,
) -> list[Row]:
  """The final table from the records of `metrics.jsonl` and `timings.jsonl`.

  First and last are means over `window` rounds, less when a run is so short
  that they would overlap.
  """
  result = []
  for policy in dict.fromkeys(record["policy"] for record in records):
    mine = [r for r in records if r["policy"] == policy]
    speed = [r for r in times if r["policy"] == policy]
    size = max(1, min(window, len(mine) // 2))
    last = mine[-size:]
    unscored = [r["unscored"] for r in mine if r.get("unscored") is not None]
    result.append(
      Row(
        policy=policy,
        rounds=len(mine),
        pass_first=_mean(mine[:size], "pass@1"),
        pass_last=_mean(last, "pass@1"),
        reward=_mean(last, "reward"),
        length=_mean(last, "length"),
        entropy=_mean(last, "entropy"),
        tokens_per_second=_mean(speed[-size:], "tokens_per_second"),
        unscored=sum(unscored) if unscored else None,
        exchange=_exchanged(mine),
      )
    )
  return result


def _exchanged(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """What a policy took from its peers over the run; empty if it never did."""
  found = {}
  for key, title in progress.EXCHANGE:
    values = [r[key] for r in records if r.get(key) is not None]
    if values:
      found[title] = sum(values)
  return found


def table(rows: Sequence[Row], file: TextIO | None = None) -> None:
  """Prints the final table, without colour where `file` is no terminal."""
  grid = _Grid(file, "policy")
  titles = ("rounds", "pass@1 first -> last", "reward", "length", "entropy")
  heard = [
    t for _, t in progress.EXCHANGE if any(t in row.exchange for row in rows)
  ]
  grid.numbers(*titles, "tokens/s", "unscored", *heard)
  for row in rows:
    grid.row(
      row.policy,
      str(row.rounds),
      _change(row.pass_first, row.pass_last),
      progress.cell(row.reward, ".3f"),
      progress.cell(row.length, ".1f"),
      progress.cell(row.entropy, ".3f"),
      progress.cell(row.tokens_per_second, ",.0f"),
      progress.cell(row.unscored, ".0f"),
      *(progress.cell(row.exchange.get(title), ",.0f") for title in heard),
    )
  grid.print(120 + 12 * len(heard))


def phases(workdir: str | os.PathLike[str], file: TextIO | None = None) -> None:
  """Prints wall and CPU seconds per policy and phase, over all rounds.

  Rounds that a resumed run finished count with what it did of them.
  """
  path = pathlib.Path(workdir) / "timings.jsonl"
  times = metrics.read(path) if path.exists() else []
  names = [n for n in turn.PHASES if any(f"seconds/{n}" in r for r in times)]
  grid = _Grid(file, "policy", "seconds")
  grid.numbers(*names, "all", "generated/s")
  for policy in dict.fromkeys(record["policy"] for record in times):
    mine = [record for record in times if record["policy"] == policy]
    tokens = sum(record.get("generated", 0) for record in mine)
    for kind, title in (("seconds", "wall"), ("cpu", "CPU")):
      sums = [sum(r.get(f"{kind}/{n}", 0.0) for r in mine) for n in names]
      spent = sums[names.index("generate")] if "generate" in names else 0.0
      grid.row(
        policy,
        title,
        *(progress.cell(value, ",.1f") for value in (*sums, sum(sums))),
        progress.cell(tokens / spent if spent else None, ",.0f"),
      )
  if times:
    grid.print(120)


# What exploring policies did: title, key, format; means over their rounds
# but for the last, which stands at the end.
EXPLORED = (
  ("novelty", "explore/novelty", ".4f"),
  ("p90", "explore/novelty_p90", ".4f"),
  ("distinct right", "distinct", ".2f"),
  ("all right", "all_correct", ".3f"),
  ("all wrong", "all_wrong", ".3f"),
  ("hard", "explore/hard", ".1f"),
  ("continued", "explore/regenerated", ".1f"),
  ("parents' pass", "explore/parent_pass", ".3f"),
  ("continued pass", "explore/regenerated_pass", ".3f"),
  ("queue age", "explore/queue_age", ".1f"),
  ("queue", "explore/queue", ".0f"),
)


def exploration(
  workdir: str | os.PathLike[str], file: TextIO | None = None
) -> None:
  """Prints what the policies that explore found; nothing if none does."""
  records = metrics.read(pathlib.Path(workdir) / "metrics.jsonl")
  mine = [r for r in records if any(k.startswith("explore/") for k in r)]
  if not mine:
    return
  grid = _Grid(file, "policy")
  grid.numbers(*(title for title, _, _ in EXPLORED), wrap=True)
  for policy in dict.fromkeys(record["policy"] for record in mine):
    rows = [record for record in mine if record["policy"] == policy]
    cells = []
    for _, key, form in EXPLORED:
      value = rows[-1].get(key) if key == "explore/queue" else _mean(rows, key)
      cells.append(progress.cell(value, form))
    grid.row(policy, *cells)
  grid.print(140)


class _Grid:
  """A table whose first column is bold; no colour where there is no terminal.

  Args:
    file: where it is printed; None is standard output.
    names: titles of the first columns, which are words.
  """

  def __init__(self, file: TextIO | None, *names: str):
    self._file = sys.stdout if file is None else file
    self._terminal = progress.screen(self._file) == "live"
    box = rich.box.SIMPLE_HEAD if self._terminal else rich.box.ASCII2
    self._table = rich.table.Table(box=box)
    for name in names:
      self._table.add_column(name, no_wrap=True)

  def numbers(self, *titles: str, wrap: bool = False) -> None:
    """Adds columns of numbers."""
    for title in titles:
      self._table.add_column(title, justify="right", no_wrap=not wrap)

  def row(self, name: str, *cells: str) -> None:
    self._table.add_row(rich.text.Text(name, style="bold"), *cells)

  def print(self, width: int) -> None:
    """Prints it, `width` columns wide at most if that is no terminal."""
    rich.console.Console(
      file=self._file,
      width=None if self._terminal else width,
      force_terminal=self._terminal,
    ).print(self._table)


def _change(first: float | None, last: float | None) -> str:
  if first is None or last is None:
    return "-"
  return f"{first:.3f} -> {last:.3f} ({last - first:+.3f})"


def _mean(records: Sequence[Mapping[str, Any]], key: str) -> float | None:
  values = [r[key] for r in records if r.get(key) is not None]
  return sum(values) / len(values) if values else None
