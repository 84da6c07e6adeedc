"""One run over several processes: what they agree on and send each other.

On a slice of several hosts every host runs the same program on the same
data, and a mesh spans the devices of all. Whatever could differ between two
hosts (the clock, a signal, what lies on a disk, a verifier that was too slow)
is found by one of them and told to the others, at points that all reach in
the same order, so all take the same steps. A failure is told the same way: it
is raised everywhere. With one process each function is the plain thing.
"""

import hashlib
import os
import pathlib
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")

AUTO = "auto"  # the coordinator that the machine itself knows
# Seconds after which a silent process counts as dead, and after which one
# that ended alone ends the others.
_HEARTBEAT, _SHUTDOWN = 60, 15
_LEAST, _MOST = 1 << 10, 1 << 24  # bytes sent at a time, a power of two


def start(coordinator: str, number: int = 0, this: int = -1) -> None:
  """Joins the other processes; nothing may have touched a device before.

  Args:
    coordinator: HOST:PORT of process 0, or auto on a TPU pod.
    number: of processes.
    this: which of them this is.
  """
  # Its handler would take the SIGTERM that asks a run to stop.
  jax.config.update("jax_enable_preemption_service", False)
  limits = {
    "heartbeat_timeout_seconds": _HEARTBEAT,
    "shutdown_timeout_seconds": _SHUTDOWN,
  }
  if coordinator == AUTO:
    jax.distributed.initialize(**limits)
  else:
    jax.distributed.initialize(
      coordinator,
      number,
      this,
      cluster_detection_method="deactivate",
      **limits,
    )


def together(program: Callable[[], Any]) -> None:
  """Runs a program that calls `start`; if it fails here it ends everywhere.

  The others may be waiting for this process and threads of this one for
  them, so it leaves without waiting for its threads. What has failed in all
  alike ends with its own exit status.
  """
  try:
    program()
  except BaseException as error:
    alone = not jax.distributed.is_initialized()
    leaving = isinstance(error, SystemExit)
    if alone or (leaving and not error.code):
      raise
    if not leaving:
      traceback.print_exc()
    status = error.code if leaving and isinstance(error.code, int) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    jax.distributed.shutdown()  # ends all, unless all are here
    os._exit(status)


def count() -> int:
  """How many processes there are."""
  return jax.process_count()


def index() -> int:
  """Which of them this is."""
  return jax.process_index()


def leads() -> bool:
  """Whether this is the process that writes files and has the last word."""
  return index() == 0


def barrier(name: str) -> None:
  """Waits until every process is here."""
  if count() > 1:
    multihost_utils.sync_global_devices(name)


def agreed(find: Callable[[], T]) -> T:
  """What process 0 finds; the others do not look. It can be pickled."""
  if count() == 1:
    return find()
  mine = _attempt(find) if leads() else None
  data = _first(mine.data if mine else b"")
  return _opened(mine or _read(data))


def gathered(find: Callable[[], T]) -> list[T]:
  """What each process finds, in their order. It can be pickled."""
  if count() == 1:
    return [find()]
  mine = _attempt(find)
  said = [_read(data) for data in _all(mine.data)]
  said[index()] = mine
  return [_opened(one) for one in said]


def some(flag: bool) -> bool:
  """Whether it is true of any process."""
  return any(gathered(lambda: flag))


