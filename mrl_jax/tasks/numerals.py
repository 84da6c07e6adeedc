"""The number in an answer, and the numbers in a sentence, exactly.

An answer in a mark must be a number as a whole: a label (`x =`), the number
and a unit, and nothing else, since whatever else stands there (`a - 5`,
`< 5`, `log 5`) makes another value of it. A sentence may have words around
its numbers, but a number that is part of an expression is none.
"""

import re
from fractions import Fraction

Number = tuple[Fraction, bool]  # its value, and whether it is a percentage

_SCALES = {
  "dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6,
  "billion": 10**9, "trillion": 10**12,
}  # fmt: skip
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!,?\d)|\d+)(?:\.\d+)?|\.\d+"
_DECIMAL = rf"(?:{_DIGITS})(?:[eE][+-]?\d{{1,3}}(?![\w.]))?"
_NUMBER = re.compile(
  rf"(?P<sign>(?<![\w)\]}}.,])[-+])?(?:[$€£¥](?P<late_sign>-)?)?"
  rf"(?:(?P<whole>\d+)?\s?\\[dt]?frac\s?\{{(?P<top>-?{_DECIMAL})\}}"
  rf"\{{(?P<bottom>{_DECIMAL})\}}"
  rf"|(?<![\w.])(?P<first>{_DECIMAL})"
  rf"(?:\s?/\s?(?P<second>{_DECIMAL})(?!\s?/))?)"
  rf"(?:\s{{1,3}}(?P<scale>{'|'.join(_SCALES)})\b)?"
  r"(?:\s?(?P<percent>\\?%|percent\b|per cent\b))?"
)
# What makes the number beside it part of a larger expression, or of a name.
_JOINED_AFTER = re.compile(
  r"[A-Za-z]*[\d_]|(?![mgshlL])[A-Za-z]\b|\s?(?:[\^*+×·÷(\[{!√π]"
  r"|/\s?[\w\\(]|[-−]\s?(?:[\d(\\]|[A-Za-z]\b)"
  r"|[xyznkieπ]\b|\\(?!text\b|mathrm\b|\)|\]|\$|circ\b))"
)
_JOINED_BEFORE = re.compile(
  r"(?:[\^_*+/×·÷√π)}<>≤≥≠≈]|(?:\d|\b[A-Za-z]|[)}\]])\s?-|\w-|\\[a-zA-Z]+"
  r"|\b(?:not|sqrt|root|log|ln|sin|cos|tan|minus|negative))\s?$"
  r"|[\w^)}\]][({\[]\s?$"
)
# A name, an angle, or a calculation: `x_1 =`, `Total cost:`, `72 - 3 =`.
_LABEL = (
  r"(?:(?:m?\\angle\s?[A-Z]+|\\[A-Za-z]+|[A-Za-z][A-Za-z\s'.,()]*)"
  r"(?:_\{?\w\}?)?\s?[=:]"
  r"|(?:(?:[-\d\s.,+*/()×÷·$%]|\\(?:times|cdot|div)(?![A-Za-z]))+=)+)"
)
_UNIT = (
  r"(?!(?:and|or|plus|minus|over|choose)\b)"
  r"(?:°|(?:[mgshlL](?![A-Za-z])|[A-Za-z]{2})(?:(?:[-/']|\.?\s)?[A-Za-z])*)"
)
_STATED = re.compile(rf"(?:{_LABEL})?\s*{_NUMBER.pattern}\s*(?:{_UNIT})?[\s.]*")
_BOLD = re.compile(r"(?<![\w)\]}])\*\*(?=\S)|(?<=\S)\*\*(?![\w(\\])")
_MATHEMATICS = re.compile(r"[\\<>^_={}\[\]|∞≤≥≠≈]")
_FRACTION = re.compile(r"(\\[dt]?frac)\s?(\d|\{[^{}]*\})\s?(\d|\{[^{}]*\})")


def plain(text: str) -> str:
  """Writes signs, dollars, spaces, fractions and degrees one way."""
  text = text.replace("−", "-").replace("\u00a0", " ").replace("％", "%")
  text = text.replace(r"\$", "$").replace("{,}", "").replace(r"\!", "")
  text = re.sub(r"(?<=\d)(?:\\,|\u202f|\u2009)(?=\d{3}(?!\d))", "", text)
  text = re.sub(r"(?<!\\)\\[,;: ]|\\q?quad(?![a-zA-Z])|~", " ", text)
  text = re.sub(r"\\(?:left|right|displaystyle)(?![a-zA-Z])", "", text)
  text = re.sub(r"\^\s?(?:\{\s?\\circ\s?\}|\\circ(?![a-zA-Z]))", "°", text)
  wrapped = r"\\(?:text(?:bf|rm|it)?|math(?:bf|rm)|mbox)\s?\{([^{}]*)\}"
  return re.sub(wrapped, r"\1", text)


def stated(answer: str) -> Number | None:
  """The number that `answer` states, label and unit aside, if it is one."""
  answer = _spelled(answer).strip("*_` \n")
  match = _STATED.fullmatch(re.sub(r"^\s*\$|\$\s*$", "", answer).strip())
  return _value(match) if match else None


def mentioned(clause: str) -> Number | None:
  """The number that `clause` states, or the only one among its words."""
  number = stated(clause)
  if number is not None or _MATHEMATICS.search(plain(clause)):
    return number
  if len(_NUMBER.findall(_spelled(clause))) != 1:
    return None
  found = free_standing(clause)
  return found[0] if found else None


def free_standing(text: str) -> list[Number]:
  """The numbers of `text` in order, but those that are part of something.

  Neither `4\\sqrt{2}` nor `2x`, `7-2` or `COVID-19` has one.
  """
  text = _spelled(text)
  found = []
  for match in _NUMBER.finditer(text):
    if _JOINED_AFTER.match(text, match.end()):
      continue
    before = text[max(0, match.start() - 24) : match.start()]
    if _JOINED_BEFORE.search(before + ("-" if match["sign"] else "")):
      continue
    value = _value(match)
    if value is not None:
      found.append(value)
  return found


def _spelled(text: str) -> str:
  """`\\frac12` -> `\\frac{1}{2}`, `cm^2` -> `cm`, and `**5**` -> `5`."""

  def braced(match: re.Match) -> str:
    return match[1] + "".join(
      part if part[0] == "{" else f"{{{part}}}" for part in match.groups()[1:]
    )

  text = _BOLD.sub("", _FRACTION.sub(braced, plain(text)))
  return re.sub(r"(?<=[a-zA-Z])\^\{?[23]\}?", "", text)


def _value(match: re.Match) -> Number | None:
  try:
    if match["top"] is not None:
      value = _fraction(match["top"]) / _fraction(match["bottom"])
      value += int(match["whole"] or 0)
    else:
      value = _fraction(match["first"])
      if match["second"] is not None:
        value /= _fraction(match["second"])
  except (ZeroDivisionError, ValueError):  # also more digits than are read
    return None
  value *= _SCALES.get(match["scale"], 1)
  minus = (match["sign"] == "-") != (match["late_sign"] == "-")
  return -value if minus else value, match["percent"] is not None


def _fraction(text: str) -> Fraction:
  return Fraction(text.replace(",", ""))
