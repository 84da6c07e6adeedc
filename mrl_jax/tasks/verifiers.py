"""The verifiers that come with the package, and how to name one's own.

`exact` compares texts, `numeric` numbers, and `math` mathematical expressions.
Each says `unparsed` where it found no answer, so that a model that does not
keep to the form can be told from one that is wrong. `rubric` weighs criteria.
"""

import decimal
import math
from typing import Any

from mrl_jax import named
from mrl_jax.tasks import extract, numerals, verify
from mrl_jax.tasks.dataset import Problem, Verifier


def exact_check(completion: str, problem: Problem) -> verify.Verdict:
  """Equal texts, but for white space; answer tags are looked into."""
  gold = " ".join(problem.answer.split())
  if not gold:
    return verify.GOLD_UNPARSED
  answer = extract.tagged(completion)
  answer = " ".join((completion if answer is None else answer).split())
  if not answer:
    return verify.UNPARSED
  return verify.CORRECT if answer == gold else verify.WRONG


def numeric_check(completion: str, problem: Problem) -> verify.Verdict:
  """Equal numbers, exactly: the answer's mark decides, else the last one."""
  marked = extract.marked(problem.answer)
  gold = numerals.stated(problem.answer if marked is None else marked)
  if gold is None:
    return verify.GOLD_UNPARSED
  answer = _number(completion)
  if answer is None:
    return verify.UNPARSED
  return verify.CORRECT if _same(gold, answer) else verify.WRONG


def _number(completion: str) -> numerals.Number | None:
  marked = extract.marked(completion)
  if marked is not None:
    return numerals.stated(marked)
  cued = extract.cued(completion)
  if cued is not None:
    return numerals.mentioned(cued)
  found = numerals.free_standing(completion)
  return found[-1] if found else None


def _same(a: numerals.Number, b: numerals.Number) -> bool:
  """Equality of numbers, 50% being 1/2.

  Against a percentage, a bare number over 1 is read as one: it is no share.
  """
  (a_value, a_percent), (b_value, b_percent) = a, b
  if a_percent == b_percent:
    return a_value == b_value
  percent, bare = (a_value, b_value) if a_percent else (b_value, a_value)
  return percent == bare * 100 or (percent == bare and abs(bare) > 1)


def is_number(value: Any) -> bool:
  """Whether a gold answer is a finite number; to Python, a bool is an int."""
  if isinstance(value, int):  # which may be beyond every float
    return not isinstance(value, bool)
  return isinstance(value, float | decimal.Decimal) and math.isfinite(value)


def written(number: int | float | decimal.Decimal) -> str:
  """A whole number without a point: pandas makes 5 a 5.0 in many columns."""
  text = format(decimal.Decimal(str(number)), "f")
  return text.rstrip("0").rstrip(".") if "." in text else text


exact = Verifier(exact_check, quick=True)
numeric = Verifier(numeric_check, quick=True)


def resolve(spec: str) -> Verifier:
  """The verifier that a flag names: a built-in, or `module:function`.

  One's own is called as `function(completion, problem)`, in a process with a
  deadline, and returns a bool, a reward or a `verify.Verdict`.

  Raises:
    ValueError: names the spec and what there is instead.
  """
  if spec == "math":
    from mrl_jax.tasks import mathematics  # half a second of sympy

    return mathematics.verifier
  if spec == "rubric":
    from mrl_jax.tasks import rubric  # which resolves its criteria here

    return rubric.verifier
  built_in = {"exact": exact, "numeric": numeric}
  if spec in built_in:
    return built_in[spec]
  if ":" not in spec:
    raise ValueError(
      f"verifier must be one of {[*built_in, 'math', 'rubric']} or"
      f" module:function, got {spec!r}"
    )
  check = named.find("verifier", spec, (Verifier,))
  return check if isinstance(check, Verifier) else Verifier(check)