def divided(
  items: Sequence[Any],
  work: Callable[[Sequence[Any]], Sequence[T]],
  group: int = 1,
) -> list[T]:
  """`work(items)` of which each process does a share; all have all of it.

  Args:
    items: the same in every process.
    work: gives a result for each item that it is given.
    group: so many items in turn stay together.
  """
  groups = -(-len(items) // group)
  start, stop = (groups * (index() + n) // count() * group for n in (0, 1))
  parts = gathered(lambda: list(work(items[start:stop])))
  return [result for part in parts for result in part]


def fetch(tree: Any) -> Any:
  """Device arrays as NumPy arrays, whole in every process."""
  if count() == 1:
    return jax.device_get(tree)
  return jax.tree.map(_whole, tree)


def _whole(leaf: Any) -> Any:
  if not isinstance(leaf, jax.Array):
    return leaf
  if leaf.is_fully_addressable or leaf.is_fully_replicated:
    return np.asarray(leaf)
  return multihost_utils.process_allgather(leaf, tiled=True)


def place(tree: Any, sharding: jax.sharding.Sharding) -> Any:
  """NumPy arrays, the same in every process, on the devices of all."""
  if count() == 1:
    return jax.device_put(tree, sharding)
  # `device_put` would send every array around, to see that it is the same.
  return jax.tree.map(
    lambda leaf: jax.make_array_from_callback(
      np.shape(leaf), sharding, lambda part: np.asarray(leaf)[part]
    ),
    tree,
  )


def level(folder: pathlib.Path) -> None:
  """Makes a folder's files those that process 0 has, each on its own disk.

  A machine that is new, or was killed a moment earlier, gets what it lacks;
  what process 0 has not is removed.
  """
  if count() == 1:
    return
  found = gathered(lambda: _digests(folder))
  for name in sorted(found[0]):  # sent in the same order by all
    if any(other.get(name) != found[0][name] for other in found):
      _send(folder / name, found[0][name][0])
  for name in found[index()].keys() - found[0].keys():
    (folder / name).unlink()


def _send(path: pathlib.Path, size: int) -> None:
  """Process 0's file to all, piece by piece: it may be a large one."""
  with open(path, "rb" if leads() else "wb") as file:
    for _ in range(0, size, _MOST):
      piece = agreed(lambda: file.read(_MOST))
      if not leads():
        file.write(piece)


def _digests(folder: pathlib.Path) -> dict[str, tuple[int, str]]:
  """The size of each file, and what tells it from any other."""
  found = {}
  for path in folder.iterdir():
    with open(path, "rb") as file:
      digest = hashlib.file_digest(file, "sha256").hexdigest()
    found[path.name] = path.stat().st_size, digest
  return found


class _Said(NamedTuple):
  """A value or an error, and the bytes that say it."""

  value: Any
  error: Exception | None
  data: bytes


def _attempt(find: Callable[[], Any]) -> _Said:
  try:
    value = find()
    return _Said(value, None, pickle.dumps((value, None)))
  except Exception as error:
    return _Said(None, error, pickle.dumps((None, _portable(error))))


def _portable(error: Exception) -> Exception:
  """The error, or one that says the same and can be sent."""
  try:
    pickle.loads(pickle.dumps(error))
  except Exception:
    return RuntimeError(f"{type(error).__name__}: {error}")
  return error


def _read(data: bytes) -> _Said:
  return _Said(*pickle.loads(data), data)


def _opened(said: _Said) -> Any:
  if said.error is not None:
    raise said.error
  return said.value


def _first(data: bytes) -> bytes:
  """Process 0's bytes."""
  send = multihost_utils.broadcast_one_to_all
  size = int(send(np.asarray(len(data), np.int32)))
  parts = []
  for begin in range(0, size, _MOST):
    length = min(_MOST, size - begin)
    part = send(_padded(data[begin : begin + _MOST], length))
    parts.append(part[:length].tobytes())
  return b"".join(parts)


def _all(data: bytes) -> list[bytes]:
  """Each process's bytes."""
  send = multihost_utils.process_allgather
  sizes = send(np.asarray(len(data), np.int32)).reshape(-1).tolist()
  rows = send(_padded(data, max(sizes)))
  return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def _padded(data: bytes, length: int) -> np.ndarray:
  """[W] u8, of one of few widths: each is a program."""
  width = max(_LEAST, 1 << (length - 1).bit_length())
  return np.frombuffer(data.ljust(width, b"\0"), np.uint8)
