"""Tasks read from JSON-lines and Parquet files of prompts and answers.

Only the columns that are asked for are read, and Parquet is read one row
group at a time, so a file is never in memory twice. A row that cannot be
used is dropped and counted by reason; a file that cannot be used at all is an
error that says what was found in its place.
"""

import collections
import decimal
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from mrl_jax.tasks import dataset
from mrl_jax.tasks.dataset import Problem, Task, Verifier

SUFFIXES = (".jsonl", ".parquet")
_NUMBERS = int | float | decimal.Decimal


class Report(NamedTuple):
  """How many rows a file had, how many are used, and why others are not."""

  rows: int
  kept: int
  dropped: dict[str, int]  # reason -> rows


def load(
  path: str | pathlib.Path,
  verifier: Verifier,
  *,
  prompt: str = "prompt",
  answer: str = "answer",
  id: str = "id",
) -> tuple[Task, Report]:
  """Reads a task from `path`; `prompt`, `answer` and `id` name its columns.

  The id column is optional; without it a row is `<file name>/<row>`.

  Raises:
    FileNotFoundError: no such file.
    ValueError: a missing column, a repeated id, or no usable row.
  """
  path = pathlib.Path(path)
  if path.suffix not in SUFFIXES:
    raise ValueError(f"{path}: the file must end in one of {SUFFIXES}")
  if not path.is_file():
    raise FileNotFoundError(f"{path}: no such file; {_neighbours(path)}")
  read = _parquet if path.suffix == ".parquet" else _jsonl
  problems, dropped, columns = {}, collections.Counter(), set()
  rows = 0
  for row in read(path, (prompt, answer, id)):
    problem = _problem(row, path.name, rows, prompt, answer, id)
    rows += 1
    if isinstance(row, dict):
      columns |= set(row)
    if isinstance(problem, str):
      dropped[problem] += 1
      continue
    if problem.id in problems:
      raise ValueError(f"{path}: id {problem.id!r} stands in two rows")
    problems[problem.id] = problem
  for column in (prompt, answer):
    if rows and columns and column not in columns:
      raise _no_column(path, column, columns)
  if not problems:
    raise ValueError(f"{path}: no usable row out of {rows}: {dict(dropped)}")
  order = list(problems.values())
  problem_at = dataset.indexed(order.__getitem__, len(order))
  task = Task(path.name, len(order), problem_at, verifier)
  return task, Report(rows, len(order), dict(dropped))


def _problem(
  row: Any, name: str, index: int, prompt: str, answer: str, id: str
) -> Problem | str:
  """Returns the row as a problem, or the reason why it cannot be one."""
  if not isinstance(row, dict):
    return "not a JSON object"
  question, gold = row.get(prompt), row.get(answer)
  for value in (question, gold):
    if value is None:
      return f"missing {prompt if value is question else answer}"
  if not isinstance(question, str):
    return f"{prompt} is not text"
  # Numbers are common as answers; bool is an int to Python and is not one.
  if isinstance(gold, bool) or not isinstance(gold, str | _NUMBERS):
    return f"{answer} is neither text nor a number"
  if not isinstance(gold, str):
    if not math.isfinite(gold):
      return f"{answer} is not finite"
    gold = _written(gold)
  if not question.strip():
    return f"empty {prompt}"
  if not gold.strip():
    return f"empty {answer}"
  key = row.get(id)
  if key is None:
    key = f"{name}/{index}"
  elif isinstance(key, bool) or not isinstance(key, str | int) or key == "":
    return f"{id} is neither text nor an integer"
  problem = Problem(str(key), question, gold)
  for field, text in zip((id, prompt, answer), problem, strict=False):
    if not _is_unicode(text):
      return f"{field} is not valid Unicode"
  return problem


def _written(number: int | float | decimal.Decimal) -> str:
  """A whole number without a point: pandas makes 5 a 5.0 in many columns."""
  text = format(decimal.Decimal(str(number)), "f")
  return text.rstrip("0").rstrip(".") if "." in text else text


def _is_unicode(text: str) -> bool:
  """False for lone surrogates, which JSON can spell and no tokenizer take."""
  try:
    text.encode()
  except UnicodeEncodeError:
    return False
  return True


def _jsonl(path: pathlib.Path, columns: tuple[str, ...]) -> Iterator[Any]:
  del columns  # a line is parsed whole
  with path.open("rb") as lines:
    for line in lines:
      if not line.strip():
        continue
      try:
        yield json.loads(line)
      except (ValueError, RecursionError):  # also bytes that are not UTF-8
        yield None


def _parquet(path: pathlib.Path, columns: tuple[str, ...]) -> Iterator[Any]:
  import pyarrow
  from pyarrow import parquet

  try:
    file = parquet.ParquetFile(path)
  except (pyarrow.ArrowException, OSError) as error:
    raise ValueError(f"{path}: not a Parquet file: {error}") from None
  with file:
    found = file.schema_arrow.names
    for column in columns[:2]:
      if column not in found:
        raise _no_column(path, column, set(found))
    wanted = [column for column in columns if column in found]
    for group in range(file.num_row_groups):
      try:
        rows = _rows(file.read_row_group(group, columns=wanted))
      except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(
          f"{path}: row group {group} cannot be read: {error}"
        ) from None
      yield from rows


def _rows(table: Any) -> list[dict[str, Any]]:
  """The rows of a pyarrow table; 0.1 in single precision is 0.1."""
  import pyarrow

  for index, field in enumerate(table.schema):
    if pyarrow.types.is_float32(field.type):
      column = table.column(index).cast(pyarrow.string())
      column = column.cast(pyarrow.float64())
      table = table.set_column(index, field.name, column)
  return table.to_pylist()


def _no_column(path: pathlib.Path, column: str, found: set[str]) -> ValueError:
  return ValueError(
    f"{path}: no column {column!r}; the columns are {sorted(found)}"
  )


def _neighbours(path: pathlib.Path) -> str:
  if not path.parent.is_dir():
    return f"nor is there a folder {path.parent}"
  names = sorted(p.name for p in path.parent.iterdir() if p.suffix in SUFFIXES)
  return f"{path.parent} holds {names[:10] or 'no such files'}"
