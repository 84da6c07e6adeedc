"""The rollouts of a stage on disk, in parts, read as one sequence.

A stage may be larger than memory and its generation longer than a machine's
luck, so each part is written as soon as it is verified, as one Arrow file
that is mapped into memory and read row by row. A file appears whole or not
at all: a run that was killed finds the parts it had finished and generates
the others.
"""

import bisect
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import pyarrow as pa

from mrl_jax import records

_SCHEMA = pa.schema(
  [
    ("prompt_id", pa.string()),
    ("sample", pa.int32()),
    ("prompt", pa.string()),
    ("context", pa.list_(pa.int32())),
    ("tokens", pa.list_(pa.int32())),
    ("logprobs", pa.list_(pa.float32())),
    ("entropies", pa.list_(pa.float32())),
    ("finished", pa.bool_()),
    ("text", pa.string()),
    ("answer", pa.string()),
    ("reward", pa.float64()),
    ("outcome", pa.string()),
    ("version", pa.int64()),
    ("root", pa.string()),
    ("prefix", pa.int32()),
    ("earned", pa.list_(pa.float32())),
  ]
)
_NAME = re.compile(r"part-(\d{6})\.arrow")


class Shelf:
  """The parts of one policy's stage, below one folder."""

  def __init__(self, folder: str | os.PathLike[str]):
    self.folder = pathlib.Path(folder)
    self.folder.mkdir(parents=True, exist_ok=True)

  def parts(self) -> list[int]:
    """The numbers of the parts that are there, in order."""
    names = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
    return sorted(int(name[1]) for name in names if name)

  def put(self, part: int, rows: Sequence[records.Rollout]) -> None:
    """Writes a part; it is there once this returns, and not before."""
    columns = [
      pa.array(_column(rows, field.name), field.type) for field in _SCHEMA
    ]
    path = self._path(part)
    new = path.with_suffix(".new")
    with open(new, "wb") as file:
      with pa.ipc.new_file(file, _SCHEMA) as writer:
        writer.write_batch(pa.record_batch(columns, schema=_SCHEMA))
      file.flush()
      os.fsync(file.fileno())
    os.replace(new, path)

  def rows(self) -> "Rows":
    """All rows of all parts, in the parts' order."""
    return Rows([_Part(self._path(part)) for part in self.parts()])

  def _path(self, part: int) -> pathlib.Path:
    return self.folder / f"part-{part:06d}.arrow"


class Rows(Sequence[records.Rollout]):
  """A sequence of rollouts that are read when they are asked for."""

  def __init__(
    self, parts: Sequence["_Part"], novelty: np.ndarray | None = None
  ):
    self._parts, self._novelty = parts, novelty
    self._ends = np.cumsum([part.count for part in parts]).tolist()

  def __len__(self) -> int:
    return self._ends[-1] if self._ends else 0

  @overload
  def __getitem__(self, index: int) -> records.Rollout: ...

  @overload
  def __getitem__(self, index: slice) -> tuple[records.Rollout, ...]: ...

  def __getitem__(self, index):
    if isinstance(index, slice):
      return tuple(self._row(i) for i in range(*index.indices(len(self))))
    if not -len(self) <= index < len(self):
      raise IndexError(f"row {index} of {len(self)}")
    return self._row(index % len(self))

  def __iter__(self) -> Iterator[records.Rollout]:
    return map(self._row, range(len(self)))

  def with_novelty(self, novelty: np.ndarray) -> "Rows":
    """The same rows, of which this has been found out since."""
    return Rows(self._parts, novelty)

  def _row(self, index: int) -> records.Rollout:
    part = bisect.bisect_right(self._ends, index)
    start = self._ends[part - 1] if part else 0
    row = self._parts[part].row(index - start)
    if self._novelty is None:
      return row
    return row._replace(novelty=float(self._novelty[index]))


class _Part:
  """One file, mapped into memory."""

  def __init__(self, path: pathlib.Path):
    with pa.memory_map(str(path)) as source:
      batch = pa.ipc.open_file(source).get_batch(0)
    self.count = batch.num_rows
    self._columns = {
      field.name: _reader(batch.column(field.name)) for field in _SCHEMA
    }

  def row(self, index: int) -> records.Rollout:
    row = {name: read(index) for name, read in self._columns.items()}
    row["context"] = tuple(row["context"].tolist())
    return records.Rollout(**row)


def _column(rows: Sequence[records.Rollout], name: str) -> list:
  return [getattr(row, name) for row in rows]


def _reader(column: pa.Array):
  """A function from a row's number to its value of one column."""
  if not pa.types.is_list(column.type):
    return lambda index: column[index].as_py()
  ends, values = column.offsets.to_numpy(), column.values.to_numpy()
  there = column.is_valid().to_numpy(zero_copy_only=False)

  def read(index: int) -> np.ndarray | None:
    return values[ends[index] : ends[index + 1]] if there[index] else None

  return read
