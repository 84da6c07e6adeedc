"""Tasks read from JSON-lines and Parquet files of prompts and answers.

Only the columns that are asked for are read, and Parquet is read one row
group at a time, so a file is never in memory twice. A row that cannot be
used is dropped and counted by reason; a file that cannot be used at all is an
error that says what was found in its place.
"""

import collections
import decimal
import json
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from mrl_jax.tasks import dataset, verifiers
from mrl_jax.tasks import rubric as rubric_lib
from mrl_jax.tasks.dataset import Problem, Task, Verifier

SUFFIXES = (".jsonl", ".parquet")


class Report(NamedTuple):
  """How many rows a file had, how many are used, and why others are not."""

  rows: int
  kept: int
  dropped: dict[str, int]  # reason -> rows


class _Columns(NamedTuple):
  """The names of the columns that are asked for."""

  prompt: str
  answer: str
  id: str
  rubric: str | None = None

  @property
  def required(self) -> tuple[str, str]:
    return self.prompt, self.rubric or self.answer

  @property
  def optional(self) -> tuple[str, ...]:
    return (self.answer, self.id) if self.rubric else (self.id,)


def load(
  path: str | pathlib.Path,
  verifier: Verifier,
  *,
  prompt: str = "prompt",
  answer: str = "answer",
  id: str = "id",
  rubric: str = "rubric",
) -> tuple[Task, Report]:
  """Reads a task from `path`; `prompt`, `answer`, ... name its columns.

  The id column is optional; without it a row is `<file name>/<row>`. For the
  `rubric` verifier the answer is optional and the rubric is not; for any
  other the rubric is not read.

  Raises:
    FileNotFoundError: no such file.
    ValueError: a missing column, a repeated id, no usable row, or a rubric
      that names a function which is not there.
  """
  path = pathlib.Path(path)
  if path.suffix not in SUFFIXES:
    raise ValueError(f"{path}: the file must end in one of {SUFFIXES}")
  if not path.is_file():
    raise FileNotFoundError(f"{path}: no such file; {_neighbours(path)}")
  read = _parquet if path.suffix == ".parquet" else _jsonl
  problems, dropped, columns = {}, collections.Counter(), set()
  rows = 0
  weighed = verifier.check is rubric_lib.check
  names = _Columns(prompt, answer, id, rubric if weighed else None)
  for row in read(path, names):
    problem = _problem(row, f"{path.name}/{rows}", names)
    rows += 1
    if isinstance(row, dict):
      columns |= set(row)
    if isinstance(problem, str):
      dropped[problem] += 1
      continue
    if problem.id in problems:
      raise ValueError(f"{path}: id {problem.id!r} stands in two rows")
    problems[problem.id] = problem
  for column in names.required:
    if rows and columns and column not in columns:
      raise _no_column(path, column, columns)
  if not problems:
    raise ValueError(f"{path}: no usable row out of {rows}: {dict(dropped)}")
  order = list(problems.values())
  if weighed:
    _resolve(path, order)
  problem_at = dataset.indexed(order.__getitem__, len(order))
  task = Task(path.name, len(order), problem_at, verifier)
  return task, Report(rows, len(order), dict(dropped))


def _problem(row: Any, name: str, names: _Columns) -> Problem | str:
  """Returns the row as a problem, or the reason why it cannot be one."""
  if not isinstance(row, dict):
    return "not a JSON object"
  for column in names.required:
    if row.get(column) is None:
      return f"missing {column}"
  question, gold = row[names.prompt], row.get(names.answer)
  if not isinstance(question, str):
    return f"{names.prompt} is not text"
  if gold is None:
    gold = ""  # of a rubric
  elif not isinstance(gold, str):
    if not verifiers.is_number(gold):
      return _no_answer(gold, names.answer)
    gold = verifiers.written(gold)
  if not question.strip():
    return f"empty {names.prompt}"
  if not gold.strip() and names.rubric is None:
    return f"empty {names.answer}"
  key = row.get(names.id)
  if key is None:
    key = name
  elif isinstance(key, bool) or not isinstance(key, str | int) or key == "":
    return f"{names.id} is neither text nor an integer"
  problem = Problem(str(key), question, gold)
  columns = names.id, names.prompt, names.answer
  for field, text in zip(columns, problem, strict=False):
    if not is_unicode(text):
      return f"{field} is not valid Unicode"
  return problem if names.rubric is None else _weighed(problem, row, names)


def _no_answer(gold: Any, column: str) -> str:
  if isinstance(gold, float | decimal.Decimal):
    return f"{column} is not finite"
  return f"{column} is neither text nor a number"


def _weighed(problem: Problem, row: dict, names: _Columns) -> Problem | str:
  """The problem with its rubric, or what is wrong with that."""
  try:
    criteria = rubric_lib.read(row[names.rubric], problem.answer)
  except ValueError as error:
    return f"{names.rubric}: {error}"
  return problem._replace(extra={"rubric": criteria})


def _resolve(path: pathlib.Path, problems: list[Problem]) -> None:
  """Finds the functions that the rubrics name, once for all rows."""
  kinds = {c.kind for p in problems for c in p.extra["rubric"]}
  for kind in sorted(kind for kind in kinds if ":" in kind):
    try:
      verifiers.resolve(kind)
    except ValueError as error:
      raise ValueError(f"{path}: rubric: {error}") from None


def is_unicode(text: str) -> bool:
  """False for lone surrogates, which JSON can spell and no tokenizer take."""
  try:
    text.encode()
  except UnicodeEncodeError:
    return False
  return True


def _jsonl(path: pathlib.Path, names: _Columns) -> Iterator[Any]:
  del names  # a line is parsed whole
  with path.open("rb") as lines:
    for line in lines:
      if not line.strip():
        continue
      try:
        yield json.loads(line)
      except (ValueError, RecursionError):  # also bytes that are not UTF-8
        yield None


def _parquet(path: pathlib.Path, names: _Columns) -> Iterator[Any]:
  import pyarrow
  from pyarrow import parquet

  try:
    file = parquet.ParquetFile(path)
  except (pyarrow.ArrowException, OSError) as error:
    raise ValueError(f"{path}: not a Parquet file: {error}") from None
  with file:
    found = file.schema_arrow.names
    for column in names.required:
      if column not in found:
        raise _no_column(path, column, set(found))
    columns = (*names.required, *names.optional)
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
