"""Any reasoning-gym task, scored by its own scorer and made all-or-nothing.

The library's scorers pay consolation (0.01 to 0.25 for anything non-empty),
and one pays full marks for a false answer, so each task is tried before it is
used: the oracle's answer must score 1 and junk 0 after thresholding. A
completion's answer is what stands in its last <answer> tags; without tags,
what it marks otherwise or all of it, since scorers differ in what they take.

Stojanovski et al. 2025, https://arxiv.org/abs/2505.24760.
"""

import difflib
import functools
import hashlib
import json
from typing import Any

import reasoning_gym
from reasoning_gym import factory

from mrl_jax.tasks import dataset, extract, verify
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
  if seed < 0:
    raise ValueError(f"seed must be 0 or more, got {seed}")
  if not 0 < threshold <= 1:
    raise ValueError(f"threshold must be in (0, 1], got {threshold}")
  settings = json.dumps(dict(config or {}) | {"seed": seed, "size": size})
  try:
    data = _dataset(name, settings)
  except (TypeError, AssertionError, ValueError) as error:
    raise ValueError(f"reasoning-gym task {name!r}: {error}") from None
  check = functools.partial(score, name, settings, threshold)
  full_name = f"reasoning_gym/{name}"
  prefix = f"{full_name}{_digest(config)}/{seed}"
  problem = functools.partial(_problem, prefix, data)
  problem = dataset.indexed(problem, size)
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
  scorer = _dataset(name, settings).score_answer
  verdict = verify.UNPARSED
  for answer in _answers(completion):
    try:
      value = scorer(answer, problem.extra["entry"])
    except MemoryError:
      raise
    except Exception:
      # Several scorers parse without a guard: what they raise on is no answer.
      continue
    if value >= threshold:
      return verify.CORRECT
    verdict = verify.WRONG
  return verdict


def _answers(completion: str) -> list[str]:
  """What to score: the tagged answer alone, else the marked one and the whole.

  The whole stands last because an answer of some task may look like a mark.
  """
  tagged = extract.tagged(completion)
  if tagged is not None:
    found = [tagged]
  else:
    marked = extract.marked(completion)
    if marked is None:
      marked = extract.cued(completion)
    found = [_unstyled(marked or ""), _unstyled(completion), completion.strip()]
  return [answer for answer in dict.fromkeys(found) if answer]


def _unstyled(text: str) -> str:
  """Without the Markdown and the dollars that stand around an answer."""
  return text.strip("*_`$ \n")


@functools.lru_cache(maxsize=16)
def _dataset(name: str, settings: str):
  return reasoning_gym.create_dataset(name, **json.loads(settings))


def _digest(config: dict[str, Any] | None) -> str:
  """Tells the ids of a task's configurations apart; "" for the default."""
  if not config:
    return ""
  text = json.dumps(config, sort_keys=True)
  return "-" + hashlib.sha256(text.encode()).hexdigest()[:8]


def _problem(prefix: str, data: Any, index: int) -> Problem:
  entry = data[index]
  answer = "" if entry["answer"] is None else str(entry["answer"])
  extra = {"entry": entry}
  return Problem(f"{prefix}/{index}", entry["question"], answer, extra)


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
