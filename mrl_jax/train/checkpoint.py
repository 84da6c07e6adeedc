"""Checkpoints of a whole run: every policy's state, and the host's.

A checkpoint holds *everything* the rest of the run depends on: parameters,
optimiser states and counters on the device side, and on the host side the
next round (from which data position and sampling keys derive), the updates
made in it, the length of each log file, and whatever memories the recipes
keep. What a round has generated lies beside it on disk (see `spill.py`).
Orbax writes in the background and renames at the end, so a run killed while
saving continues from the checkpoint before.
"""

from collections.abc import Callable, Mapping
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from mrl_jax.parallel import processes
from mrl_jax.train import state as state_lib

_MEMORIES = "memories"
_STRIDE = 10**6  # more updates than a round has


def number(round_: int, update: int = 0) -> int:
  """Names the checkpoint before this update of this round."""
  return round_ * _STRIDE + update


def round_of(checkpoint: int) -> int:
  """The round in which a run goes on from a checkpoint."""
  return checkpoint // _STRIDE


class Checkpoints:
  """The checkpoints below one folder; a context manager.

  With several processes all use it alike, and all see the folder.

  Args:
    directory: the folder.
    keep: how many are kept.
    before: called by process 0 before one is begun, with the host's values
      and the round that the last complete one goes on with.
  """

  def __init__(
    self,
    directory: epath.PathLike,
    keep: int = 2,
    before: Callable[[Mapping[str, Any], int], None] = lambda *_: None,
  ):
    self._before = before
    options = ocp.CheckpointManagerOptions(
      max_to_keep=keep, enable_async_checkpointing=True
    )
    self._manager = ocp.CheckpointManager(
      epath.Path(directory).absolute(), options=options
    )

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, kind, *unused) -> None:
    # After a failure here the other processes do not wait with this one.
    if kind is None or processes.count() == 1:
      self.close()

  def latest(self) -> int | None:
    """The last complete checkpoint's number, or None."""
    return processes.agreed(lambda: max(self.all(), default=None))

  def needed(self) -> int:
    """The round that the last complete one goes on with."""
    return round_of(self.latest() or 0)

  def all(self) -> list[int]:
    """The numbers of all complete checkpoints, in order.

    The manager also counts those that it is still writing; their folders get
    their names at the end.
    """
    names = (path.name for path in self._manager.directory.iterdir())
    return sorted(int(name) for name in names if name.isdigit())

  def save(
    self,
    number_: int,
    states: Mapping[str, state_lib.TrainState],
    host: Mapping[str, Any],
    memories: Mapping[str, Mapping[str, Any]] | None = None,
  ) -> None:
    """Starts writing, unless it is there.

    Args:
      number_: names it.
      states: of the policies.
      host: JSON values.
      memories: NumPy arrays in nested dicts, of any shape; none empty.
    """
    needed = self.needed()
    processes.agreed(lambda: self._before(host, needed))
    if number_ == self._manager.latest_step():
      return
    items = {
      name: ocp.args.StandardSave(state._asdict())
      for name, state in states.items()
    }
    items["host"] = ocp.args.JsonSave(dict(host))
    there = {n: arrays for n, arrays in (memories or {}).items() if arrays}
    if there:
      items[_MEMORIES] = ocp.args.StandardSave(there)
    self._manager.save(number_, args=ocp.args.Composite(**items))

  def restore(
    self, number_: int, targets: Mapping[str, state_lib.TrainState]
  ) -> tuple[dict[str, state_lib.TrainState], dict[str, Any], dict[str, Any]]:
    """Reads states straight onto the shardings of `targets`.

    Returns the states, the host's JSON values and its arrays.

    Args:
      number_: one that was saved.
      targets: per policy, shapes and shardings (see `state.abstract`); the
        mesh may differ from the one that saved.
    """
    items = {
      name: ocp.args.StandardRestore(target._asdict())
      for name, target in targets.items()
    }
    items["host"] = ocp.args.JsonRestore()
    if (self._manager.directory / str(number_) / _MEMORIES).exists():
      items[_MEMORIES] = ocp.args.StandardRestore()
    found = self._manager.restore(number_, args=ocp.args.Composite(**items))
    states = {name: state_lib.TrainState(**found[name]) for name in targets}
    memories = found[_MEMORIES] if _MEMORIES in items else {}
    return states, found["host"], memories

  def wait(self) -> None:
    """Waits for what is being written."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits, and ends."""
    self.wait()
    self._manager.close()
