"""Reads an answer, LaTeX or plain, into an exact value that can be compared.

A recursive descent over the whole string: what it cannot consume to the end
it refuses, since a reader that stops early takes `4\\sqrt(2)` for 4. Numbers
are rationals, never floats, and two numbers side by side are an error, never
a product. What kind of brackets stood around a list is kept: a pair is not a
set, and an open interval not a closed one.
"""

import sympy

from mrl_jax.tasks import exactly, tokens

_MAX_DEPTH = 60
_FUNCTIONS = {
    "sin": sympy.sin, "cos": sympy.cos, "tan": sympy.tan, "cot": sympy.cot,
    "sec": sympy.sec, "csc": sympy.csc, "arcsin": sympy.asin,
    "arccos": sympy.acos, "arctan": sympy.atan, "asin": sympy.asin,
    "acos": sympy.acos, "atan": sympy.atan, "sinh": sympy.sinh,
    "cosh": sympy.cosh, "tanh": sympy.tanh, "exp": sympy.exp,
    "ln": sympy.log, "log": sympy.log, "abs": sympy.Abs,
}  # fmt: skip
_OF_ANGLES = ("sin", "cos", "tan", "cot", "sec", "csc")
_CLOSERS = ("rfloor", "rceil", "rvert")
_CONSTANTS = {
    "pi": sympy.pi, "infty": sympy.oo, "e": sympy.E, "i": sympy.I,
}  # fmt: skip


def read(text: str) -> sympy.Expr:
  """Reads one expression, all of it.

  Raises:
    Unreadable: at the first token that does not belong.
  """
  reader = _Reader(tokens.cut(text))
  value = reader.sum()
  if reader.next.kind != "end":
    raise tokens.Unreadable(f"{reader.next.text!r} does not belong in {text!r}")
  return value


