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
  return store.Directory(_place(pathlib.Path(config.workdir), config.exchange))


def folder(workdir: pathlib.Path) -> epath.Path:
  """The folder of a run that may be over; there may be none."""
  path = workdir / "config.json"
  named = json.loads(path.read_text()).get("exchange") if path.exists() else ""
  return _place(workdir, "" if named in (None, "memory") else named)


def _place(workdir: pathlib.Path, named: str) -> epath.Path:
  return epath.Path(named or workdir / "exchange")
