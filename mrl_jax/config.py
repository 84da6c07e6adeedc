"""One flat, frozen, validated configuration of a run.

Every field carries its help text and, where it is a name, the allowed
names; the command line is generated from this. Nothing below `recipes.py`
sees a `Config`: layers take arguments. A bad value is one `ConfigError`
at start that names the field, the value and what is allowed.
"""

import dataclasses
import json
import pathlib
from typing import Any

from mrl_jax import config_checks, config_fields
from mrl_jax import config_names as allowed
from mrl_jax.config_error import ConfigError
from mrl_jax.config_fields import field as _field


@dataclasses.dataclass(frozen=True)
class Config(config_fields.Methods, config_fields.Machine):
  """A run. A tuple field marked "per policy" takes one value or one each."""

  workdir: str = _field("", "Folder of the run: checkpoints, logs, plots.")
  seed: int = _field(0, "Seed of everything random in the run.")

  policies: tuple[str, ...] = _field(
    (), "Hugging Face directories (or hub ids), one per policy."
  )
  names: tuple[str, ...] = _field(
    (), "Names of the policies in logs; default: the directories' names."
  )
  dtype: str = _field("float32", "Compute dtype of the model.", allowed.DTYPES)
  remat: str = _field(
    "dots", "What the backward pass recomputes.", allowed.REMATS
  )

  task: str = _field(
    "chain_arithmetic",
    "chain_arithmetic, countdown, reasoning_gym/NAME, or a .jsonl or .parquet "
    "file with prompt and answer columns.",
  )
  task_args: str = _field("{}", "Arguments of the task, as a JSON object.")
  verifier: str = _field(
    "auto",
    "auto (the task's own), exact, numeric, math, rubric, module:function.",
  )
  verifier_workers: int = _field(2, "Processes that verify answers.")
  verifier_deadline: float = _field(10.0, "Seconds until one is killed.")
  prompt_format: str = _field(
    "auto",
    "chat: through the chat template; raw: as it is.",
    allowed.FORMATS,
  )
  system_prompt: str = _field("", "System message of chat prompts.")
  prompt_limit: int = _field(256, "Most tokens of a rendered prompt.")
  completion_limit: int = _field(128, "Most tokens of a completion.")

  rounds: int = _field(
    100, "Rounds (stages): generate everything, score it, update."
  )
  prompts: int = _field(32, "Prompts per round.")
  samples: tuple[int, ...] = _field(
    (8,), "Completions per prompt (G), per policy."
  )
  updates: int = _field(1, "Optimiser steps per round.")
  part: int = _field(0, "Prompts generated and put on disk at a time; 0: all.")
  shuffle: bool = _field(
    True, "Shuffle a round's groups before they are split into updates."
  )
  drop_degenerate: bool = _field(
    False, "Leave out groups whose rewards are all equal."
  )
  anchor_every: int = _field(
    0,
    "Updates after which --rescore and --correction compare with the policy "
    "anew; 0: only at the start of a round.",
  )
  microbatches: int = _field(1, "Gradient accumulation steps per update.")
  length_buckets: int = _field(
    0,
    "Pieces that groups are cut into and sorted by length; each microbatch is "
    "then as wide as its own longest completion. 0: one width for all.",
  )
  rows: int = _field(0, "Slots, each decoding row after row; 0: one a row.")
  sampler: str = _field(
    "",
    "Another engine: module:function, called as sampling.engine.make is.",
  )
  temperature: float = _field(1.0, "Sampling temperature.")
  top_k: int = _field(0, "Sample from the k likeliest tokens; 0: all.")
  top_p: float = _field(1.0, "Sample from the nucleus of this mass.")

  recipe: tuple[str, ...] = _field(
    ("grpo",),
    "Training recipe, per policy; they combine as in extra+sgt, where extra "
    "is novelty+regenerate.",
    allowed.RECIPES,
  )
  loss: tuple[str, ...] = _field(
    ("policy_gradient",), "Token loss, per policy.", allowed.LOSSES
  )
  reduction: str = _field(
    "token_mean", "How token losses become one number.", allowed.REDUCTIONS
  )
  clip_low: float = _field(0.2, "Ratios are clipped from 1 - clip_low ...")
  clip_high: float = _field(0.28, "... to 1 + clip_high.")
  dual_clip: float = _field(
    0.0, "Bound on the loss of negative rows, as a ratio; 0: off."
  )
  process: str = _field(
    "none",
    "Each token is worth what is earned from it on, against what the group "
    "has to_go there (best), or its mean return; none: the whole reward.",
    allowed.PROCESSES,
  )
  veto: str = _field(
    "none",
    "What a bad response loses where a ratio is too low.",
    allowed.VETOES,
  )
  veto_tau: float = _field(
    -1.0,
    "The veto's least ratio; -1: 1 - clip_low, or 1e-3 if cumulative.",
  )
  correction: str = _field(
    "none",
    "Rollout correction of the trainer's log-probs at stage start against "
    "the sampler's.",
    allowed.CORRECTIONS,
  )
  correction_low: float = _field(
    0.5, "Least ratio kept by mis_* and icepop; delta of opsm; limit of m2po."
  )
  correction_high: float = _field(
    2.0, "Cap of tis_*; greatest ratio kept by mis_* and icepop."
  )
  correction_denominator: str = _field(
    "original",
    "Whether dropped tokens still count in the mean.",
    allowed.DENOMINATORS,
  )
  kl_coefficient: float = _field(
    0.0, "Weight of the KL to the initial policy; 0: no reference."
  )
  kl: str = _field("k3", "Estimator of that KL.", allowed.KLS)
  entropy_coefficient: float = _field(0.0, "Weight of the entropy bonus.")
  rescore: bool = _field(
    False,
    "Replace the sampler's log-probs by the trainer's at stage start.",
  )

  lr: tuple[float, ...] = _field((1e-6,), "Peak learning rate, per policy.")
  lr_schedule: str = _field(
    "constant", "After the warm-up.", allowed.LR_SCHEDULES
  )
  lr_warmup: int = _field(0, "Updates of linear warm-up.")
  b1: float = _field(0.9, "Adam's first decay rate.")
  b2: float = _field(0.999, "Adam's second decay rate.")
  weight_decay: float = _field(0.0, "AdamW weight decay.")
  clip_norm: float = _field(1.0, "Clip the gradient to this norm; 0: off.")

  save_every: int = _field(10, "Rounds between checkpoints; 0: at the end.")
  save_updates: int = _field(
    0, "Updates between checkpoints inside a round; 0: none."
  )
  keep: int = _field(2, "Checkpoints kept.")
  save_rollouts: bool = _field(True, "Write every rollout as JSON.")
  export: bool = _field(True, "Write Hugging Face directories at the end.")
  progress: str = _field("auto", "Progress display.", allowed.PROGRESS)

  def __post_init__(self):
    config_checks.check(self)
    try:
      self.task_arguments()
    except ValueError as error:
      raise ConfigError("task_args", self.task_args, str(error)) from None

  def task_arguments(self) -> dict[str, Any]:
    """The task's arguments as a dict."""
    value = json.loads(self.task_args)
    if not isinstance(value, dict):
      raise ValueError("must be a JSON object")
    return value

  def policy_names(self) -> tuple[str, ...]:
    """One unique name per policy."""
    if self.names:
      return self.names
    return tuple(pathlib.PurePath(path).name for path in self.policies)

  def of(self, field: str, policy: int) -> Any:
    """The value of a per-policy field for one policy."""
    values = getattr(self, field)
    return values[policy if len(values) > 1 else 0]
