r"""Auxiliary tasks with right and wrong responses, to meta-train a potential.

  python -m experiments.auxiliary --policy=experiments/assets/char \
    --out=pairs.jsonl
  python -m experiments.auxiliary --responses=corrupted --families=gym \
    --prompts=32 --out=pairs.jsonl

A family is many tasks: chains of arithmetic with every set of operators,
number of operations and range of operands; countdowns of every size; or the
families of reasoning-gym. The policy answers the prompts; where some of its
answers to a prompt are right and some wrong, they make pairs. With
--responses=corrupted no policy is asked: the solution is the right answer, and
the wrong one has an error somewhere. Every answer is verified.
"""

import functools
import pathlib
import sys
from collections.abc import Sequence

import numpy as np
import rich.box
import rich.console
import rich.table
from absl import flags
from rich import progress as rich_progress

from experiments import auxiliary_gym, auxiliary_tasks, models
from experiments import auxiliary_responses as responses_lib
from experiments import flags as flags_lib
from mrl_jax import config as config_lib
from mrl_jax.shaping import pairs

RESPONSES = ("policy", "corrupted")


def _gym() -> list[auxiliary_tasks.Variant]:
  """Says on standard error what is left out."""
  found, refused = auxiliary_gym.families()
  for name, reason in refused.items():
    print(f"gym/{name} left out: {reason}", file=sys.stderr)
  return found


FAMILIES = {
  "chain": auxiliary_tasks.chains,
  "countdown": auxiliary_tasks.countdowns,
  "gym": _gym,
}


def build(
  responses: str,
  policy: str,
  count: int,
  samples: int,
  seed: int,
  families: Sequence[str] = ("chain",),
) -> list[pairs.Pair]:
  """The pairs of the families' tasks, with a summary on the terminal.

  Args:
    responses: whose, one of `RESPONSES`.
    policy: a Hugging Face directory; corrupted responses need none.
    count: prompts of a task.
    samples: of the policy for a prompt.
    seed: of everything.
    families: some of `FAMILIES`.

  Raises:
    ConfigError: an unknown family, or not one pair came out.
  """
  for family in families:
    if family not in FAMILIES:
      raise config_lib.ConfigError(
        "families", family, f"allowed: {', '.join(FAMILIES)}"
      )
  tasks = [task for family in families for task in FAMILIES[family]()]
  skipped = responses_lib.Skipped()
  with rich_progress.Progress() as bar:
    line = bar.add_task("auxiliary tasks", total=len(tasks))
    tell = functools.partial(bar.advance, line)
    if responses == "corrupted":
      found = responses_lib.corrupted(tasks, count, seed, skipped, tell)
    else:
      found = responses_lib.sampled(
        tasks, policy, count, samples, seed, skipped, tell
      )
  summary(found, skipped)
  if not found:
    raise config_lib.ConfigError(
      "families", families, f"not one pair came out: {dict(skipped)}"
    )
  return found


def summary(
  found: Sequence[pairs.Pair], skipped: responses_lib.Skipped
) -> None:
  """Prints how many tasks and pairs a family has, and what it has not."""
  grid = rich.table.Table(box=rich.box.ASCII2)
  for name in ("family", "tasks", "pairs", "share", "skipped prompts"):
    grid.add_column(name, justify="right" if name[-1] == "s" else "left")
  by_family: dict[str, list[pairs.Pair]] = {f: [] for f, _ in skipped}
  for pair in found:
    by_family.setdefault(pair.task.split("/")[0], []).append(pair)
  for family, mine in by_family.items():
    reasons = [
      f"{n:,}: {why}" for (f, why), n in skipped.items() if f == family
    ]
    share = f"{np.mean([p.share for p in mine]):.2f}" if mine else ""
    tasks = len({pair.task for pair in mine})
    grid.add_row(
      family, str(tasks), f"{len(mine):,}", share, "\n".join(reasons)
    )
  rich.console.Console().print(grid)


def main() -> int:
  values = flags.FLAGS
  policy = ""
  if values.responses == "policy":
    if not values.policy:
      raise config_lib.ConfigError(
        "policy", values.policy, "needed, or --responses=corrupted"
      )
    policy = models.locate(values.policy, "policy")
  found = build(
    values.responses,
    policy,
    values.prompts,
    values.samples,
    values.seed,
    values.families,
  )
  pairs.write(pathlib.Path(values.out).expanduser(), found)
  return 0


def define(needs_policy: bool = True) -> None:
  """Defines the flags of which pairs there are."""
  flags.DEFINE_string(
    "policy", None, "The policy's directory.", required=needs_policy
  )
  flags.DEFINE_enum(
    "responses", "policy", RESPONSES, "Whose answers are paired."
  )
  flags.DEFINE_integer("prompts", 256, "Prompts of each task.", 1)
  flags.DEFINE_integer("samples", 8, "Answers to each prompt.", 2)
  flags.DEFINE_integer("seed", 0, "Of prompts, samples and training.", 0)
  flags.DEFINE_list("families", ["chain"], "Some of chain, countdown, gym.")
  names = ("policy", "responses", "families", "prompts", "samples", "seed")
  flags_lib.show(*names)


if __name__ == "__main__":
  define(needs_policy=False)
  flags.DEFINE_string("out", None, "File to write.", required=True)
  flags_lib.run(main)
