"""Padding: one width for all rows, widths of their own, or packing?

  python -m experiments.studies.waste runs/smollm2 --prompt_tokens=40

Reads the lengths of a run's completions, group by group, and counts the
tokens that one update of a round computes under each layout, over those that
are real. One width computes a prompt once for its group, and widths of their
own once for each piece of it (--length_buckets, --microbatches). Packing puts
prompt and completion of each row behind those of others, first-fit decreasing,
in rows as long as the longest, so it computes the prompt for every
completion. Nothing is trained: lengths are all that counts.
"""

import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import rich.box
import rich.console
import rich.table
from absl import flags

from experiments import flags as flags_lib
from mrl_jax import collate
from mrl_jax import config as config_lib
from mrl_jax.train import widths

PIECES, MICROBATCHES = (1, 2, 4, 8), (2, 4, 8)


def groups(folder: pathlib.Path) -> list[list[list[int]]]:
  """The completions' lengths: by round, by prompt."""
  rounds: dict[Any, dict[str, list[int]]] = {}
  for line in (folder / "rollouts.jsonl").read_text().splitlines():
    row = json.loads(line)
    round_ = rounds.setdefault((row["policy"], row["round"]), {})
    round_.setdefault(row["prompt_id"], []).append(len(row["tokens"]))
  return [list(round_.values()) for round_ in rounds.values()]


def layouts(rounds: Sequence[list[list[int]]], prompt: int) -> dict[str, float]:
  """Tokens computed over real tokens, by layout; a mean over rounds."""
  found: dict[str, list[float]] = {}
  for round_ in rounds:
    for name, ratio in _round(round_, prompt).items():
      found.setdefault(name, []).append(ratio)
  return {name: float(np.mean(ratios)) for name, ratios in found.items()}


def _round(round_: list[list[int]], prompt: int) -> dict[str, float]:
  rows = [length for group in round_ for length in group]
  whole, wide = collate.bucket(max(rows)), collate.bucket(prompt)
  real = len(round_) * prompt + sum(rows)
  out = {"one width": (len(round_) * wide + len(rows) * whole) / real}
  share = len(round_[0])
  for pieces, count in itertools.product(PIECES, MICROBATCHES):
    if share % pieces == 0 and len(round_) * pieces % count == 0:
      found = widths.cut(np.asarray(rows), share, count, whole, pieces)
      prompts = len(rows) // found.share * wide
      computed = prompts + len(rows) * float(np.mean(found.widths))
      out[f"{count} widths, groups in {pieces}"] = computed / real
  packed = _pack([prompt + length for length in rows], prompt + whole)
  out["packed"] = packed * (prompt + whole) / real
  return out


def _pack(lengths: Sequence[int], capacity: int) -> int:
  """How many rows hold the sequences, first-fit decreasing."""
  free: list[int] = []
  for length in sorted(lengths, reverse=True):
    for row, space in enumerate(free):
      if length <= space:
        free[row] -= length
        break
    else:
      free.append(capacity - length)
  return len(free)


def main(folder: str) -> int:
  path = pathlib.Path(folder)
  if not (path / "rollouts.jsonl").exists():
    raise config_lib.ConfigError("run", folder, "has no rollouts.jsonl")
  found = layouts(groups(path), flags.FLAGS.prompt_tokens)
  grid = rich.table.Table(box=rich.box.ASCII2)
  grid.add_column("layout")
  grid.add_column("tokens computed / real", justify="right")
  for name, ratio in found.items():
    grid.add_row(name, f"{ratio:.3f}")
  rich.console.Console().print(grid)
  return 0


if __name__ == "__main__":
  flags.DEFINE_integer(
    "prompt_tokens", 64, "Tokens of a prompt, as rendered.", 1
  )
  flags_lib.run(main, arguments=1)
