"""What has been seen of each prompt: bounded memories, first in, first out.

A `Memory` never changes: `push` returns another one, so a round that is
killed in its middle starts again from what it had started from. It is
bounded twice, by the entries of a prompt and by the prompts: the prompt that
has not been pushed to for longest goes first.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Memory(NamedTuple):
  """Rows of numbers by prompt id, the latest last."""

  size: int  # most entries of a prompt
  prompts: int  # most prompts
  entries: Mapping[str, np.ndarray] = {}  # [m, E] f32, m <= size
  evicted: int = 0  # prompts so far

  def push(self, found: Sequence[tuple[str, np.ndarray]]) -> "Memory":
    """With more entries ([n, E]) for some prompts, pushed in order."""
    entries = dict(self.entries)
    for name, rows in found:
      if not len(rows):
        continue
      old = entries.pop(name, None)  # to the end: it was used last
      rows = np.asarray(rows, np.float32)
      both = rows if old is None else np.concatenate([old, rows])
      entries[name] = both[-self.size :]
    over = max(0, len(entries) - self.prompts)
    for name in list(entries)[:over]:
      del entries[name]
    return self._replace(entries=entries, evicted=self.evicted + over)

  def padded(
    self, names: Sequence[str], width: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """The entries [N, size, width] of some prompts, and which are there."""
    out = np.zeros((len(names), self.size, width), np.float32)
    filled = np.zeros((len(names), self.size), bool)
    for row, name in enumerate(names):
      if name in self.entries:
        known = self.entries[name]
        out[row, : len(known)] = known
        filled[row, : len(known)] = True
    return out, filled

  def holding(self, names: Sequence[str], count: int) -> np.ndarray:
    """Which of some prompts have at least `count` entries. [N] bool."""
    there = [len(self.entries.get(name, ())) >= count for name in names]
    return np.asarray(there, bool)

  def pack(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """JSON values and arrays from which `unpack` makes the same again."""
    counts = [len(rows) for rows in self.entries.values()]
    plain = {"ids": list(self.entries), "counts": counts}
    plain["evicted"] = self.evicted
    rows = list(self.entries.values())
    # Orbax keeps no empty array: without entries there is none.
    return plain, {"rows": np.concatenate(rows)} if rows else {}

  def unpack(
    self, plain: Mapping[str, Any], arrays: Mapping[str, Any]
  ) -> "Memory":
    """This memory's bounds with the entries that `pack` was given.

    Raises:
      ValueError: the parts do not belong together.
    """
    ends = np.cumsum(plain["counts"], dtype=int).tolist()
    rows = np.asarray(arrays.get("rows", np.zeros((0, 0))), np.float32)
    if (ends[-1] if ends else 0) != len(rows):
      raise ValueError(f"memory: {len(rows)} rows for counts {plain['counts']}")
    parts = np.split(rows, ends[:-1]) if ends else []
    entries = dict(zip(plain["ids"], parts, strict=True))
    return self._replace(entries=entries, evicted=plain["evicted"])
