"""A copy of a run's files where machines cannot lose them.

A machine may be taken away at any time, with its disk. So checkpoints are
written below a folder or URL that outlives it, and before one is begun, what
it needs of the local files is copied there too: how the logs have grown, in
pieces that are named by where they begin, and what the round that is not over
has on disk. A machine that does not hold the run's latest files takes them
from there. Only process 0 works with a bucket.
"""

import pathlib
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from etils import epath

from mrl_jax.train import metrics

_OWNER = "owner"  # names the machine and start that wrote last
_SETTINGS = ("config.json", "run.flags")
_PIECE = 1 << 24  # bytes read at a time


def checkpoints(bucket: str, workdir: pathlib.Path) -> epath.Path:
  """The folder of a run's checkpoints, which all its processes must see."""
  return epath.Path(bucket or workdir) / "checkpoints"


class Bucket:
  """The files of one working directory, below one folder or URL."""

  def __init__(self, root: epath.PathLike, workdir: pathlib.Path):
    self._root = epath.Path(root)
    self._workdir = workdir
    self._copied: dict[str, int] = {}  # bytes, by log
    self._seen: set[tuple[str, int, int]] = set()  # files of rounds

  def fetch(self) -> bool:
    """Brings the run that is there, unless its latest files are here.

    Returns whether files were copied.
    """
    last, mine = self._root / _OWNER, self._workdir / _OWNER
    there = last.read_text() if last.exists() else None
    if there is not None and mine.exists() and mine.read_text() == there:
      return False
    self._workdir.mkdir(parents=True, exist_ok=True)
    if there is not None:
      for name in _SETTINGS:
        _write(_read(self._root / name), epath.Path(self._workdir / name))
      for name in metrics.FILES:
        pieces = (path for _, path in self._pieces(name))
        data = (part for path in pieces for part in _read(path))
        _write(data, epath.Path(self._workdir / f"{name}.jsonl"))
      shutil.rmtree(self._workdir / "rounds", ignore_errors=True)
      _copy(self._root / "rounds", epath.Path(self._workdir / "rounds"))
    return there is not None

  def claim(self, log: Mapping[str, int] | None) -> None:
    """Takes over: this machine goes on with the run, or begins one.

    Args:
      log: lengths of the logs that the run goes on from; None begins.
    """
    for name in metrics.FILES:
      end = 0
      for begin, path in self._pieces(name):
        size = path.stat().length
        if log is None or begin != end or end + size > log[name]:
          path.unlink()  # of a checkpoint that was never complete
        else:
          end += size
      self._copied[name] = end
    for name in _SETTINGS:
      _write(_read(epath.Path(self._workdir / name)), self._root / name)
    # Last, and here first: a machine that dies in between owns nothing.
    token = [uuid.uuid4().hex.encode()]
    _write(token, epath.Path(self._workdir / _OWNER))
    _write(token, self._root / _OWNER)

  def push(self, host: Mapping[str, Any], needed: int) -> None:
    """Copies what a checkpoint with these values of the host needs.

    Args:
      host: with the lengths of the logs and the cursor.
      needed: the round that the last complete checkpoint goes on with.
    """
    for name in metrics.FILES:
      begin, end = self._copied[name], host["log"][name]
      if begin < end:
        source = epath.Path(self._workdir / f"{name}.jsonl")
        target = self._folder(name) / f"{begin:015d}"
        _write(_read(source, begin, end), target)
        self._copied[name] = end
    number = host["cursor"]["round"]
    self._push_round(self._workdir / "rounds" / str(number))
    for path in _listed(self._root / "rounds"):
      if path.name not in (str(number), str(needed)):
        path.rmtree()

  def _push_round(self, folder: pathlib.Path) -> None:
    for path in sorted(folder.rglob("*")):
      if path.is_file():
        status, name = path.stat(), str(path.relative_to(self._workdir))
        key = (name, status.st_mtime_ns, status.st_size)
        if key not in self._seen:
          _write(_read(epath.Path(path)), self._root / name)
          self._seen.add(key)

  def finish(self) -> None:
    """Copies the exported policies, and removes what no one needs now."""
    _copy(epath.Path(self._workdir / "export"), self._root / "export")
    if (self._root / "rounds").exists():
      (self._root / "rounds").rmtree()

  def _folder(self, name: str) -> epath.Path:
    return self._root / "logs" / name

  def _pieces(self, name: str) -> list[tuple[int, epath.Path]]:
    """Where each piece of a log begins, in order."""
    found = _listed(self._folder(name))
    named = [path for path in found if re.fullmatch(r"\d{15}", path.name)]
    return sorted((int(path.name), path) for path in named)


def _listed(folder: epath.Path) -> list[epath.Path]:
  return list(folder.iterdir()) if folder.exists() else []


def _read(
  path: epath.Path, begin: int = 0, end: int | None = None
) -> Iterator[bytes]:
  with path.open("rb") as file:
    file.seek(begin)
    while end is None or begin < end:
      size = _PIECE if end is None else min(_PIECE, end - begin)
      data = file.read(size)
      if not data:
        return
      begin += len(data)
      yield data


def _write(data: Iterable[bytes], path: epath.Path) -> None:
  """A file appears whole or not at all."""
  path.parent.mkdir(parents=True, exist_ok=True)
  new = path.parent / f".{path.name}.partial"
  with new.open("wb") as file:
    for part in data:
      file.write(part)
  new.replace(path)


def _copy(source: epath.Path, target: epath.Path) -> None:
  """All files below a folder, if there is one."""
  for path in _listed(source):
    if path.is_dir():
      _copy(path, target / path.name)
    elif not path.name.startswith("."):
      _write(_read(path), target / path.name)
