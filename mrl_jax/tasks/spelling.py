"""The many spellings of one mathematical text, brought to one.

Afterwards fractions are \\frac, products *, powers ^, comparisons ASCII, the
braces of a set ⦃ and ⦄ (those of LaTeX grouping stay { and }), and spacing
commands, dollars and font commands are gone.
"""

import re

from mrl_jax.tasks import numerals

UNIT = re.compile(
  r"(?<=[\d})%])\s*(cm|mm|km|m|kg|mg|g|lb|oz|ml|s|h|mph|km/h|m/s|"
  r"inch(?:es)?|feet|foot|ft|yards?|miles?|met(?:er|re)s?|centimet(?:er|re)s?|"
  r"degrees?|radians?|dollars?|cents?|units?|square units?|cubic units?|"
  r"hours?|minutes?|seconds?|days?|weeks?|months?|years?|people|students?|"
  r"ways)(?:\^\{?(?P<power>[23])\}?)?$"
)
_THOUSANDS = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?(\s?[A-Za-z%°][^,]*)?")
_SPELLINGS = [
  (r"\\(?:dfrac|tfrac|cfrac)(?![a-zA-Z])", r"\\frac"),
  (r"\*\*", "^"),
  (r"\\(?:cdot|times|ast)(?![a-zA-Z])|×|·|⋅", "*"),
  (r"\\div(?![a-zA-Z])|÷", "/"),
  (r"\\(?:leqslant|leq|le)(?![a-zA-Z])|≤", "<="),
  (r"\\(?:geqslant|geq|ge)(?![a-zA-Z])|≥", ">="),
  (r"\\(?:neq|ne)(?![a-zA-Z])|≠", "!="),
  (r"\\lt(?![a-zA-Z])", "<"),
  (r"\\gt(?![a-zA-Z])", ">"),
  (r"\\%", "%"),
  (r"π", r"\\pi "),
  (r"√", r"\\sqrt "),
  (r"∞", r"\\infty "),
  (r"∪", r"\\cup "),
  (r"±", r"\\pm "),
  (r"\\\{|\\lbrace(?![a-zA-Z])", "⦃"),
  (r"\\\}|\\rbrace(?![a-zA-Z])", "⦄"),
  (r"\\[lr]?[vV]ert(?![a-zA-Z])", "|"),
  (r"\\(?:langle)(?![a-zA-Z])", "("),
  (r"\\(?:rangle)(?![a-zA-Z])", ")"),
  (r"\\(?:emptyset|varnothing)(?![a-zA-Z])|∅", "⦃⦄"),
]


def normalise(text: str) -> str:
  """Returns `text` in the one spelling that is read."""
  text = numerals.plain(text.strip().rstrip(".").strip())
  text = re.sub(r"(?<!\\)\\[()\[\]]|\$", "", text)
  if _THOUSANDS.fullmatch(text.strip()):
    text = text.replace(",", "")
  for pattern, written in _SPELLINGS:
    text = re.sub(pattern, written, text)
  return text.strip().rstrip(".").strip()
