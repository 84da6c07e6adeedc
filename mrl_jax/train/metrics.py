"""What a run writes down: five JSON-lines files and TensorBoard events.

`metrics.jsonl` (a line per round), `updates.jsonl` (a line per update),
`rollouts.jsonl` and `exchange.jsonl` (which of the peers' records were used,
and why the others were not) hold only what the seed determines, so two runs
of one configuration can be compared byte by byte; everything that a clock or
an allocator measures goes to `timings.jsonl` instead. The files are cut back
to the byte offsets that a checkpoint recorded when a run resumes, so a run
that was killed and continued leaves the same files as one that never stopped.
TensorBoard cannot be cut: it is told which rounds to forget.
"""

import json
import math
import os
import pathlib
import time
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

import numpy as np
import tensorboardX

FILES = ("metrics", "timings", "rollouts", "exchange", "updates")


class Log:
  """Appends the records of one run to the files of its working directory.

  Only one process of a multi-host run writes: with `writer=False` every
  method does nothing but remember the round.

  Args:
    workdir: A local directory, made if it is not there.
    state: What `state()` returned when the checkpoint was made; the files are
      cut back to it. None starts afresh and empties them.
    writer: Whether this process writes.

  Raises:
    ValueError: The state and the files do not belong together.
  """

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    *,
    state: Mapping[str, int] | None = None,
    writer: bool = True,
  ) -> None:
    if "://" in str(workdir):
      raise ValueError(f"workdir: {workdir}: logs need a local directory.")
    self._round = -1 if state is None else _entry(state, "round")
    self._purge_step = self._round + 1
    self._workdir = pathlib.Path(workdir)
    self._files: dict[str, BinaryIO] = {}
    self._boards: dict[str, tensorboardX.SummaryWriter] = {}
    self._writer = writer
    if not writer:
      return
    self._workdir.mkdir(parents=True, exist_ok=True)
    paths = {name: self._workdir / f"{name}.jsonl" for name in FILES}
    offsets = {n: 0 if state is None else _entry(state, n) for n in FILES}
    for name in FILES:  # check all of them before cutting any
      _check(paths[name], offsets[name])
    for name in FILES:
      self._files[name] = paths[name].open("ab")
      self._files[name].truncate(offsets[name])

  def metrics(self, policy: str, round: int, values: Mapping[str, Any]) -> None:
    """Appends one policy's metrics of one round: no times, no memory."""
    self._round = max(self._round, round)
    self._append("metrics", [_record(policy, round, values)])
    self._scalars(policy, round, values)

  def timings(self, policy: str, round: int, values: Mapping[str, Any]) -> None:
    """Appends what differs from run to run: seconds, tokens/s, bytes."""
    self._append("timings", [_record(policy, round, values)])
    self._scalars(policy, round, {f"time/{k}": v for k, v in values.items()})

  def updates(
    self, policy: str, round: int, values: Iterable[Mapping[str, Any]]
  ) -> None:
    """Appends one line per update of a policy."""
    self._append("updates", (_record(policy, round, v) for v in values))

  def rollouts(self, records: Iterable[Mapping[str, Any]]) -> None:
    """Appends one line per completion."""
    if self._writer:
      self._append("rollouts", records)

  def exchange(self, records: Iterable[Mapping[str, Any]]) -> None:
    """Appends one line per peer that a policy listened to."""
    if self._writer:
      self._append("exchange", records)

  def state(self) -> dict[str, int]:
    """Makes what was written durable; returns what resuming needs."""
    state = {"round": self._round}
    for name in FILES:
      state[name] = self._sync(name) if self._writer else 0
    for board in self._boards.values():
      board.flush()
    return state

  def close(self) -> None:
    for file in self._files.values():
      file.close()
    for board in self._boards.values():
      board.close()

  def __enter__(self) -> "Log":
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()

  def _append(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
    if not self._writer:
      return
    file = self._files[name]
    for record in records:  # a stage's rollouts may not fit in memory
      file.write(_line(record))
    file.flush()  # so that the file can be followed while the run goes on

  def _sync(self, name: str) -> int:
    file = self._files[name]
    file.flush()
    os.fsync(file.fileno())
    return os.fstat(file.fileno()).st_size

  def _scalars(
    self, policy: str, round: int, values: Mapping[str, Any]
  ) -> None:
    """Sends numbers to TensorBoard, one run per policy so that they overlay."""
    if not self._writer:
      return
    if policy not in self._boards:
      self._boards[policy] = tensorboardX.SummaryWriter(
        str(self._workdir / "tensorboard" / policy),
        purge_step=self._purge_step,
        max_queue=1000,
        # A file is named by the second it was opened in: without this a run
        # that resumes within the same second overwrites its own events.
        filename_suffix=f".{time.time_ns()}",
      )
    for key in sorted(values):
      value = _plain(values[key])
      if isinstance(value, int | float):
        tag = key.replace("@", "_at_")
        self._boards[policy].add_scalar(tag, value, round)


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Returns a file's records; a last line still being written is left out.

  Raises:
    ValueError: A whole line is not a JSON object.
  """
  records = []
  lines = pathlib.Path(path).read_bytes().split(b"\n")
  for number, line in enumerate(lines, start=1):
    try:
      if line.strip():
        records.append(json.loads(line))
    except ValueError as error:
      if number == len(lines):  # no newline after it: cut short
        break
      raise ValueError(f"{path}:{number}: not JSON: {error}") from None
  return records


def _entry(state: Mapping[str, int], name: str) -> int:
  if name not in state:
    raise ValueError(f"log state: {name!r} is missing, got {sorted(state)}.")
  return int(state[name])


def _check(path: pathlib.Path, offset: int) -> None:
  """Refuses to resume onto a file that is not the one checkpointed."""
  size = path.stat().st_size if path.exists() else 0
  if size < offset:
    raise ValueError(
      f"{path}: has {size} bytes but the checkpoint recorded {offset}: the "
      "file was changed. Restore it, or start in a new workdir."
    )
  if offset:
    with open(path, "rb") as file:
      file.seek(offset - 1)
      if file.read(1) != b"\n":
        raise ValueError(
          f"{path}: no line ends at byte {offset}, where the checkpoint was "
          "made: the file was changed. Restore it, or start in a new workdir."
        )


def _record(
  policy: str, round: int, values: Mapping[str, Any]
) -> dict[str, Any]:
  reserved = {"policy", "round"} & set(values)
  if reserved:
    raise ValueError(f"values: {sorted(reserved)} are the record's own keys.")
  return {"policy": policy, "round": round, **values}


def _line(record: Mapping[str, Any]) -> bytes:
  """Sorted keys and the shortest digits that read back as the same float."""
  text = json.dumps(_plain(record), sort_keys=True, allow_nan=False)
  return text.encode("ascii") + b"\n"


def _plain(value: Any) -> Any:
  """Turns arrays and NumPy scalars into JSON's types, NaN and inf into None."""
  if isinstance(value, Mapping):
    return {str(key): _plain(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(item) for item in value]
  if value is None or isinstance(value, str | bool | int):
    return value
  if isinstance(value, float):
    return float(value) if math.isfinite(value) else None
  array = np.asarray(value)
  if array.dtype.kind not in "biuf":  # bfloat16 and the like
    array = array.astype(np.float64)
  return _plain(array.tolist())
