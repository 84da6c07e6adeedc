"""Chain arithmetic modulo 10: a task that a tiny policy learns in minutes.

The prompt is a chain such as `3+4*2-1=`, worked from left to right modulo 10
with no precedence. The response is the running value after each operation,
one digit each and nothing between them (here `743`), so it is as long as the
chain has operations and every intermediate step is checked. A problem is a
function of (seed, index) alone; a chain belongs to the train or the test
split by its own hash, so no test chain is ever trained on.
"""

import functools
import itertools

import numpy as np

from mrl_jax.tasks import dataset, splits, verify
from mrl_jax.tasks.dataset import Problem, Task, Verifier

_DEFAULT_RANGE = (1, 8)  # operations of a chain
_STEPS = {
  "+": lambda a, b: (a + b) % 10,
  "-": lambda a, b: (a - b) % 10,
  "*": lambda a, b: (a * b) % 10,
}


def make(
  min_operations: int = _DEFAULT_RANGE[0],
  max_operations: int = _DEFAULT_RANGE[1],
  *,
  split: str = "train",
  seed: int = 0,
  size: int | None = None,
  process: bool = False,
) -> Task:
  """Makes the task; `size` None gives a new chain at every index.

  With `process`, right values earn their share before the chain is whole:
  see `check_steps`. What counts as correct stays the same.

  Raises:
    ValueError: for a split or a range of operations that does not exist.
  """
  if not 1 <= min_operations <= max_operations:
    raise ValueError(
      "operations must satisfy 1 <= min_operations <= max_operations, got"
      f" min_operations={min_operations}, max_operations={max_operations}"
    )
  splits.check(split, size, seed)
  name = splits.named("chain-arithmetic", split)
  problem = functools.partial(
    _problem, name, min_operations, max_operations, split, seed
  )
  problem = dataset.indexed(problem, size)
  verifier = Verifier(check_steps if process else check, quick=True)
  return Task(name, size, problem, verifier)


def check(completion: str, problem: Problem) -> bool:
  """True where the whole chain of running values is exact."""
  return completion.strip() == problem.answer


def check_steps(completion: str, problem: Problem) -> verify.Verdict:
  """1/n for each of the n values up to the first wrong one, as it is written.

  The last value earns its share by ending the text, and not by being
  written: what follows it may still make it wrong. So the reward is 1 for
  the exact chain, which alone is correct, and at most (n - 1)/n otherwise.
  """
  count = len(problem.answer)
  text = completion.lstrip()
  start = len(completion) - len(text)
  pairs = zip(text, problem.answer, strict=False)
  alike = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
  right = sum(1 for _ in alike)
  paid = min(right, count - 1)
  steps = tuple((start + end, 1 / count) for end in range(1, paid + 1))
  if check(completion, problem):
    return verify.Verdict(1.0, verify.Outcome.correct, steps)
  return verify.Verdict(paid / count, verify.Outcome.wrong, steps)


def running_values(chain: str) -> str:
  """`3+4*2-1=` -> `743`."""
  value, values = int(chain[0]), []
  for operator, operand in zip(chain[1:-1:2], chain[2:-1:2], strict=True):
    value = _STEPS[operator](value, int(operand))
    values.append(str(value))
  return "".join(values)


def _problem(
  name: str, low: int, high: int, split: str, seed: int, index: int
) -> Problem:
  generator = np.random.default_rng([seed, index])
  while True:
    operations = int(generator.integers(low, high + 1))
    digits = generator.integers(0, 10, operations + 1)
    operators = generator.integers(0, len(_STEPS), operations)
    signs = "".join(list(_STEPS)[o] for o in operators)
    tail = (f"{s}{d}" for s, d in zip(signs, digits[1:], strict=True))
    chain = f"{digits[0]}{''.join(tail)}="
    if splits.holds(split, chain):
      break
  extra = {"difficulty": operations}
  # What sets this task apart from others of its name belongs to its ids.
  kind = "" if (low, high) == _DEFAULT_RANGE else f"/{low}-{high}"
  id = f"{name}{kind}/{seed}/{index}"
  return Problem(id, chain, running_values(chain), extra)
