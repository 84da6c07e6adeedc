"""Auxiliary tasks of arithmetic: many narrow ones in place of a wide one.

A variant of chain arithmetic has its own operators, number of operations and
range of operands; a variant of countdown its own count of numbers, size of
the largest, and size of the target. No prompt of a test split is ever used.
"""

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mrl_jax.tasks import arithmetic, countdown, splits
from mrl_jax.tasks.dataset import Problem, Verifier

_PATIENCE = 100  # prompts drawn for each that is asked for, at most


class Variant(NamedTuple):
  """One auxiliary task: prompts that differ in nothing but their numbers.

  `problems(seed, count)` are its problems, fewer than `count` where there are
  no more. `wrong(problems, generator)` are for each some responses that are
  likely wrong, best first; the verifier has the last word.
  """

  name: str  # its family comes first: family/...
  problems: Callable[[int, int], list[Problem]]
  verifier: Verifier
  wrong: Callable[[Sequence[Problem], np.random.Generator], list[Sequence[str]]]
  limit: int = 16  # most tokens of a response


def chains() -> list[Variant]:
  """133 tasks: ranges of operands, sets of operators, numbers of operations.

  `chain/0-9/+-*/` are what chain arithmetic itself asks for: all operands and
  all operators, with 2 to 8 operations.
  """
  verifier = Verifier(arithmetic.check, quick=True)
  sets = [
    "".join(some)
    for count in (1, 2, 3)
    for some in itertools.combinations("+-*", count)
  ]
  shapes = [((0, 9), n) for n in range(2, 9)]
  shapes += itertools.product([(1, 5), (0, 6), (3, 9), (2, 8)], (3, 5, 7))
  found = []
  for (operands, count), operators in itertools.product(shapes, sets):
    low, high = operands
    name = f"chain/{low}-{high}/{operators}/{count}"
    problems = functools.partial(_chains, name, operators, count, operands)
    found.append(Variant(name, problems, verifier, _wrong_chains))
  return found


def _chains(name, operators, length, operands, seed, count) -> list[Problem]:
  first = seed * 1_000_003
  return [
    _chain(name, operators, length, operands, first + number)
    for number in range(count)
  ]


def _chain(name, operators, length, operands, index: int) -> Problem:
  """A chain that is not of the held-out prompts."""
  words = [index, length, *operands, *map(ord, operators)]
  generator = np.random.default_rng(words)
  low, high = operands
  while True:
    digits = generator.integers(low, high + 1, length + 1)
    signs = generator.choice(list(operators), length)
    tail = "".join(f"{s}{d}" for s, d in zip(signs, digits[1:], strict=True))
    prompt = f"{digits[0]}{tail}="
    if not splits.is_test(prompt):
      answer = arithmetic.running_values(prompt)
      return Problem(f"{name}/{index}", prompt, answer)


def _wrong_chains(problems, generator) -> list[Sequence[str]]:
  return [(_slipped(problem, generator),) for problem in problems]


def _slipped(problem: Problem, generator: np.random.Generator) -> str:
  """One running value is wrong; from there on right again, or at random."""
  chain, answer = problem.prompt, problem.answer
  place = int(generator.integers(len(answer)))
  wrong = (int(answer[place]) + int(generator.integers(1, 10))) % 10
  rest = f"{wrong}{chain[2 * place + 3 :]}"
  if generator.random() < 0.5:
    tail = arithmetic.running_values(rest)
  else:
    tail = "".join(map(str, generator.integers(0, 10, len(answer) - place - 1)))
  return f"{answer[:place]}{wrong}{tail}"


def countdowns() -> list[Variant]:
  """17 tasks, `countdown/<numbers>/<largest>/<target>`, which share no prompt.

  Countdown itself, as it is by default, is those of 3 and of 4 numbers.
  """
  verifier = Verifier(countdown.check, quick=True)
  found = []
  for numbers, largest, target in itertools.product(
    (3, 4, 5), ((1, 5), (6, 9)), ((0, 20), (21, 50), (51, 99))
  ):
    if numbers == 3 and largest[1] == 5 and target[0] > 50:
      continue  # which makes hardly anything
    bands = "/".join(f"{low}-{high}" for low, high in (largest, target))
    name = f"countdown/{numbers}/{bands}"
    problems = functools.partial(_countdowns, numbers, largest, target)
    found.append(Variant(name, problems, verifier, _wrong_countdowns))
  return found


def _countdowns(numbers, largest, target, seed, count) -> list[Problem]:
  """The first different ones whose largest number and target are in range."""
  task = countdown.make(numbers, numbers, largest[1], target[1], seed=seed)
  found: dict[str, Problem] = {}
  for index in range(count * _PATIENCE):
    problem = task.problem(index)
    given, wanted = countdown.read(problem.prompt)
    if max(given) >= largest[0] and wanted >= target[0]:
      found.setdefault(problem.prompt, problem)
    if len(found) == count:
      break
  return list(found.values())


def _wrong_countdowns(problems, generator) -> list[Sequence[str]]:
  """One with each kind of mistake; one with a number that is new is wrong."""
  return [
    [
      _mistaken(problem.answer, kind, generator)
      for kind in generator.permutation(3)
    ]
    for problem in problems
  ]


def _mistaken(
  expression: str, kind: int | np.integer, generator: np.random.Generator
) -> str:
  """Another sign, two numbers that changed places, or another number."""
  parts = re.split("([-+*])", expression)
  place = 2 * int(generator.integers(len(parts) // 2))
  if kind == 0:
    others = countdown.OPERATORS.replace(parts[place + 1], "")
    parts[place + 1] = others[int(generator.integers(len(others)))]
  elif kind == 1:
    other = place + 2 * int(
      generator.integers(1, (len(parts) - place + 1) // 2)
    )
    parts[place], parts[other] = parts[other], parts[place]
  else:
    shift = int(generator.integers(8))
    parts[place] = str(1 + (int(parts[place]) + shift) % 9)
  return "".join(parts)
