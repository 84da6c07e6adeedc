"""From the task and verifier flags to a task and a pool that scores it."""

import itertools
import pathlib
import sys
from collections.abc import Sequence

from mrl_jax import config as config_lib
from mrl_jax.tasks import (
  arithmetic,
  countdown,
  dataset,
  files,
  gym,
  verifiers,
  verify,
)
from mrl_jax.train import policy as policy_lib

BUILT_IN = {"chain_arithmetic": arithmetic, "countdown": countdown}
_GYM = "reasoning_gym/"
_CHECKED = 20_000  # prompts rendered at start to compare with the limit
_CHECKED_ENDLESS = 200


def load(config: config_lib.Config) -> dataset.Task:
  """The task of a run, with the verifier that the flags ask for.

  Raises:
    ConfigError: an unknown task or verifier, a file that cannot be read.
  """
  name, arguments = config.task, config.task_arguments()
  verifier = _verifier(config)
  if config.verifier == "rubric" and not name.endswith(files.SUFFIXES):
    raise config_lib.ConfigError(
      "verifier", "rubric", f"needs a file with a rubric column, not {name}"
    )
  if name in BUILT_IN:
    make, default = BUILT_IN[name].make, {"seed": config.seed}
  elif name.startswith(_GYM):
    make = _gym(name.removeprefix(_GYM))
    default = {"seed": config.seed}
  elif name.endswith(files.SUFFIXES):
    if verifier is None:
      raise config_lib.ConfigError(
        "verifier",
        "auto",
        "a file has no verifier of its own; "
        "allowed: exact, numeric, math, rubric, or module:function",
      )
    make, default = _file(name, verifier), {}
  else:
    raise config_lib.ConfigError(
      "task",
      name,
      f"allowed: {', '.join(BUILT_IN)}, {_GYM}NAME, or a file ending in "
      f"{' or '.join(files.SUFFIXES)}",
    )
  try:
    task = make(**{**default, **arguments})
  except TypeError as error:
    raise config_lib.ConfigError(
      "task_args", config.task_args, str(error)
    ) from None
  except (ValueError, OSError) as error:
    raise config_lib.ConfigError("task", name, str(error)) from None
  return task if verifier is None else task._replace(verify=verifier)


def _verifier(config: config_lib.Config) -> dataset.Verifier | None:
  if config.verifier == "auto":
    return None
  try:
    return verifiers.resolve(config.verifier)
  except ValueError as error:
    raise config_lib.ConfigError(
      "verifier", config.verifier, str(error)
    ) from None


def _gym(name: str):
  def make(size=500, seed=0, threshold=0.99, **settings):
    return gym.make(name, settings, size=size, seed=seed, threshold=threshold)

  return make


def _file(path: str, verifier: dataset.Verifier):
  def make(prompt="prompt", answer="answer", id="id", rubric="rubric"):
    task, report = files.load(
      pathlib.Path(path).expanduser(),
      verifier,
      prompt=prompt,
      answer=answer,
      id=id,
      rubric=rubric,
    )
    for reason, count in sorted(report.dropped.items()):
      print(f"{path}: {count} rows dropped: {reason}", file=sys.stderr)
    return task

  return make


def pool(config: config_lib.Config, task: dataset.Task) -> verify.Pool:
  """The processes that score the task's completions."""
  return verify.Pool(
    task.verify,
    workers=config.verifier_workers,
    deadline_seconds=config.verifier_deadline,
  )


def check_prompts(
  config: config_lib.Config,
  task: dataset.Task,
  order: dataset.Order,
  policies: Sequence[policy_lib.Policy],
) -> None:
  """Refuses a task with fewer prompts than a round, or with a longer one.

  Every prompt of a file is looked at, and the first ones of an endless
  task; one that turns up later is skipped and counted.
  """
  if task.size is not None and task.size < config.prompts:
    raise config_lib.ConfigError(
      "prompts", config.prompts, f"the task has only {task.size} prompts"
    )
  count = _CHECKED_ENDLESS if task.size is None else min(task.size, _CHECKED)
  pairs = itertools.product(map(order.at, range(count)), policies)
  for problem, policy in pairs:
    length = len(policy_lib.render(policy.actor, problem.prompt, config))
    if length > config.prompt_limit:
      raise config_lib.ConfigError(
        "prompt_limit",
        config.prompt_limit,
        f"prompt {problem.id} has {length} tokens for {policy.name}; "
        "raise the limit or filter the task",
      )
