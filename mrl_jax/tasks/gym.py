"""Any reasoning-gym task, scored by its own scorer and made all-or-nothing.

The library's scorers pay consolation (0.01 to 0.25 for anything non-empty),
and one pays full marks for a false answer, so each task is tried before it is
used: the oracle's answer must score 1 and junk 0 after thresholding. A
completion's answer is what stands in its last <answer> tags, or all of it.

Stojanovski et al. 2025, https://arxiv.org/abs/2505.24760.
"""

import difflib
import functools
import json
from typing import Any

import reasoning_gym
from reasoning_gym import factory

from mrl_jax.tasks import extract, verify
from mrl_jax.tasks.dataset import Problem, Task, Verifier

_PROBES = 3  # items tried before a task is accepted
_JUNK = ("definitely not the answer", "?", "")


def names() -> list[str]:
  """The tasks that the installed reasoning-gym has."""
  return sorted(factory.DATASETS)


def make(
  name: str,
  config: dict[str, Any] | None = None,
  *,
  size: int = 500,
  seed: int = 0,
  threshold: float | int = 0.99,
) -> Task:
  """Makes the task `name`; `config` holds its own difficulty settings.

  Raises:
    ValueError: an unknown task or setting, or a scorer that fails its trial.
  """
  if name not in factory.DATASETS:
    close = difflib.get_close_matches(name, names(), 5) or names()
    raise ValueError(f"no reasoning-gym task {name!r}; there are {close}")
  if size < 1:
    raise ValueError(f"size must be 1 or more, got {size}")
  if not 0 < threshold <= 1:
    raise ValueError(f"threshold must be in (0, 1], got {threshold}")
  settings = json.dumps(dict(config or {}) | {"seed": seed, "size": size})
  try:
    data = _dataset(name, settings)
  except (TypeError, AssertionError, ValueError) as error:
    raise ValueError(f"reasoning-gym task {name!r}: {error}") from None
  check = functools.partial(score, name, settings, threshold)
  full_name = f"reasoning_gym/{name}"
  problem = functools.partial(_problem, full_name, data, seed)
  _try_out(name, [problem(i) for i in range(min(size, _PROBES))], check)
  return Task(full_name, size, problem, Verifier(check))


def score(
  name: str,
  settings: str,
  threshold: float | int,
  completion: str,
  problem: Problem,
) -> verify.Verdict:
  """Scores by the data set's own scorer: 1 from `threshold` on, else 0."""
  answer = extract.tagged(completion)
  if answer is None:
    answer = completion.strip()
  if not answer:
    return verify.UNPARSED
  try:
    scorer = _dataset(name, settings).score_answer
    value = scorer(answer, problem.extra["entry"])
  except Exception:
    # Several scorers parse without a guard: what they raise on is no answer.
    return verify.UNPARSED
  return verify.CORRECT if value >= threshold else verify.WRONG


@functools.lru_cache(maxsize=16)
def _dataset(name: str, settings: str):
  return reasoning_gym.create_dataset(name, **json.loads(settings))


def _problem(full_name: str, data: Any, seed: int, index: int) -> Problem:
  entry = data[index]
  answer = "" if entry["answer"] is None else str(entry["answer"])
  extra = {"entry": entry}
  return Problem(
    f"{full_name}/{seed}/{index}", entry["question"], answer, extra
  )


def _try_out(name: str, problems: list[Problem], check: Any) -> None:
  """Refuses a task whose scorer takes junk or rejects its own oracle.

  Some tasks have no oracle answer; for them junk is all that can be tried.
  """
  for problem in problems:
    oracle = problem.extra["entry"]["answer"]
    trials = [(junk, 0.0) for junk in _JUNK]
    if oracle is not None:
      trials.append((problem.answer, 1.0))
    for answer, wanted in trials:
      got = check(answer, problem).reward
      if got != wanted:
        raise ValueError(
          f"reasoning-gym task {name!r} cannot be trusted: its scorer gives"
          f" {answer!r} {got} instead of {wanted} on item {problem.id}"
        )
