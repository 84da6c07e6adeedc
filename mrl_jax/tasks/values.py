"""The shapes an answer can take around its expressions, and when two agree.

A value is an expression, a piece of text, a collection (pair, set, interval,
list, matrix, union) or a relation. Two values agree when their kinds do and
their parts are equal exactly: by algebra, or to 60 of 100 digits at several
points where algebra has no answer, relative to their size, so that 1/2^99 is
not 1/2^98.
"""

import re
from typing import NamedTuple

import sympy

from mrl_jax.tasks import exactly, expressions, spelling, tokens

_UNORDERED = ("set", "list", "union")
_PAIRS = {
    "()": "tuple", "[]": "closed", "[)": "half-open", "(]": "open-half",
    "{}": "set",
}  # fmt: skip
_FLIP = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
_RELATION = re.compile(r"<=|>=|!=|=|<|>")
_WORDS = re.compile(r"\(?([A-Za-z]+(?:[' -][A-Za-z]+)*)\)?")


_SHORT_WORDS = frozenset(
  """am an as at be by do go he hi if in is it me my no of oh ok on or ox so to
  up us we""".split()  # noqa: SIM905
)
_NUMERAL = re.compile(r"(\d[\dA-Fa-f]*)_(?:\{\s*)?(\d+|[a-z]{3,})(?:\s*\})?")
_NEXT_ROW = re.compile(r"\\\\(?:\s*\[\s*-?[\d.]+\s*[a-z]{2}\s*\])?")


class Text(NamedTuple):
  words: str


class Collection(NamedTuple):
  kind: str
  items: tuple


class Relation(NamedTuple):
  signs: tuple[str, ...]  # a < x <= b has two
  sides: tuple


class Quantity(NamedTuple):
  value: sympy.Expr
  unit: str  # "" where none is given


def read(text: str) -> Text | Collection | Relation | Quantity:
  """Reads an answer, all of it.

  Raises:
    tokens.Unreadable: for what is none of these.
  """
  text = spelling.normalise(text)
  if not text:
    raise tokens.Unreadable("empty")
  return _read(text)


def _read(text: str):
  if not text:
    raise tokens.Unreadable("nothing where a value should be")
  words = _prose(text)
  if words is not None:
    return Text(words)
  if r"\begin" in text:
    return _matrix(text)
  numeral = _NUMERAL.fullmatch(text)
  if numeral:  # 101_2; other digits are another answer, whatever the value
    parts = tuple(Text(part.lower()) for part in numeral.groups())
    return Collection("numeral", parts)
  parts = _split(text, r"\\cup(?![a-zA-Z])")
  if len(parts) > 1:
    return Collection("union", tuple(_read(part) for part in parts))
  items = _split(text, r",|;|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])")
  items = [item for item in items if item]
  if len(items) > 1:
    return Collection("list", tuple(_read(item) for item in items))
  parts = _split(text, ":")
  if len(parts) == 2 and _prose(parts[0]) is not None:  # a label
    return _read(parts[1])
  if len(parts) > 1:  # a ratio, a time of day
    return Collection("ratio", tuple(_read(part) for part in parts))
  collection = _bracketed(text)
  if collection is not None:
    return collection
  relation = _relation(text)
  if relation is not None:
    return relation
  if r"\pm" in text:
    both = [_quantity(text.replace(r"\pm", sign)) for sign in "+-"]
    return Collection("list", tuple(both))
  return _quantity(text)


def _prose(text: str) -> str | None:
  """The words that `text` is; None for what is no prose.

  Letters are prose from three together on, but for pi and the like; of two,
  those that are an English word on their own.
  """
  match = _WORDS.fullmatch(" ".join(text.split()))
  if match is None:
    return None
  words = match[1]
  longest = max(map(len, re.findall("[A-Za-z]+", words)))
  if words.lower() in _SHORT_WORDS:
    return words.lower()
  return words.lower() if longest > 2 and words not in tokens.NAMES else None


def _quantity(text: str) -> Quantity:
  if text.endswith("%"):
    return Quantity(expressions.read(text), "%")
  unit = spelling.UNIT.search(text)
  if unit is None:
    return Quantity(expressions.read(text), "")
  value = expressions.read(text[: unit.start()])
  return Quantity(value, unit[1].rstrip("s") + (unit["power"] or ""))


def _split(text: str, separator: str) -> list[str]:
  """Splits at `separator` outside of all brackets."""
  parts, depth, start, position = [], 0, 0, 0
  pattern = re.compile(separator)
  while position < len(text):
    match = pattern.match(text, position) if depth == 0 else None
    if match:
      parts.append(text[start:position].strip())
      start = position = match.end()
      continue
    depth += (text[position] in "([{⦃") - (text[position] in ")]}⦄")
    position += 1
  return [*parts, text[start:].strip()]


