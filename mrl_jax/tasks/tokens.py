"""Cuts an answer into tokens: numbers, commands, letters and marks.

A run of letters is a known name, or else a product of its letters as in
LaTeX; a long run is a word, and words are no mathematics.
"""

import re
from typing import NamedTuple

FUNCTIONS = frozenset(
  """sin cos tan cot sec csc arcsin arccos arctan asin acos atan sinh cosh tanh
  exp ln log abs""".split()  # noqa: SIM905
)
GREEK = frozenset(
  """alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta kappa
  lambda mu nu xi rho sigma tau phi varphi chi psi omega""".split()  # noqa: SIM905
)
# Read without a backslash too; nu and xi might be two letters each.
NAMES = FUNCTIONS | {"pi", "sqrt", "infty"} | {g for g in GREEK if len(g) > 2}
_TOKEN = re.compile(
  r"(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3}(?![\w.]))?)"
  r"|\\(?P<command>[a-zA-Z]+)|(?P<word>[a-zA-Z]+)"
  r"|(?P<mark>[-+*/^!%°(){}\[\]|_])|(?P<space>\s+)"
)


class Unreadable(ValueError):
  """The text is not an expression of this grammar."""


class TooLarge(Unreadable):
  """It may be one, but reading it to the end would take too long."""


class Token(NamedTuple):
  kind: str  # number, command, letter, mark, end
  text: str
  spaced: bool  # white space stood before it


END = Token("end", "", False)


def cut(text: str) -> list[Token]:
  tokens, position, spaced = [], 0, False
  while position < len(text):
    match = _TOKEN.match(text, position)
    if match is None:
      raise Unreadable(f"unknown character {text[position]!r} in {text!r}")
    position, kind = match.end(), match.lastgroup
    if kind == "word":
      if spaced and tokens and tokens[-1].kind == "number":
        _refuse_unit(match["word"])
      tokens += _word(match["word"], spaced)
    elif kind != "space":
      tokens.append(Token(kind, match[kind], spaced))
    spaced = kind == "space"
  return tokens


def _refuse_unit(word: str) -> None:
  """In `5 cats` and `3/4 cup` the letters are no product, as in `2 xyz`."""
  product = set(word) <= set("abcdxyz")
  if len(word) > 2 and word not in NAMES and not product:
    raise Unreadable(f"{word!r} is a unit")


def _word(word: str, spaced: bool) -> list[Token]:
  """A known name is a command, any other word a product of its letters."""
  if word in NAMES:
    return [Token("command", word, spaced)]
  if word == "oo":
    return [Token("command", "infty", spaced)]
  if word.endswith("pi") and len(word) > 2:  # as in 2xpi
    return [*_word(word[:-2], spaced), Token("command", "pi", False)]
  if len(word) > 4:
    raise Unreadable(f"{word!r} is a word")
  return [
    Token("letter", letter, spaced and index == 0)
    for index, letter in enumerate(word)
  ]
