"""Chain arithmetic modulo 10: a task that a tiny policy learns in minutes.

The prompt is a chain such as `3+4*2-1=`, worked from left to right modulo 10
with no precedence. The response is the running value after each operation,
one digit each and nothing between them (here `743`), so it is as long as the
chain has operations and every intermediate step is checked. A problem is a
function of (seed, index) alone; a chain belongs to the train or the test
split by its own hash, so no test chain is ever trained on.
"""

import functools

import numpy as np

from mrl_jax.tasks import dataset, splits
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
) -> Task:
  """Makes the task; `size` None gives a new chain at every index.

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
  return Task(name, size, problem, Verifier(check, quick=True))


def check(completion: str, problem: Problem) -> bool:
  """True where the whole chain of running values is exact."""
  return completion.strip() == problem.answer


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
