"""Where the policies of a run exchange records: memory, a folder, a bucket."""

import json
import pathlib

from etils import epath

from mrl_jax import config as config_lib
from mrl_jax.exchange import store


def make(config: config_lib.Config) -> store.Store:
  """The store that the flags name."""
  if config.exchange == "memory":
    return store.Memory()
  return store.Directory(
    _place(config.bucket or config.workdir, config.exchange)
  )


def folder(workdir: pathlib.Path) -> epath.Path:
  """The folder of a run that may be over; there may be none."""
  path = workdir / "config.json"
  config = json.loads(path.read_text()) if path.exists() else {}
  named, bucket = (config.get(name) or "" for name in ("exchange", "bucket"))
  return _place(bucket or workdir, "" if named == "memory" else named)


def _place(root: epath.PathLike, named: str) -> epath.Path:
  return epath.Path(named or epath.Path(root) / "exchange")