class _Reader:
  """One pass over the tokens; each method reads one level of precedence."""

  def __init__(self, found: list[tokens.Token]):
    self._tokens = found
    self._at = 0
    self._depth = 0
    self._bars = 0
    self._angles = 0  # functions of an angle that are being read

  @property
  def next(self) -> tokens.Token:
    return self._peek(0)

  def _peek(self, ahead: int) -> tokens.Token:
    at = self._at + ahead
    return self._tokens[at] if at < len(self._tokens) else tokens.END

  def _take(self) -> tokens.Token:
    token = self.next
    self._at += 1
    return token

  def _is(self, *marks: str) -> bool:
    return self.next.kind == "mark" and self.next.text in marks

  def _expect(self, mark: str) -> None:
    if not self._is(mark):
      raise tokens.Unreadable(f"expected {mark!r}, found {self.next.text!r}")
    self._at += 1

  def sum(self) -> sympy.Expr:
    self._depth += 1
    if self._depth > _MAX_DEPTH:
      raise tokens.TooLarge("nested too deeply")
    value = self._product()
    while self._is("+", "-"):
      minus = self._take().text == "-"
      term = self._product()
      value = value - term if minus else value + term
    self._depth -= 1
    return value

  def _product(self) -> sympy.Expr:
    value = self._signed()
    while True:
      if self._is("*"):
        self._at += 1
        value = value * self._signed()
      elif self._is("/"):
        self._at += 1
        value = exactly.divide(value, self._signed())
      elif self._starts_factor():
        value = value * self._power()
      else:
        return value

  def _starts_factor(self) -> bool:
    """Whether the next token multiplies the one before it by standing there."""
    if self.next.kind == "number":
      before = self._tokens[self._at - 1]
      if before.kind == "number" or self.next.spaced:
        raise tokens.Unreadable("two numbers with nothing between them")
      return True
    if self.next.kind == "mark":
      return self._is("(", "{") or (self._is("|") and not self._bars)
    return self.next.kind != "end" and self.next.text not in _CLOSERS

  def _signed(self) -> sympy.Expr:
    minus = False
    while self._is("+", "-"):
      minus ^= self._take().text == "-"
    value = self._power()
    return -value if minus else value

  def _power(self) -> sympy.Expr:
    value = self._postfix(self._atom())
    if not self._is("^"):
      return value
    self._at += 1
    return self._postfix(exactly.power(value, self._signed()))

  def _postfix(self, value: sympy.Expr) -> sympy.Expr:
    while self._is("!", "%", "°"):
      match self._take().text:
        case "!":
          value = exactly.factorial(value)
        case "%":
          value = value / 100
        case "°" if self._angles:  # elsewhere 90° answers like 90
          value = value * sympy.pi / 180
    return value

  def _atom(self) -> sympy.Expr:
    token = self._take()
    if token.kind == "number":
      return self._number(token.text)
    if token.kind == "letter":
      return self._symbol(token.text)
    if token.kind == "command":
      return self._command(token.text)
    if token.kind == "mark" and token.text in "({":
      value = self.sum()
      self._expect(")" if token.text == "(" else "}")
      return value
    if token.kind == "mark" and token.text == "|":
      self._bars += 1
      value = self.sum()
      self._expect("|")
      self._bars -= 1
      return sympy.Abs(value)
    raise tokens.Unreadable(f"{token.text!r} starts no expression")

  def _number(self, text: str) -> sympy.Expr:
    value = exactly.rational(text)
    if self.next.text == "overline" and "." in text:
      self._at += 1
      return value + exactly.repeating(text, self._braced_digits())
    if self.next.text in ("frac", "dfrac", "tfrac") and "." not in text:
      return self._mixed(value)
    first, slash, second = self.next, self._peek(1), self._peek(2)
    kinds = (first.kind, slash.text, second.kind)
    if kinds == ("number", "/", "number") and first.spaced:
      self._at += 3
      return value + exactly.proper(
        exactly.rational(first.text), exactly.rational(second.text)
      )
    return value

  def _mixed(self, whole: sympy.Expr) -> sympy.Expr:
    """`2\\frac{1}{3}` is 7/3, but `2\\frac{\\pi}{3}` a product."""
    start = self._at
    self._at += 1
    top, bottom = self._argument(), self._argument()
    if top.is_Integer and bottom.is_Integer and 0 <= top < bottom:
      return whole + exactly.divide(top, bottom)
    self._at = start
    return whole

  def _symbol(self, name: str) -> sympy.Expr:
    if not self._is("_"):
      return _CONSTANTS.get(name) or sympy.Symbol(name, real=True)
    self._at += 1
    return sympy.Symbol(f"{name}_{self._argument()}", real=True)

  def _command(self, name: str) -> sympy.Expr:
    if name in ("frac", "dfrac", "tfrac", "cfrac"):
      top = self._argument()
      return exactly.divide(top, self._argument())
    if name == "sqrt":
      return self._root()
    if name in ("binom", "dbinom", "tbinom"):
      top, bottom = self._argument(), self._argument()
      return exactly.binomial(top, bottom)
    if name in _FUNCTIONS:
      return self._function(name)
    if name in ("lfloor", "lceil", "lvert"):
      return self._fenced(name)
    if name in _CONSTANTS:
      return _CONSTANTS[name]
    if name in tokens.GREEK or name.lower() in tokens.GREEK:
      return self._symbol(name)
    raise tokens.Unreadable(f"\\{name} is not read here")

  def _fenced(self, name: str) -> sympy.Expr:
    value = self.sum()
    if self._take().text != "r" + name[1:]:
      raise tokens.Unreadable(f"\\{name} is not closed")
    apply = {"lfloor": sympy.floor, "lceil": sympy.ceiling}
    return apply.get(name, sympy.Abs)(value)

  def _root(self) -> sympy.Expr:
    degree = sympy.Integer(2)
    if self._is("["):
      self._at += 1
      degree = self.sum()
      self._expect("]")
    return exactly.root(self._argument(), degree)

  def _function(self, name: str) -> sympy.Expr:
    apply, base, exponent = _FUNCTIONS[name], None, None
    if self._is("_") and name == "log":
      self._at += 1
      base = self._argument()
    if self._is("^"):
      self._at += 1
      exponent = self._argument()
      if exponent == -1:
        raise tokens.Unreadable(f"{name}^-1 is ambiguous")
    angle = name in _OF_ANGLES
    self._angles += angle
    value = self._operand()
    self._angles -= angle
    value = apply(value) if base is None else sympy.log(value, base)
    return value if exponent is None else exactly.power(value, exponent)

  def _operand(self) -> sympy.Expr:
    """A function's argument: brackets, or all that is joined to it."""
    if self._is("(", "{"):
      return self._atom()
    value = self._power()
    while self.next.kind in ("letter",) or self.next.text in _CONSTANTS:
      value = value * self._power()
    return value

  def _argument(self) -> sympy.Expr:
    """A LaTeX argument: braces, brackets, or a single digit or symbol."""
    if self.next.kind == "number" and len(self.next.text) > 1:
      digits = self._take()
      if not digits.text.isdigit():
        raise tokens.Unreadable("a decimal needs braces here")
      self._at -= 1
      self._tokens[self._at] = digits._replace(text=digits.text[1:])
      return exactly.rational(digits.text[0])
    if self.next.kind == "number":
      return exactly.rational(self._take().text)
    return self._atom()

  def _braced_digits(self) -> str:
    self._expect("{")
    token = self._take()
    self._expect("}")
    if token.kind != "number" or not token.text.isdigit():
      raise tokens.Unreadable("\\overline needs digits")
    return token.text
