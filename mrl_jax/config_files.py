"""A run's configuration on disk, and whether a run may go on under another."""

import dataclasses
import json
from typing import Any

from mrl_jax import config_error
from mrl_jax.config import Config
from mrl_jax.config_error import ConfigError

# Fields that may change when a run is continued.
RESUMABLE = frozenset(
  {
    "workdir",
    "rounds",
    "mesh",
    "compilation_cache",
    "coordinator",
    "processes",
    "process_id",
    "bucket",
    "executor",
    "shares",
    "offload",
    "exchange",
    "deadline",
    "cpu_devices",
    "save_every",
    "save_updates",
    "keep",
    "save_rollouts",
    "export",
    "progress",
    "verifier_workers",
  }
)


def to_dict(config: Config) -> dict[str, Any]:
  """The fields as JSON values."""
  return json.loads(json.dumps(dataclasses.asdict(config)))


def from_dict(values: dict[str, Any]) -> Config:
  """The inverse of `to_dict`; an unknown field is an error."""
  known = {f.name for f in dataclasses.fields(Config)}
  for name, value in values.items():
    if name not in known:
      raise ConfigError(name, value, "is not a field of this version")
  lists = {k: tuple(v) for k, v in values.items() if isinstance(v, list)}
  return Config(**{**values, **lists})


def check_resume(saved: Config, given: Config) -> None:
  """Refuses to continue a run under a configuration that differs.

  More rounds are welcome under a constant learning rate; any other schedule
  would have been another one from the start.
  """
  fixed = {"rounds"} if saved.lr_schedule != "constant" else set()
  for field in dataclasses.fields(Config):
    old, new = getattr(saved, field.name), getattr(given, field.name)
    if old != new and field.name not in RESUMABLE - fixed:
      raise ConfigError(
        field.name,
        new,
        "the run in --workdir was started with "
        f"{config_error.show(old)}; use that, or another --workdir",
      )
