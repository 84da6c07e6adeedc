"""What a configuration must satisfy, each failure as one error.

`check` takes the `Config` it is called from (see `config.py`), so a value
that cannot work never leaves the constructor.
"""

import dataclasses
from typing import Any

from mrl_jax import config_methods
from mrl_jax.config_error import ConfigError


def check(config: Any) -> None:
  """Raises `ConfigError` for the first thing that is wrong."""
  _check_names(config)
  _check_numbers(config)
  _check_policies(config)
  config_methods.check(config)
  _check_stage(config)
  _check_division(config)


def _check_names(config: Any) -> None:
  for field in dataclasses.fields(config):
    names = field.metadata["names"]
    if names is None:
      continue
    value = getattr(config, field.name)
    items = value if isinstance(value, tuple) else (value,)
    if field.name == "recipe":
      items = [part for item in items for part in item.split("+")]
    for item in items:
      if item not in names:
        raise ConfigError(field.name, value, f"allowed: {', '.join(names)}")


_LEAST = {
  "prompt_limit": 1,
  "completion_limit": 1,
  "rounds": 1,
  "prompts": 1,
  "updates": 1,
  "part": 0,
  "anchor_every": 0,
  "save_updates": 0,
  "microbatches": 1,
  "length_buckets": 0,
  "rows": 0,
  "top_k": 0,
  "clip_low": 0.0,
  "clip_high": 0.0,
  "correction_low": 0.0,
  "correction_high": 0.0,
  "kl_coefficient": 0.0,
  "lr_warmup": 0,
  "weight_decay": 0.0,
  "clip_norm": 0.0,
  "cpu_devices": 0,
  "staleness": 0,
  "deadline": 0.0,
  "peer_samples": 0,
  "rescue_weight": 0.0,
  "rescue_samples": 1,
  "novelty_weight": 0.0,
  "novelty_memory": 0,
  "novelty_prompts": 1,
  "regenerate_slots": 1,
  "regenerate_warmup": 0,
  "regenerate_gap": 1,
  "regenerate_cuts": 2,
  "regenerate_queue": 1,
  "regenerate_depth": 1,
  "shaping_alpha": 0.0,
  "replan_every": 0,
  "save_every": 0,
  "keep": 1,
  "verifier_workers": 1,
}


def _check_numbers(config: Any) -> None:
  for name, least in _LEAST.items():
    value = getattr(config, name)
    if not value >= least:
      raise ConfigError(name, value, f"must be at least {least}")
  if any(number < 2 for number in config.samples):
    raise ConfigError(
      "samples",
      config.samples,
      "must be at least 2 (a group's baseline needs company)",
    )
  if config.staleness and config.exchange == "memory":
    raise ConfigError(
      "staleness",
      config.staleness,
      "needs --exchange=FOLDER: a run that resumes reads earlier rounds again",
    )
  if config.xgrpo_mix != -1 and not 0 <= config.xgrpo_mix <= 1:
    raise ConfigError("xgrpo_mix", config.xgrpo_mix, "must be in [0, 1] or -1")
  for name in ("temperature", "verifier_deadline", "peer_cap"):
    if not getattr(config, name) > 0:
      raise ConfigError(name, getattr(config, name), "must be above 0")
  if not 0 < config.top_p <= 1:
    raise ConfigError("top_p", config.top_p, "must be in (0, 1]")
  if config.clip_low > 1:
    raise ConfigError("clip_low", config.clip_low, "must be in [0, 1]")
  if not config.peer_dual_clip > 1:
    raise ConfigError(
      "peer_dual_clip", config.peer_dual_clip, "must be above 1"
    )
  if config.dual_clip and config.dual_clip <= 1:
    raise ConfigError("dual_clip", config.dual_clip, "must be 0 or above 1")
  for name in ("b1", "b2"):
    if not 0 <= getattr(config, name) < 1:
      raise ConfigError(name, getattr(config, name), "must be in [0, 1)")
  if any(not rate >= 0 for rate in config.lr):
    raise ConfigError("lr", config.lr, "must be at least 0")
  mesh = config.mesh
  bad = len(mesh) != 3 or mesh.count(-1) > 1
  if bad or any(size < 1 and size != -1 for size in mesh):
    raise ConfigError(
      "mesh", mesh, "must be data,fsdp,tensor, at most one of them -1"
    )


