"""The `math` verifier: is the completion's answer the gold expression?

Both are read by this package's own exact reader first. Only what is outside
its grammar (sums, integrals, limits) goes to math-verify, wrapped so that it
must consume all of it; math-verify's own reading and comparing is too lenient
to pay rewards on (it takes 1/2^99 for 1/2^98 and a pair for a set). All of it
can loop on a hostile completion, so it runs in killable processes only.

math-verify: https://github.com/huggingface/Math-Verify
"""

import logging
import re

import latex2sympy2_extended
import math_verify
import sympy

from mrl_jax.tasks import exactly, extract, numerals, tokens, values, verify
from mrl_jax.tasks.dataset import Problem, Verifier

# It warns at every use that the deadline is its caller's duty; it is, here.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_WHOLE = 200  # characters up to which a whole completion is tried as answer
_ADJACENT = re.compile(r"\d(?:\s|\\[,;: ]|\\q?quad)+\d")


def check(completion: str, problem: Problem) -> verify.Verdict:
  """Compares the completion's answer with the gold one, exactly."""
  marked = extract.marked(problem.answer)
  gold = _read(problem.answer if marked is None else marked)
  if gold is None:
    return verify.GOLD_UNPARSED
  answer = _answer(completion, gold)
  if answer is None:
    return verify.UNPARSED
  return verify.CORRECT if _agree(gold, answer) else verify.WRONG


verifier = Verifier(check)


def _answer(completion: str, gold):
  """What the completion answers; None if nothing, or nothing readable.

  The strongest mark that is there decides, readable or not.
  """
  marked = extract.marked(completion)
  if marked is not None:
    return _read(marked)
  whole, cued = completion.strip(), extract.cued(completion)
  formula = extract.last_formula(completion)
  if cued:
    answer = _read(cued)
  elif formula and _in_sentence(whole, formula):
    return _read(formula)
  elif len(whole) <= _WHOLE and not _in_sentence(whole, formula):
    answer = _read(whole)
  else:
    answer = None
  # Without a mark most words are prose and no answer.
  if isinstance(answer, values.Text) and not isinstance(gold, values.Text):
    answer = None
  if answer is None and not cued and "\\" not in completion:
    found = numerals.free_standing(completion)
    return _quantity(found[-1]) if found else None
  return answer


def _in_sentence(whole: str, formula: str | None) -> bool:
  """Whether words stand around the mathematics, or it has several lines."""
  if formula is not None:
    return len(formula) + 6 < len(whole)
  words = re.search(r"[A-Za-z]{2,}\s+[A-Za-z]{2,}", whole)
  return "\n" in whole or bool(words and re.search(r"[\d\\]", whole))


def _read(text: str):
  """Reads by our own grammar, as a number with words, or by math-verify's."""
  try:
    return values.read(text)
  except tokens.TooLarge:  # for any reader
    return None
  except tokens.Unreadable:
    found = numerals.stated(text)  # 5 apples
    return _foreign(text) if found is None else _quantity(found)


def _quantity(number: numerals.Number) -> values.Quantity:
  fraction, percent = number
  value = sympy.Rational(fraction.numerator, fraction.denominator)
  if percent:
    return values.Quantity(value / 100, "%")
  return values.Quantity(value, "")


def _agree(gold, answer) -> bool:
  if isinstance(gold, sympy.Basic) or isinstance(answer, sympy.Basic):
    return _foreign_agree(gold, answer)
  return values.agree(gold, answer)


def _foreign(text: str):
  """Reads by math-verify's parser what our own grammar lacks.

  Brackets around it make the parser fail where it would stop early.
  """
  if not re.search(r"\\[a-zA-Z]{2,}", text) or _ADJACENT.search(text):
    return None
  if re.search(r"\\(?:text|mathrm|mbox)\b", text):
    return None
  text = re.sub(r"\\[()\[\]]|\$", "", text)
  normal = latex2sympy2_extended.normalize_latex(
      text,
      latex2sympy2_extended.NormalizationConfig(
          basic_latex=True, units=False, malformed_operators=True, nits=True,
          boxed="none", equations=False,
      ),
  )  # fmt: skip
  try:
    value = latex2sympy2_extended.latex2sympy(
      f"({normal})", is_real=True, normalization_config=None
    )
  except Exception:  # the parser raises bare Exception
    return None
  return value if isinstance(value, sympy.Basic) else None


def _foreign_agree(gold, answer) -> bool:
  """Compares where at least one side is an expression of math-verify's."""
  sides = [
    side.value if isinstance(side, values.Quantity) else side
    for side in (gold, answer)
  ]
  if not all(isinstance(side, sympy.Basic) for side in sides):
    return False
  expressions_only = [isinstance(side, sympy.Expr) for side in sides]
  if all(expressions_only):
    return exactly.same(sides[0].doit(), sides[1].doit())
  if any(expressions_only) or type(sides[0]) is not type(sides[1]):
    return False
  return math_verify.verify(
    *sides, timeout_seconds=None, allow_set_relation_comp=False
  )
