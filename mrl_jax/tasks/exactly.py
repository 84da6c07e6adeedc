"""Exact operations that refuse what would never end, and exact equality.

A completion can ask for 9^(9^9) or 1000000! in a few characters; each
operation here looks at the size of its result before working it out.
"""

import math

import sympy

from mrl_jax.tasks import tokens

_MAX_BITS = 100_000  # of a power's value; towers of exponents stop here
_MAX_FACTORIAL = 2_000


def rational(text: str) -> sympy.Rational:
  try:
    return sympy.Rational(text.rstrip("."))
  except (TypeError, ValueError):
    raise tokens.Unreadable(f"{text[:20]}... is no number read here") from None


def repeating(text: str, digits: str) -> sympy.Rational:
  """0.1\\overline{6} is 0.1 plus 6/90."""
  places = len(text.partition(".")[2])
  return sympy.Rational(int(digits), (10 ** len(digits) - 1) * 10**places)


def proper(top: sympy.Rational, bottom: sympy.Rational) -> sympy.Rational:
  """The fraction of a mixed number such as 2 1/3."""
  if not (top.is_Integer and bottom.is_Integer and top < bottom):
    raise tokens.Unreadable("two numbers with nothing between them")
  return top / bottom


def divide(top: sympy.Expr, bottom: sympy.Expr) -> sympy.Expr:
  if bottom.is_zero:
    raise tokens.Unreadable("division by zero")
  return top / bottom


def power(base: sympy.Expr, exponent: sympy.Expr) -> sympy.Expr:
  if base.is_Rational and exponent.is_Rational:
    size = max(abs(base.p), base.q)
    if abs(exponent) * math.log2(size + 1) > _MAX_BITS:
      raise tokens.TooLarge("a power too large to work out")
    if base == 0 and exponent < 0:
      raise tokens.Unreadable("division by zero")
  elif exponent.is_number and not abs(sympy.N(exponent)) < _MAX_BITS:
    raise tokens.TooLarge("a power too large to work out")
  return base**exponent


def root(value: sympy.Expr, degree: sympy.Expr) -> sympy.Expr:
  """The real root where there is one: the cube root of -8 is -2."""
  if degree.is_Integer and degree.is_odd and value.is_negative:
    return -root(-value, degree)
  return power(value, divide(sympy.Integer(1), degree))


def factorial(value: sympy.Expr) -> sympy.Expr:
  if value.is_number and not (value.is_Integer and value >= 0):
    raise tokens.Unreadable(f"{value} has no factorial here")
  if value.is_number and value > _MAX_FACTORIAL:
    raise tokens.TooLarge("a factorial too large to work out")
  return sympy.factorial(value)


def binomial(top: sympy.Expr, bottom: sympy.Expr) -> sympy.Expr:
  if top.is_number and not abs(top) <= _MAX_FACTORIAL:
    raise tokens.TooLarge("a binomial too large to work out")
  return sympy.binomial(top, bottom)


def same(a: sympy.Expr, b: sympy.Expr) -> bool:
  """Exact equality of two expressions."""
  if a == b:
    return True
  if a.is_Rational and b.is_Rational:
    return False
  if any(value.is_infinite or value is sympy.nan for value in (a, b)):
    return False
  symbols = sorted(a.free_symbols | b.free_symbols, key=str)
  tested = 0
  for trial in range(5 if symbols else 1):
    # Fixed points off every grid, of both signs.
    point = {
        symbol: sympy.Rational((-1) ** (trial + index) * (97 + 31 * trial),
                               89 + 17 * index)
        for index, symbol in enumerate(symbols)
    }  # fmt: skip
    verdict = _close(a.subs(point), b.subs(point))
    if verdict is False:
      return False
    tested += verdict is True
  if tested >= (3 if symbols else 1):
    return True
  return sympy.simplify(a - b) == 0


def _close(a: sympy.Expr, b: sympy.Expr) -> bool | None:
  """Agreement to 60 digits; None where the values say nothing."""
  values = [sympy.N(value, 100) for value in (a, b, a - b)]
  if not all(value.is_number and value.is_finite for value in values):
    return None
  size = max(abs(values[0]), abs(values[1]))
  if size < sympy.Float("1e-50"):
    return None
  return bool(abs(values[2]) < size * sympy.Float("1e-60"))
