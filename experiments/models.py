"""Where a policy's files are: a local directory, or a hub id to download."""

import dataclasses
import os
import pathlib
import re

import huggingface_hub

from mrl_jax import config as config_lib

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")


def located(config: config_lib.Config) -> config_lib.Config:
  """The configuration with absolute local paths of policies and potentials.

  Names are fixed first, so a downloaded policy keeps its own name and not
  the name of a cache folder.
  """
  paths = tuple(locate(path) for path in config.policies)
  potentials = tuple(
    path if path == "none" else os.path.abspath(os.path.expanduser(path))
    for path in config.potential
  )
  return dataclasses.replace(
    config, names=config.policy_names(), policies=paths, potential=potentials
  )


def locate(path: str, field: str = "policies") -> str:
  """The absolute directory of one model, downloaded if it is a hub id."""
  local = pathlib.Path(path).expanduser()
  if local.is_dir():
    return os.path.abspath(local)
  if not _HUB_ID.fullmatch(path) or local.exists():
    raise config_lib.ConfigError(
      field, path, "must be a directory or a hub id like org/name"
    )
  try:
    return huggingface_hub.snapshot_download(path, allow_patterns=_FILES)
  except Exception as error:
    raise config_lib.ConfigError(
      field,
      path,
      "is not a directory, and as a hub id it could not be downloaded: "
      f"{type(error).__name__}",
    ) from error
