"""Countdown: make a number from others, in any of the ways there are.

The prompt is `3,5,2=13;`: every number is to be used once, with + - * and the
usual precedence, so that the target comes out; `3+5*2` and `2*5+3` are two of
the right responses. Any right expression counts, so a policy can solve a
prompt in many ways, or know one only. A problem is a function of (seed,
index) alone; a prompt belongs to the train or the test split by its own hash.
"""

import functools
import itertools
import re
from collections.abc import Iterator

import numpy as np

from mrl_jax.tasks import dataset, splits
from mrl_jax.tasks.dataset import Problem, Task, Verifier

OPERATORS = "+-*"
_DEFAULT = (3, 4, 9, 99)  # fewest and most numbers, largest, largest target
_NUMBER = re.compile(r"\d+")
_EXPRESSION = re.compile(r"\d+(?:[-+*]\d+)*")


def make(
  min_numbers: int = _DEFAULT[0],
  max_numbers: int = _DEFAULT[1],
  largest: int = _DEFAULT[2],
  largest_target: int = _DEFAULT[3],
  *,
  split: str = "train",
  seed: int = 0,
  size: int | None = None,
) -> Task:
  """Makes the task; `size` None gives a new prompt at every index.

  Raises:
    ValueError: for a split or a range that does not exist.
  """
  if not 2 <= min_numbers <= max_numbers <= 6:
    raise ValueError(
      "numbers must satisfy 2 <= min_numbers <= max_numbers <= 6, got"
      f" min_numbers={min_numbers}, max_numbers={max_numbers}"
    )
  for name, value in (("largest", largest), ("largest_target", largest_target)):
    if value < 1:
      raise ValueError(f"{name} must be 1 or more, got {value}")
  splits.check(split, size, seed)
  ranges = (min_numbers, max_numbers, largest, largest_target)
  name = splits.named("countdown", split)
  problem = functools.partial(_problem, name, ranges, split, seed)
  problem = dataset.indexed(problem, size)
  return Task(name, size, problem, Verifier(check, quick=True))


def check(completion: str, problem: Problem) -> bool:
  """True where the text is an expression that makes the target."""
  text = completion.strip()
  numbers, target = read(problem.prompt)
  if not _EXPRESSION.fullmatch(text):
    return False
  used = _NUMBER.findall(text)  # as text: 03 is not 3
  return sorted(used) == sorted(map(str, numbers)) and value(text) == target


def read(prompt: str) -> tuple[tuple[int, ...], int]:
  """`3,5,2=13;` -> (3, 5, 2), 13."""
  left, right = prompt.rstrip(";").split("=")
  return tuple(map(int, left.split(","))), int(right)


def value(expression: str) -> int:
  """What an expression of numbers with + - * is worth."""
  total = 0
  for sign, term in re.findall(r"([-+]?)([\d*]+)", expression):
    product = 1
    for factor in term.split("*"):
      product *= int(factor)
    total += -product if sign == "-" else product
  return total


def solutions(problem: Problem) -> Iterator[str]:
  """All right expressions, each once."""
  numbers, target = read(problem.prompt)
  for order in sorted(set(itertools.permutations(numbers))):
    for signs in itertools.product(OPERATORS, repeat=len(numbers) - 1):
      text = _spell(order, signs)
      if value(text) == target:
        yield text


def _spell(numbers, signs) -> str:
  pairs = zip(signs, numbers[1:], strict=True)
  return str(numbers[0]) + "".join(f"{sign}{number}" for sign, number in pairs)


def _problem(name: str, ranges, split: str, seed: int, index: int) -> Problem:
  low, high, largest, largest_target = ranges
  generator = np.random.default_rng([seed, index])
  while True:
    count = int(generator.integers(low, high + 1))
    numbers = generator.integers(1, largest + 1, count).tolist()
    signs = [OPERATORS[s] for s in generator.integers(0, 3, count - 1)]
    answer = _spell(numbers, signs)
    target = value(answer)
    shown = generator.permutation(numbers).tolist()
    prompt = f"{','.join(map(str, shown))}={target};"
    if 0 <= target <= largest_target and splits.holds(split, prompt):
      break
  kind = "" if ranges == _DEFAULT else "/" + "-".join(map(str, ranges))
  id = f"{name}{kind}/{seed}/{index}"
  return Problem(id, prompt, answer, {"difficulty": count})
