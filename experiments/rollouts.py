"""Reads rollouts the way a person wants to: whole, with what they earned.

    python -m experiments.rollouts WORKDIR [--policy=NAME] [--round=-1]
        [--outcome=wrong] [--n=10]

Shows the last `n` rollouts that match. A negative round counts from the end
of the run, so -1 is its last round.
"""

import argparse
import collections
import json
import os
import pathlib
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

import rich.console
import rich.panel
import rich.text

STYLES = {"correct": "green", "wrong": "red"}


def select(
  workdir: str | os.PathLike[str],
  *,
  policy: str | None = None,
  round: int | None = None,
  outcome: str | None = None,
  n: int = 10,
) -> list[dict[str, Any]]:
  """Returns the last `n` matching records, in the order of the file.

  Raises:
    ValueError: There is no file, or nothing matches; says what there is.
  """
  if n < 1:
    raise ValueError(f"n: {n}: at least 1 is needed.")
  path = pathlib.Path(workdir) / "rollouts.jsonl"
  if not path.exists():
    raise ValueError(f"{path}: no such file; is {workdir} a workdir?")
  if round is not None and round < 0:
    last = max((record["round"] for record in records_in(path)), default=-1)
    round = last + 1 + round
  wanted = {"policy": policy, "round": round, "outcome": outcome}
  wanted = {key: value for key, value in wanted.items() if value is not None}
  kept = collections.deque(maxlen=n)
  seen = {key: set() for key in wanted}
  for record in records_in(path):
    for key in wanted:
      seen[key].add(record.get(key))
    if all(record.get(key) == value for key, value in wanted.items()):
      kept.append(record)
  if not kept:
    raise ValueError(f"{path}: {_nothing(wanted, seen)}")
  return list(kept)


def show(records: Sequence[Mapping[str, Any]], file: TextIO) -> None:
  """Prints one panel per rollout."""
  console = rich.console.Console(file=file, highlight=False)
  for record in records:
    outcome = str(record.get("outcome", "unknown"))
    style = STYLES.get(outcome, "yellow")
    text = rich.text.Text()
    text.append(visible(record["prompt"]), style="dim")
    text.append("\n")
    text.append(visible(record["completion"]))
    if record.get("finish") == "length":
      text.append(" [cut at the limit]", style="yellow")
    if record.get("answer"):
      text.append("\nanswer  ", style="dim")
      text.append(visible(record["answer"]), style="cyan")
    title = (
      f"{record['policy']} · round {record['round']} · "
      f"{record.get('prompt_id', '?')} #{record.get('sample', '?')}"
    )
    console.print(
      rich.panel.Panel(
        text,
        title=rich.text.Text(title),
        title_align="left",
        subtitle=rich.text.Text(_facts(record, outcome)),
        subtitle_align="left",
        border_style=style,
      )
    )


def records_in(path: pathlib.Path) -> Iterator[dict[str, Any]]:
  """Streams the file, which can be far larger than memory."""
  with open(path, "rb") as file:
    for number, line in enumerate(file, start=1):
      if line.endswith(b"\n"):  # else still being written
        try:
          yield json.loads(line)
        except ValueError as error:
          raise ValueError(f"{path}:{number}: not JSON: {error}") from None


def _nothing(wanted: Mapping[str, Any], seen: Mapping[str, set]) -> str:
  if not wanted or not any(seen.values()):
    return "holds no rollouts yet."
  parts = []
  for key, value in wanted.items():
    if key == "round":
      first, last = min(seen[key]), max(seen[key])
      parts.append(f"{key} {value} (there are {first} to {last})")
    else:
      names = ", ".join(sorted(map(str, seen[key])))
      parts.append(f"{key} {value!r} (there are {names})")
  return f"no rollout has {' and '.join(parts)}."


def _facts(record: Mapping[str, Any], outcome: str) -> str:
  reward = record.get("reward")
  facts = [outcome, "no reward" if reward is None else f"reward {reward:g}"]
  if record.get("tokens") is not None:
    facts.append(f"{len(record['tokens'])} tokens")
  for key, name in (
    ("entropy_mean", "entropy"),
    ("logprobs_mean", "log-prob"),
  ):
    if record.get(key) is not None:
      facts.append(f"{name} {record[key]:.3f}")
  if record.get("novelty") is not None:
    facts.append(f"novelty {record['novelty']:.3f}")
  if record.get("prefix"):
    facts.append(f"continues {record['prefix']} tokens")
  if record.get("finish"):
    facts.append(f"finish {record['finish']}")
  return " · ".join(facts)


def visible(text: str) -> str:
  """Escapes what a terminal would obey instead of showing.

  A policy may emit any bytes: cursor movements, colours, bidirectional
  overrides, halves of surrogate pairs.
  """
  return "".join(
    repr(c)[1:-1]
    if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf", "Cs")
    else c
    for c in text
  )


def main(arguments: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    prog="python -m experiments.rollouts",
    description="Shows the last rollouts of a run that match.",
    allow_abbrev=False,
  )
  parser.add_argument("workdir")
  parser.add_argument("--policy")
  parser.add_argument(
    "--round", type=int, help="-1 is the last one; default: any"
  )
  parser.add_argument("--outcome", help="correct, wrong, unparsed, ...")
  parser.add_argument("--n", type=int, default=10, help="default: 10")
  options = parser.parse_args(arguments)
  try:
    records = select(
      options.workdir,
      policy=options.policy,
      round=options.round,
      outcome=options.outcome,
      n=options.n,
    )
  except ValueError as error:
    parser.error(str(error))
  show(records, sys.stdout)


if __name__ == "__main__":
  main()
