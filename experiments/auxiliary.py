r"""Auxiliary tasks with right and wrong responses, to meta-train a potential.

  python -m experiments.auxiliary --policy=experiments/assets/char \
    --out=pairs.jsonl

Chains of arithmetic are many tasks: one for every set of operators, number of
operations and range of operands. The policy answers their prompts; where some
of its answers to a prompt are right and some wrong, they make pairs.
Every answer is verified. With --responses=corrupted no policy is asked: the
solution is the right answer, and the wrong one has an error somewhere.
"""

import collections
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from experiments import evaluate, models
from experiments import flags as flags_lib
from mrl_jax import config as config_lib
from mrl_jax.explore import explorer
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.shaping import pairs
from mrl_jax.tasks import arithmetic, dataset, splits, verify
from mrl_jax.train import policy as policy_lib

RESPONSES = ("policy", "corrupted")


class Variant(NamedTuple):
  """One auxiliary task: prompts that differ in nothing but their numbers."""

  name: str
  problem: Callable[[int], dataset.Problem]
  verifier: dataset.Verifier
  corrupt: Callable[[dataset.Problem, np.random.Generator], str]


def chains() -> list[Variant]:
  """133 tasks: ranges of operands, sets of operators, numbers of operations.

  `chain/0-9/+-*/` are what chain arithmetic itself asks for: all operands and
  all operators, with 2 to 8 operations.
  """
  found = []
  sets = [
    "".join(some)
    for count in (1, 2, 3)
    for some in itertools.combinations("+-*", count)
  ]
  shapes = [((0, 9), n) for n in range(2, 9)]
  shapes += itertools.product([(1, 5), (0, 6), (3, 9), (2, 8)], (3, 5, 7))
  for (operands, count), operators in itertools.product(shapes, sets):
    low, high = operands
    name = f"chain/{low}-{high}/{operators}/{count}"
    problem = functools.partial(_chain, name, operators, count, operands)
    verifier = dataset.Verifier(arithmetic.check, quick=True)
    found.append(Variant(name, problem, verifier, _corrupt))
  return found


def _chain(name, operators, count, operands, index: int) -> dataset.Problem:
  """A chain that is not of the held-out prompts."""
  words = [index, count, *operands, *map(ord, operators)]
  generator = np.random.default_rng(words)
  low, high = operands
  while True:
    digits = generator.integers(low, high + 1, count + 1)
    signs = generator.choice(list(operators), count)
    tail = "".join(f"{s}{d}" for s, d in zip(signs, digits[1:], strict=True))
    prompt = f"{digits[0]}{tail}="
    if not splits.is_test(prompt):
      answer = arithmetic.running_values(prompt)
      return dataset.Problem(f"{name}/{index}", prompt, answer)


def _corrupt(problem: dataset.Problem, rng: np.random.Generator) -> str:
  """One running value is wrong; from there on right again, or at random."""
  chain, answer = problem.prompt, problem.answer
  place = int(rng.integers(len(answer)))
  wrong = (int(answer[place]) + int(rng.integers(1, 10))) % 10
  rest = f"{wrong}{chain[2 * place + 3 :]}"
  if rng.random() < 0.5:
    tail = arithmetic.running_values(rest)
  else:
    tail = "".join(map(str, rng.integers(0, 10, len(answer) - place - 1)))
  return f"{answer[:place]}{wrong}{tail}"


def corrupted(
  variants: Sequence[Variant], count: int, seed: int
) -> Iterator[pairs.Pair]:
  """`count` pairs of each task, the wrong response made from the right one."""
  for variant in variants:
    rng = np.random.default_rng([seed, *map(ord, variant.name)])
    for index in range(count):
      problem = variant.problem(seed * 1_000_003 + index)
      wrong = variant.corrupt(problem, rng)
      if not variant.verifier.check(wrong, problem):
        yield pairs.Pair(variant.name, problem.prompt, problem.answer, wrong)


def sampled(
  variants: Sequence[Variant],
  policy: str,
  count: int,
  samples: int,
  seed: int,
  tell: Callable[[str, int], None] = lambda task, found: None,
) -> Iterator[pairs.Pair]:
  """The policy's own right and wrong answers to `count` prompts of each task.

  A prompt with both gives up to two pairs, each of other texts.

  Args:
    variants: the tasks.
    policy: a Hugging Face directory.
    count: prompts of a task.
    samples: answers to a prompt.
    seed: of prompts, samples and pairing.
    tell: told of each task's number of pairs.
  """
  config = config_lib.Config(
    workdir="unused", policies=(policy,), seed=seed, completion_limit=16
  )
  mesh = mesh_lib.make(-1, 1, 1)
  actor, params = policy_lib.load_actor(config, 0, mesh, samples)
  for variant in variants:
    problems = [variant.problem(seed * 1_000_003 + i) for i in range(count)]
    slots = [
      explorer.Slot(p, i, policy_lib.render(actor, p.prompt, config))
      for i, p in enumerate(problems)
    ]
    with verify.Pool(variant.verifier) as pool:
      rows = evaluate.draw(actor, params, slots, pool, samples)
    found = 0
    for number, problem in enumerate(problems):
      group = rows[number * samples : (number + 1) * samples]
      for pair in _paired(variant.name, problem, group):
        found += 1
        yield pair
    tell(variant.name, found)


def _paired(task: str, problem, group) -> Iterator[pairs.Pair]:
  right = [r.text for r in group if r.outcome == verify.Outcome.correct.value]
  wrong = [r.text for r in group if r.outcome == verify.Outcome.wrong.value]
  share = len(right) / len(group)
  texts = [list(dict.fromkeys(texts)) for texts in (right, wrong)]
  if not all(texts):
    return
  for number in range(min(2, max(map(len, texts)))):
    good, bad = (some[number % len(some)] for some in texts)
    if good.strip() and bad.strip():
      yield pairs.Pair(task, problem.prompt, good, bad, share=share)


def build(
  responses: str, policy: str, count: int, samples: int, seed: int
) -> list[pairs.Pair]:
  """The chains' pairs."""
  found: list[Any]
  if responses == "corrupted":
    found = list(corrupted(chains(), count, seed))
  else:
    found = list(sampled(chains(), policy, count, samples, seed))
  tasks = collections.Counter(pair.task for pair in found)
  print(f"{len(found)} pairs of {len(tasks)} tasks")
  return found


def main() -> int:
  values = flags.FLAGS
  policy = models.locate(values.policy, "policy")
  found = build(
    values.responses, policy, values.prompts, values.samples, values.seed
  )
  pairs.write(pathlib.Path(values.out).expanduser(), found)
  return 0


def define() -> None:
  """Defines the flags of which pairs there are."""
  flags.DEFINE_string("policy", None, "The policy's directory.", required=True)
  flags.DEFINE_enum(
    "responses", "policy", RESPONSES, "Whose answers are paired."
  )
  flags.DEFINE_integer("prompts", 256, "Prompts of each task.", 1)
  flags.DEFINE_integer("samples", 8, "Answers to each prompt.", 2)
  flags.DEFINE_integer("seed", 0, "Of prompts, samples and training.", 0)
  flags_lib.show("policy", "responses", "prompts", "samples", "seed")


if __name__ == "__main__":
  define()
  flags.DEFINE_string("out", None, "File to write.", required=True)
  flags_lib.run(main)