def _bracketed(text: str) -> Collection | None:
  """Reads `text` as one collection if a pair of brackets spans it."""
  opened, closed = text[0], text[-1]
  kind = _PAIRS.get(
    {"⦃": "{"}.get(opened, opened) + {"⦄": "}"}.get(closed, closed)
  )
  depth = 0
  for index, character in enumerate(text):
    depth += (character in "([{⦃") - (character in ")]}⦄")
    if depth == 0 and index < len(text) - 1:
      return None
  if kind is None or depth:
    return None
  inner = text[1:-1].strip()
  items = _split(inner, ",|;") if inner else []
  if len(items) < 2 and opened != "⦃":
    return None
  if any(not item for item in items):
    raise tokens.Unreadable(f"an empty place in {text!r}")
  return Collection(kind, tuple(_read(item) for item in items))


def _relation(text: str):
  member = re.fullmatch(r"[a-zA-Z]\s*(?:\\in(?![a-zA-Z])|∈)\s*(.+)", text)
  if member:
    return _read(member[1].strip())
  signs = tuple(_RELATION.findall(text))
  if not signs:
    return None
  sides = _split(text, _RELATION.pattern)
  if len(sides) != len(signs) + 1:
    raise tokens.Unreadable(f"a relation inside brackets in {text!r}")
  call = re.fullmatch(r"([a-zA-Z])\([a-zA-Z]\)", sides[0])
  if call:  # f(x) = ... defines f
    sides[0] = call[1]
  return Relation(signs, tuple(_read(side) for side in sides))


def _matrix(text: str) -> Collection:
  match = re.fullmatch(
    r"\\begin\{([pbB]?matrix)\}(.*)\\end\{\1\}", text, re.DOTALL
  )
  if match is None or r"\begin" in match[2]:
    raise tokens.Unreadable("not a matrix that is read here")
  rows = [row for row in _NEXT_ROW.split(match[2]) if row.strip()]
  return Collection(
    "matrix",
    tuple(
      Collection("row", tuple(_read(cell.strip()) for cell in row.split("&")))
      for row in rows
    ),
  )


def agree(a, b) -> bool:
  """Whether two values are the same answer."""
  a, b = _bare(a, b), _bare(b, a)
  if isinstance(a, Quantity) and isinstance(b, Quantity):
    return _agree_quantities(a, b)
  if isinstance(a, Collection) and isinstance(b, Collection):
    return _agree_collections(a, b)
  if isinstance(a, Relation) and isinstance(b, Relation):
    return _agree_relations(a, b)
  return isinstance(a, Text) and a == b


def _agree_quantities(a: Quantity, b: Quantity) -> bool:
  """Equal values; units count where both sides give one.

  50% is 1/2. Against a percentage, a bare number over 1 is read as one.
  """
  if a.unit and b.unit and a.unit != b.unit:
    return False
  if exactly.same(a.value, b.value):
    return True
  if (a.unit == "%") == (b.unit == "%"):
    return False
  percent, bare = (a, b) if a.unit == "%" else (b, a)
  value = bare.value
  return bool(value.is_Rational and abs(value) > 1) and exactly.same(
    percent.value * 100, value
  )


def _bare(value, other):
  """`x = 3` and `1 + 2 = 3` answer like 3, where the other is no relation."""
  if not isinstance(value, Relation) or isinstance(other, Relation):
    return value
  *heads, last = value.sides
  quantities = all(isinstance(head, Quantity) for head in heads)
  if set(value.signs) != {"="} or not quantities:
    return value
  named = len(heads) == 1 and isinstance(heads[0].value, sympy.Symbol)
  calculated = not any(head.value.free_symbols for head in heads)
  return last if named or calculated else value


def _agree_collections(a: Collection, b: Collection) -> bool:
  unordered = a.kind in _UNORDERED and b.kind in _UNORDERED
  unions = "union" in (a.kind, b.kind)
  if a.kind != b.kind and (not unordered or unions):
    return False
  if not unordered:
    return len(a.items) == len(b.items) and all(map(agree, a.items, b.items))
  return _covers(a.items, b.items) and _covers(b.items, a.items)


def _covers(items: tuple, others: tuple) -> bool:
  return all(any(agree(item, other) for other in others) for item in items)


def _agree_relations(a: Relation, b: Relation) -> bool:
  if len(a.signs) != len(b.signs):
    return False
  turned = Relation(
    tuple(_FLIP[sign] for sign in reversed(b.signs)), b.sides[::-1]
  )
  for other in (b, turned):
    if a.signs == other.signs and all(map(agree, a.sides, other.sides)):
      return True
    if a.signs == other.signs and len(a.signs) == 1 and _scaled(a, other):
      return True
  return False


def _scaled(a: Relation, b: Relation) -> bool:
  """Whether one relation is the other times a constant: 2y = 4x, y = 2x."""
  sides = (*a.sides, *b.sides)
  if not all(isinstance(side, Quantity) for side in sides):
    return False
  left = sides[0].value - sides[1].value
  right = sides[2].value - sides[3].value
  if exactly.same(right, sympy.Integer(0)):
    return exactly.same(left, sympy.Integer(0))
  ratio = sympy.simplify(left / right)
  if not ratio.is_number or ratio.is_zero or not ratio.is_finite:
    return False
  return a.signs[0] in ("=", "!=") or bool(ratio.is_positive)