def _check_policies(config: Any) -> None:
  count = len(config.policies)
  if not config.workdir:
    raise ConfigError("workdir", "", "name the folder of the run")
  if not count:
    raise ConfigError("policies", "", "name at least one model directory")
  if config.names and len(config.names) != count:
    raise ConfigError("names", config.names, f"must be {count} names")
  names = config.policy_names()
  if len(set(names)) != count or not all(names):
    raise ConfigError("names", names, "must be unique; give them explicitly")
  taken = {"host", "memories"} & set(names)  # of a checkpoint's other parts
  if taken:
    raise ConfigError("names", names, f"no policy may be called {min(taken)}")
  for name in ("recipe", "loss", "lr", "samples"):
    value = getattr(config, name)
    if len(value) not in (1, count):
      raise ConfigError(name, value, f"must be 1 value or {count}, one each")
  _check_shares(config, count)
  _check_processes(config)


def _check_shares(config: Any, count: int) -> None:
  if config.shares and len(config.shares) != count:
    raise ConfigError("shares", config.shares, f"must be {count} numbers")
  if any(share < 1 for share in config.shares):
    raise ConfigError("shares", config.shares, "must be at least 1 each")
  if config.executor == "inline" and config.replan_every:
    raise ConfigError(
      "replan_every", config.replan_every, "needs --executor=partition"
    )
  if config.executor == "partition" and config.offload:
    raise ConfigError(
      "offload", "true", "needs --executor=inline: no state is idle"
    )


def _check_processes(config: Any) -> None:
  count, number, first = config.processes, config.process_id, config.coordinator
  if first and first != "auto" and not first.rpartition(":")[2].isdecimal():
    raise ConfigError("coordinator", first, "must be HOST:PORT or auto")
  alone = first in ("", "auto")
  if alone and count:
    raise ConfigError("processes", count, "needs --coordinator=HOST:PORT")
  if alone and number != -1:
    raise ConfigError("process_id", number, "needs --coordinator=HOST:PORT")
  if not alone and count < 1:
    raise ConfigError("processes", count, "must be at least 1")
  if not alone and not 0 <= number < count:
    raise ConfigError("process_id", number, f"must be in [0, {count})")
  if first and config.executor == "partition":
    raise ConfigError(
      "executor",
      config.executor,
      "must be inline with --coordinator: processes take the same steps",
    )


def _check_stage(config: Any) -> None:
  if config.part and config.prompts % config.part:
    raise ConfigError(
      "part", config.part, f"must divide --prompts={config.prompts}"
    )
  if config.anchor_every and not (
    config.rescore or config.correction != "none"
  ):
    raise ConfigError(
      "anchor_every",
      config.anchor_every,
      "needs --rescore or --correction: nothing is compared otherwise",
    )
  if config.drop_degenerate and (
    config.kl_coefficient or config.entropy_coefficient
  ):
    raise ConfigError(
      "drop_degenerate",
      "true",
      "needs --kl_coefficient=0 and --entropy_coefficient=0: those terms "
      "learn from every group",
    )


def _check_division(config: Any) -> None:
  if config.prompts % config.updates:
    raise ConfigError(
      "updates",
      config.updates,
      f"must divide --prompts={config.prompts}: a group is never split",
    )
  if config.length_buckets and config.microbatches == 1:
    raise ConfigError("length_buckets", "true", "needs --microbatches above 1")
  prompts = config.prompts // config.updates
  if prompts % config.microbatches:
    raise ConfigError(
      "microbatches",
      config.microbatches,
      f"must divide the {prompts} prompts of an update "
      "(--prompts / --updates): a group is never split",
    )
