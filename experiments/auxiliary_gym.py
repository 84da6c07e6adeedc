"""Auxiliary tasks of text: the families of reasoning-gym.

A family is used if its scorer can be trusted, and if most of its questions
are short. The right response is the family's own solution; a wrong one is the
solution of another item, or has a number, a word or a character changed. The
scorer has the last word on both, in a process that can be killed.

Stojanovski et al. 2025, https://arxiv.org/abs/2505.24760.
"""

import contextlib
import functools
import io
import itertools
import re
import string
from collections.abc import Callable, Sequence

import numpy as np

from experiments.auxiliary_tasks import Variant
from mrl_jax.tasks import gym, splits
from mrl_jax.tasks.dataset import Problem, Verifier

LONGEST = 400  # characters of a question and its answer
_TRIED = 8  # items that a family is judged by
_LOOKED = 6  # items looked at for each that is asked for
_LIMIT = 256  # tokens of an answer that a policy writes
_SEARCH = "its items are searched for, a hundred times slower than others"
_UNSTEADY = "its items follow from the order of a set, not from the seed alone"
_DRAWN = 8  # solutions of others, of which the most alike are tried
_DIGITS, _LETTERS = string.digits, string.ascii_lowercase
_WORD = re.compile(r"-?\w+(?:[.'-]\w+)*")
LEFT_OUT = {
  "composite": "it is made of others",
  "futoshiki": _SEARCH,
  "knight_swap": _SEARCH,
  "intermediate_integration": "its scorer integrates, for seconds",
  "isomorphic_strings": _UNSTEADY,
  "ransom_note": _UNSTEADY,
  "sokoban": _SEARCH,
  "word_ladder": _UNSTEADY,
  "zebra_puzzles": _SEARCH,
}


def families(
  names: Sequence[str] | None = None,
) -> tuple[list[Variant], dict[str, str]]:
  """The families that can be used, and why others cannot; None is all."""
  found, refused = [], {}
  for name in gym.names() if names is None else names:
    reason = LEFT_OUT.get(name) or _fault(name)
    if reason:
      refused[name] = reason
    else:
      problems = functools.partial(_problems, name)
      verifier = Verifier(_check)
      found.append(Variant(f"gym/{name}", problems, verifier, _wrong, _LIMIT))
  return found, refused


def _check(completion: str, problem: Problem):
  """By the problem's own family, so that all share their processes."""
  return problem.extra["check"](completion, problem)


def _quiet() -> contextlib.AbstractContextManager:
  """Some families print while they work."""
  return contextlib.redirect_stdout(io.StringIO())


def _fault(name: str) -> str:
  """Why a family cannot be used, by its first items; "" if it can."""
  try:
    with _quiet():
      task = gym.make(name, size=_TRIED)
      problems = [task.problem(index) for index in range(_TRIED)]
      if sum(map(_is_short, problems)) < _TRIED / 2:
        return f"most items have more than {LONGEST} characters"
      if not all(problem.answer.strip() for problem in problems):
        return "it has no solutions"
      return _credulous(problems, task.verify.check)
  except ValueError as error:
    return str(error)


def _credulous(problems: Sequence[Problem], check: Callable) -> str:
  """Whether most items take the solution of another one, which differs."""
  others = [
    check(other.answer, problem).reward == 1
    for problem, other in itertools.pairwise(problems)
    if problem.answer != other.answer
  ]
  if sum(others) > len(others) / 2:
    return f"{sum(others)} of {len(others)} items take another one's solution"
  return ""


def _is_short(problem: Problem) -> bool:
  return len(problem.prompt) + len(problem.answer) <= LONGEST


def _problems(name: str, seed: int, count: int) -> list[Problem]:
  """Short ones, no question twice and none that is held out."""
  found: dict[str, Problem] = {}
  with _quiet():
    task = gym.make(name, size=count * _LOOKED, seed=seed)
    for index in range(count * _LOOKED):
      problem = task.problem(index)
      extra = {**problem.extra, "check": task.verify.check}
      if _is_short(problem) and not splits.is_test(problem.prompt):
        found.setdefault(problem.prompt, problem._replace(extra=extra))
      if len(found) == count:
        break
  return list(found.values())


def _wrong(
  problems: Sequence[Problem], generator: np.random.Generator
) -> list[Sequence[str]]:
  """The solutions of others, and the right one with something changed.

  Where there are few different solutions, one of them is chosen rather than
  written, and only another choice is a mistake worth telling apart.
  """
  answers = sorted({problem.answer for problem in problems})
  is_choice = len(answers) <= len(problems) / 2
  found = []
  for problem in problems:
    others = _others(problem.answer, answers, generator)
    changed = [] if is_choice else _changed(problem.answer, generator)
    texts = [*others, *changed]
    if generator.random() < 0.5:
      texts = [*changed, *others]
    texts = [text for text in dict.fromkeys(texts) if text.strip()]
    found.append([text for text in texts if text != problem.answer])
  return found


def _others(
  answer: str, answers: Sequence[str], generator: np.random.Generator
) -> list[str]:
  """Some that look alike: of the same symbols, and about as long."""
  order = [answers[number] for number in generator.permutation(len(answers))]
  alike = [other for other in order if _looks(other) == _looks(answer)]
  some = dict.fromkeys([*alike, *order])  # each once
  some = [other for other in some if other != answer][:_DRAWN]
  some.sort(key=lambda other: abs(len(other) - len(answer)))
  return some[:3]


def _looks(answer: str) -> tuple[bool, ...]:
  patterns = (r"\d", "[A-Za-z]", r"\s", r"[^\w\s]")
  return tuple(bool(re.search(pattern, answer)) for pattern in patterns)


def _changed(answer: str, generator: np.random.Generator) -> list[str]:
  """With another digit or letter, and with two words or numbers exchanged."""
  found = []
  is_number = bool(re.search(r"\d", answer))
  symbols = _DIGITS if is_number else _LETTERS
  places = [at for at, symbol in enumerate(answer) if symbol in symbols]
  # A short word with another letter is none that anybody would write.
  if len(places) >= (1 if is_number else 4):
    place = places[int(generator.integers(len(places)))]
    others = symbols.replace(answer[place], "")
    new = others[int(generator.integers(len(others)))]
    found.append(f"{answer[:place]}{new}{answer[place + 1 :]}")
  words = list(_WORD.finditer(answer))
  swaps = [
    (first, second)
    for first, second in itertools.combinations(words, 2)
    if first[0] != second[0] and _looks(first[0])[0] == _looks(second[0])[0]
  ]
  if re.search("[+*×]", answer):
    swaps = []  # 3i + 2 is 2 + 3i, whatever a scorer says
  if swaps:
    first, second = swaps[int(generator.integers(len(swaps)))]
    between = answer[first.end() : second.start()]
    head, tail = answer[: first.start()], answer[second.end() :]
    found.append(f"{head}{second[0]}{between}{first[0]}{tail}")
  return [found[number] for number in generator.permutation(len(found))]
