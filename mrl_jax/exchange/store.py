"""Where shipments lie between the policy that publishes and its peers.

A store maps a policy and a round to bytes, and each name is written once:
the same bytes again change nothing, other bytes are a conflict. So readers
never see half a shipment, and never two versions of one. `Memory` serves the
threads of one process; `Directory` any processes that share a folder or a
bucket, and lets people read afterwards what was said.
"""

import contextlib
import os
import re
import threading
import urllib.parse
import uuid
from typing import Protocol, runtime_checkable

from etils import epath


class Conflict(ValueError):
  """Other content was published under the same policy and round."""


@runtime_checkable
class Store(Protocol):
  """Shipments by policy and round; safe to use from several threads.

  An `OSError` of any method means that the store, or what lies in it, cannot
  be reached.
  """

  def put(self, policy: str, round: int, data: bytes) -> bool:
    """Publishes; False if the same was published already.

    Raises:
      Conflict: Something else was.
    """

  def get(self, policy: str, round: int) -> bytes | None:
    """What was published, or None if nothing was, or it is gone."""

  def rounds(self, policy: str) -> list[int]:
    """The rounds in which a policy published, ascending."""

  def policies(self) -> list[str]:
    """Whoever published anything, sorted."""

  def forget(self, from_round: int, policy: str | None = None) -> None:
    """Removes shipments of this round and later ones: a run repeats them.

    Args:
      from_round: the round with which the run goes on.
      policy: whose; None is everybody's.
    """


class Memory:
  """A store in the memory of this process."""

  def __init__(self):
    self._lock = threading.Lock()
    self._held: dict[tuple[str, int], bytes] = {}

  def put(self, policy: str, round: int, data: bytes) -> bool:
    _check(policy, round)
    with self._lock:
      held = self._held.get((policy, round))
      if held is None:
        self._held[policy, round] = data
        return True
    return _same(held, data, policy, round)

  def get(self, policy: str, round: int) -> bytes | None:
    _check(policy, round)
    with self._lock:
      return self._held.get((policy, round))

  def rounds(self, policy: str) -> list[int]:
    with self._lock:
      return sorted(number for name, number in self._held if name == policy)

  def policies(self) -> list[str]:
    with self._lock:
      return sorted({name for name, _ in self._held})

  def forget(self, from_round: int, policy: str | None = None) -> None:
    with self._lock:
      for name, number in list(self._held):
        if number >= from_round and policy in (None, name):
          del self._held[name, number]


class Directory:
  """A store in a folder: ROOT/<policy>/<round>.jsonl.

  A shipment is written under a temporary name and then given its own, so a
  process that is killed leaves at most a temporary file, which nobody reads.
  On local disks not even two processes can publish under one name; where the
  file system has no hard links (buckets), a policy must be published by one
  process.

  Args:
    path: anything that `etils.epath` opens; made when first published to.
  """

  def __init__(self, path: epath.PathLike):
    self._root = epath.Path(path)
    self._lock = threading.Lock()

  def put(self, policy: str, round: int, data: bytes) -> bool:
    target = self._path(policy, round)
    held = self.get(policy, round)
    if held is not None:
      return _same(held, data, policy, round)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp"
    try:
      temporary.write_bytes(data)
      with self._lock:
        _publish(temporary, target)
    except FileExistsError:  # somebody was quicker
      return _same(target.read_bytes(), data, policy, round)
    finally:
      with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)
    return True

  def get(self, policy: str, round: int) -> bytes | None:
    try:
      return self._path(policy, round).read_bytes()
    except FileNotFoundError:
      return None

  def rounds(self, policy: str) -> list[int]:
    return sorted(
      number
      for path in _listed(self._folder(policy))
      if (number := _number(path.name)) is not None
    )

  def policies(self) -> list[str]:
    found = (_unquote(path.name) for path in _listed(self._root))
    return sorted(name for name in found if name and self.rounds(name))

  def forget(self, from_round: int, policy: str | None = None) -> None:
    folders = _listed(self._root) if policy is None else [self._folder(policy)]
    for folder in folders:
      for path in _listed(folder):
        number = _number(path.name)
        left = path.name.startswith(".") and path.name.endswith(".tmp")
        if left or (number is not None and number >= from_round):
          path.unlink(missing_ok=True)

  def _folder(self, policy: str) -> epath.Path:
    _check(policy, 0)
    return self._root / _quote(policy)

  def _path(self, policy: str, round: int) -> epath.Path:
    _check(policy, round)
    return self._folder(policy) / _name(round)


def _publish(temporary: epath.Path, target: epath.Path) -> None:
  """Gives the file its name; FileExistsError if the name is taken."""
  try:
    os.link(temporary, target)  # unlike a rename, never replaces
  except FileExistsError:
    raise
  except OSError:  # no hard links here
    temporary.rename(target)


def _listed(folder: epath.Path) -> list[epath.Path]:
  try:
    return list(folder.iterdir())
  except (FileNotFoundError, NotADirectoryError):
    return []


def _name(round: int) -> str:
  return f"{round:06d}.jsonl"


def _number(name: str) -> int | None:
  """The round of a shipment's file; None for any other file."""
  found = re.fullmatch(r"([0-9]{6,18})\.jsonl", name)
  return int(found[1]) if found and _name(int(found[1])) == name else None


def _quote(policy: str) -> str:
  """A file name: not hidden, not "..", nothing that a shell would expand."""
  quoted = urllib.parse.quote(policy, safe="", errors="surrogatepass")
  return quoted.replace(".", "%2E").replace("~", "%7E")


def _unquote(name: str) -> str | None:
  try:
    policy = urllib.parse.unquote(name, errors="surrogatepass")
  except UnicodeDecodeError:
    return None
  return policy if _quote(policy) == name else None


def _check(policy: str, round: int) -> None:
  if not policy:
    raise ValueError(f"policy: {policy!r}: must not be empty.")
  if round < 0:
    raise ValueError(f"round: {round}: must be at least 0.")


def _same(held: bytes, data: bytes, policy: str, round: int) -> bool:
  if held != data:
    raise Conflict(
      f"policy {policy!r}, round {round}: published already, with other "
      f"content ({len(held)} bytes, now {len(data)})."
    )
  return False
