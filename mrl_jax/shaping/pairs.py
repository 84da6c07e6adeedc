"""Right and wrong responses to the prompts of many tasks, as text.

A file holds one JSON object a line: `task`, `prompt`, `chosen`, `rejected`,
and perhaps `chosen_reward`, `rejected_reward` and `share`, how often the
reference's own response is a good one. A row that cannot be used is dropped
and counted by reason.
"""

import collections
import json
import math
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mrl_jax.tasks import files


class Pair(NamedTuple):
  """Two responses to one prompt, the first one better."""

  task: str
  prompt: str
  chosen: str
  rejected: str
  chosen_reward: float = 1.0
  rejected_reward: float = 0.0
  share: float = 0.5  # weight of `chosen` in a mean over the reference


_TEXTS = ("task", "prompt", "chosen", "rejected")
_NUMBERS = ("chosen_reward", "rejected_reward", "share")


def read(path: str | os.PathLike[str]) -> tuple[list[Pair], files.Report]:
  """Reads a file of JSON lines.

  Raises:
    FileNotFoundError: no such file.
    ValueError: not one usable row.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise FileNotFoundError(f"{path}: no such file")
  found, dropped, rows = [], collections.Counter(), 0
  with path.open("rb") as lines:
    for line in lines:
      if not line.strip():
        continue
      rows += 1
      pair = _parsed(line)
      if isinstance(pair, str):
        dropped[pair] += 1
      else:
        found.append(pair)
  if not found:
    raise ValueError(f"{path}: no usable row out of {rows}: {dict(dropped)}")
  return found, files.Report(rows, len(found), dict(dropped))


def _parsed(line: bytes) -> Pair | str:
  """The line as a pair, or the reason why it cannot be one."""
  try:
    row = json.loads(line)
  except (ValueError, RecursionError):
    return "not JSON"
  if not isinstance(row, dict):
    return "not a JSON object"
  for field in _TEXTS:
    reason = _wrong_text(field, row.get(field))
    if reason:
      return reason
  if row["chosen"] == row["rejected"]:
    return "chosen and rejected are the same"
  for field in _NUMBERS:
    if field in row and not _is_number(row[field]):
      return f"{field} is not a finite number"
  numbers = {n: float(row[n]) for n in _NUMBERS if n in row}
  pair = Pair(*(row[field] for field in _TEXTS), **numbers)
  if not pair.chosen_reward > pair.rejected_reward:
    return "chosen_reward is not above rejected_reward"
  if not 0 <= pair.share <= 1:
    return "share is not in [0, 1]"
  return pair


def _wrong_text(field: str, value: Any) -> str:
  if value is None:
    return f"missing {field}"
  if not isinstance(value, str):
    return f"{field} is not text"
  if not value.strip():
    return f"empty {field}"
  return "" if files.is_unicode(value) else f"{field} is not valid Unicode"


def _is_number(value: Any) -> bool:
  if isinstance(value, bool) or not isinstance(value, int | float):
    return False
  try:
    return math.isfinite(value)
  except OverflowError:  # a whole number beyond every float
    return False


def write(path: str | os.PathLike[str], pairs: Iterable[Pair]) -> None:
  """The inverse of `read`; the file is there whole or not at all."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  new = path.with_name(path.name + ".new")
  lines = (json.dumps(pair._asdict()) + "\n" for pair in pairs)
  new.write_text("".join(lines), encoding="utf-8")
  os.replace(new, path)


def held_out(
  tasks: Sequence[str], chosen: Sequence[str] | float, seed: int = 0
) -> set[str]:
  """Which of the tasks are only for judging.

  Args:
    tasks: all of them, in any order.
    chosen: what their names begin with, or the share of them that is drawn.
    seed: of the draw.

  Raises:
    ValueError: a share that is none, no name begins so, or nothing is left
      on one side.
  """
  names = sorted(set(tasks))
  if isinstance(chosen, float):
    if not 0 < chosen < 1:
      raise ValueError(f"a share of tasks must be in (0, 1), got {chosen}")
    count = round(chosen * len(names))
    order = np.random.default_rng(seed).permutation(len(names))
    found = {names[number] for number in order[:count]}
  else:
    for start in chosen:
      if not any(name.startswith(start) for name in names):
        raise ValueError(f"no task begins with {start!r}; there are {names}")
    found = {name for name in names if name.startswith(tuple(chosen))}
  if not found or len(found) == len(names):
    raise ValueError(
      f"{len(found)} of {len(names)} tasks are held out; leave some of them "
      "on either side"
    )
  return found


def standardised(pairs: Sequence[Pair]) -> list[float]:
  """dR of each pair, in the deviations (ddof 0) of its task's rewards."""
  rewards: dict[str, list[float]] = {}
  for pair in pairs:
    mine = rewards.setdefault(pair.task, [])
    mine += [pair.chosen_reward, pair.rejected_reward]
  stds = {task: float(np.std(mine)) for task, mine in rewards.items()}
  return [
    (pair.chosen_reward - pair.rejected_reward) / stds[pair.task]
    for pair in pairs
  ]
