"""A reward of weighted criteria: R = sum_c w_c s_c / sum_c w_c.

A row of a file says in its rubric what a good completion does: a list of
`{"criterion": KIND, "value": ..., "weight": w}`, or that list as JSON text.
The weight is 1 where none is given, and `description` is for people. A
criterion is met or not, s_c being 1 or 0; only a function of one's own may
say something between. The kinds:

  contains, lacks         the value is a piece of the text, or is not
  matches                 the value is a regular expression found in the text
  most_words, least_words how many words there are, apart by white space
  exact, numeric, math    the verifier of that name; the value is its gold
                          answer, without one the row's answer is
  module:function         one's own verifier, with a reward in [0, 1]

A completion that meets every criterion in full is correct.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from mrl_jax.tasks import verifiers, verify
from mrl_jax.tasks.dataset import Problem, Verifier

_GOLD = ("exact", "numeric", "math")  # compare with an answer
_TEXT = ("contains", "lacks", "matches")
_WORDS = ("most_words", "least_words")
_BUILT_IN = (*_TEXT, *_WORDS, *_GOLD)
_MOST = 1e6
_FIELDS = {"criterion", "value", "weight", "description"}


class Criterion(NamedTuple):
  """One criterion, checked; `value` None stands for the row's answer."""

  kind: str
  value: str | int | None
  weight: float


def read(rubric: Any, answer: str) -> tuple[Criterion, ...]:
  """A row's criteria; `answer` is the row's, or "".

  Raises:
    ValueError: the rubric is ill-formed; says how, and the same for all rows
      that are so in the same way.
  """
  if isinstance(rubric, str):
    try:
      rubric = json.loads(rubric)
    except (ValueError, RecursionError):
      raise ValueError("not JSON") from None
  if not isinstance(rubric, list):
    raise ValueError("not a list")
  if not rubric:
    raise ValueError("empty")
  return tuple(_criterion(entry, answer) for entry in rubric)


def _criterion(entry: Any, answer: str) -> Criterion:
  if not isinstance(entry, Mapping):
    raise ValueError("a criterion is not an object")
  # A table has a column for every field, whether a row uses it or not.
  entry = {key: value for key, value in entry.items() if value is not None}
  if not set(entry) <= _FIELDS:
    raise ValueError(f"a field is none of {', '.join(sorted(_FIELDS))}")
  kind, weight = entry.get("criterion"), entry.get("weight", 1)
  if not isinstance(kind, str) or not (kind in _BUILT_IN or ":" in kind):
    raise ValueError(
      f"a criterion is neither one of {', '.join(_BUILT_IN)} nor"
      " module:function"
    )
  if not verifiers.is_number(weight) or not 0 < weight <= _MOST:
    raise ValueError(f"a weight is not a number above 0 and up to {_MOST:g}")
  try:
    value = _value(kind, entry.get("value"), answer)
  except ValueError as error:
    raise ValueError(f"the value of {kind} is {error}") from None
  return Criterion(kind, value, float(weight))


def _value(kind: str, value: Any, answer: str) -> str | int | None:
  """The value as the kind's check reads it."""
  if kind in _WORDS:
    return _whole(value)
  if kind in _TEXT:
    return _text(kind, value)
  if value is None:
    if kind in _GOLD and not answer.strip():
      raise ValueError("missing, as is the row's answer")
    return None
  if verifiers.is_number(value):
    return verifiers.written(value)
  if not isinstance(value, str):
    raise ValueError("neither text nor a number")
  if not value.strip():
    raise ValueError("empty")
  return value


def _whole(value: Any) -> int:
  """3, 3.0 and "3" are whole numbers."""
  if isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value):
    return int(value)
  if not verifiers.is_number(value) or value < 0 or value != int(value):
    raise ValueError("not a whole number")
  return int(value)


def _text(kind: str, value: Any) -> str:
  if not isinstance(value, str):
    raise ValueError("not text")
  if not value:
    raise ValueError("empty")
  if kind == "matches":
    try:
      re.compile(value)
    except (re.error, RecursionError, OverflowError):
      raise ValueError("not a regular expression") from None
  return value


def check(completion: str, problem: Problem) -> verify.Verdict:
  """The weighted mean of the scores; unscored where one of them is.

  Raises:
    ValueError: the problem has no rubric, or a function's reward is not in
      [0, 1].
  """
  criteria = problem.extra.get("rubric")
  if not criteria:
    raise ValueError(
      f"problem {problem.id!r} has no rubric: this verifier is for files with"
      " a rubric column"
    )
  scores = []
  for criterion in criteria:
    found = _score(criterion, completion, problem)
    if math.isnan(found.reward):
      return found
    if not 0 <= found.reward <= 1:
      raise ValueError(
        f"criterion {criterion.kind!r} must have a reward in [0, 1], got"
        f" {found.reward}"
      )
    scores.append(found.reward)
  weights = [criterion.weight for criterion in criteria]
  total = math.fsum(w * s for w, s in zip(weights, scores, strict=True))
  met = min(scores) == 1
  outcome = verify.Outcome.correct if met else verify.Outcome.wrong
  return verify.Verdict(total / math.fsum(weights), outcome)


verifier = Verifier(check)


def _score(
  criterion: Criterion, completion: str, problem: Problem
) -> verify.Verdict:
  kind, value, _ = criterion
  if kind in _TEXT or kind in _WORDS:
    met = _SIMPLE[kind](completion, value)
    return verify.CORRECT if met else verify.WRONG
  if value is not None:
    problem = problem._replace(answer=value)
  judge = verifiers.resolve(kind).check
  return verify.as_verdict(judge(completion, problem))


_SIMPLE = {
  "contains": lambda text, value: value in text,
  "lacks": lambda text, value: value not in text,
  "matches": lambda text, value: re.search(value, text) is not None,
  "most_words": lambda text, value: len(text.split()) <= value,
  "least_words": lambda text, value: len(text.split()) >= value,
}
