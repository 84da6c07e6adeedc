"""What the flags of the methods must satisfy: recipes and their parts.

Called by `config_checks.check`, with the `Config` that is being made.
"""

from typing import Any

from mrl_jax.config_error import ConfigError


def check(config: Any) -> None:
  """Raises `ConfigError` for the first thing that is wrong."""
  for parts in _parts(config):
    _check_recipe(config, parts)
  _check_veto(config)
  _check_explore(config)
  _check_shaping(config)


_PROBES = ("prp", "xgrpo", "sgt")


def _check_recipe(config: Any, parts: list[str]) -> None:
  probes = [part for part in parts if part in _PROBES]
  why = ""
  if len(set(parts)) < len(parts):
    why = "names a part twice"
  elif {"grpo", "dr_grpo"} <= set(parts):
    why = "grpo or dr_grpo, not both"
  elif {"prp", "xgrpo"} <= set(parts):
    why = "prp's groups hold the peers' rewards already; xgrpo adds nothing"
  elif config.process != "none" and {"prp", "xgrpo"} & set(parts):
    why = f"--process={config.process} compares own samples; no prp, no xgrpo"
  elif "extra" in parts and {"novelty", "regenerate"} & set(parts):
    why = "extra is novelty and regenerate already"
  elif probes and len(config.policies) < 2:
    why = f"{probes[0]} learns from peers; name more than one of --policies"
  if why:
    raise ConfigError("recipe", config.recipe, why)


def _check_veto(config: Any) -> None:
  tau = config.veto_tau
  if tau != -1 and not 0 <= tau < 1:
    raise ConfigError("veto_tau", tau, "must be in [0, 1) or -1")
  ends = config.veto not in ("none", "cumulative")  # at the clip range's end
  if ends and tau == -1 and not 0 < config.clip_low < 1:
    raise ConfigError(
      "veto",
      config.veto,
      f"give --veto_tau in [0, 1): 1 - clip_low with --clip_low="
      f"{config.clip_low} is no threshold",
    )


def _check_explore(config: Any) -> None:
  parts = {part for mine in _parts(config) for part in mine}
  most = max(config.samples)
  if 0 < config.novelty_memory < most:
    raise ConfigError(
      "novelty_memory",
      config.novelty_memory,
      f"must be 0 or at least --samples={most}: bonuses wait for as many",
    )
  if not config.regenerate_temperature > 0:
    raise ConfigError(
      "regenerate_temperature", config.regenerate_temperature, "must be above 0"
    )
  if not 0 < config.regenerate_cap < 1:
    raise ConfigError(
      "regenerate_cap", config.regenerate_cap, "must be in (0, 1)"
    )
  slots = config.regenerate_slots
  if parts & {"regenerate", "extra"} and slots >= config.prompts:
    raise ConfigError(
      "regenerate_slots",
      slots,
      f"must be below --prompts={config.prompts}: new prompts need room",
    )


def _check_shaping(config: Any) -> None:
  if not config.shaping_scale > 0:
    raise ConfigError("shaping_scale", config.shaping_scale, "must be above 0")
  if not 0 <= config.shaping_decay < 1:
    raise ConfigError(
      "shaping_decay", config.shaping_decay, "must be in [0, 1)"
    )
  if not any("merla" in parts for parts in _parts(config)):
    return
  count = len(config.policies)
  if len(config.potential) not in (1, count):
    raise ConfigError(
      "potential",
      config.potential,
      f"must be 1 folder or {count}, one each: merla needs what "
      "experiments.meta_train writes",
    )
  if config.drop_degenerate:
    raise ConfigError(
      "drop_degenerate", "true", "merla learns from every group"
    )
  if config.shaping == "token" and config.reduction != "constant_mean":
    raise ConfigError(
      "reduction",
      config.reduction,
      "token shaping needs constant_mean: to divide by the lengths that were "
      "sampled makes the terms of a row depend on its future, and the "
      "expected gradient would change",
    )


def _parts(config: Any) -> list[list[str]]:
  """The parts of each policy's recipe."""
  count = len(config.policies)
  return [config.of("recipe", n).split("+") for n in range(count)]
