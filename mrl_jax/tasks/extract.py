"""Finding the answer in a completion, and what it counts as in a vote.

Where an answer stands is marked, strongest mark first: <answer> tags, then
\\boxed{...}, then `#### `, then a phrase such as "the answer is". The last of
the strongest mark decides, and if nothing can be read there the completion
has no answer: a weaker mark is never searched for a better one.
"""

import re
from collections.abc import Sequence

from mrl_jax.tasks import numerals

_OPEN_TAG = re.compile(r"<answer>", re.IGNORECASE)
_CLOSE_TAG = re.compile(r"</answer>", re.IGNORECASE)
_HASHES = re.compile(r"####[ \t]*([^\n]*)")
_CUE = re.compile(
  r"\banswers?\b(?:[^.,:=\n]{0,40}?\s(?:is|are|equals|would be|must be)\b\s*:?"
  r"|\s*[:=])[*_\s]*",
  re.IGNORECASE,
)
_MATH = re.compile(
  r"\$\$(.+?)\$\$|(?<!\\)\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL
)
_CURRENCY = re.compile(r"\$\s?[\d.,]+(?:\s+[a-z]|[.,;]?\s*$)")
_WINDOW = 400  # characters after a cue in which its clause must end
# A clause ends at a line, or at punctuation that no number has inside; an
# exclamation mark with more mathematics behind it is a factorial.
_CLAUSE_END = re.compile(
  r"\n|[.,;?](?=\s|$)|!(?=\s+[A-Za-z\"']|\s*$)|[.,;]?[*_]{2}"
)


def tagged(text: str) -> str | None:
  """What the last <answer> tags hold; "" where they are left open."""
  opened = list(_OPEN_TAG.finditer(text))
  if not opened:
    return None
  closed = _CLOSE_TAG.search(text, opened[-1].end())
  return text[opened[-1].end() : closed.start()].strip() if closed else ""


def boxed(text: str) -> str | None:
  """What the last \\boxed{...} holds, braces matched; "" if never closed."""
  starts = [m.end() for m in re.finditer(r"\\f?box(?:ed)?(?![a-z])\s*", text)]
  if not starts:
    return None
  start = starts[-1]
  if text[start : start + 1] != "{":  # `\boxed 5` boxes one word
    return re.match(r"[^\s$]*", text[start:])[0].rstrip(".,;")
  end = closing(text, start)
  return "" if end is None else text[start + 1 : end].strip()


def closing(text: str, start: int) -> int | None:
  """The index of the brace that closes the one at `start`."""
  depth = 0
  escaped = False
  for index in range(start, len(text)):
    character = text[index]
    if escaped:
      escaped = False
    elif character == "\\":
      escaped = True
    elif character == "{":
      depth += 1
    elif character == "}":
      depth -= 1
      if depth == 0:
        return index
  return None


def marked(text: str) -> str | None:
  """The answer by tags, box or hashes; None where there is no such mark."""
  answer = tagged(text)
  if answer is not None:
    inner = boxed(answer)
    return answer if inner is None else inner
  answer = boxed(text)
  if answer is not None:
    return answer
  hashes = _HASHES.findall(text)
  return hashes[-1].strip() if hashes else None


def cued(text: str) -> str | None:
  """The clause after the last "answer is" that states something.

  Of a clause with equals signs, what stands after the last one.
  """
  clause = None
  for cue in reversed(list(_CUE.finditer(text))):
    rest = text[cue.end() : cue.end() + _WINDOW]
    span = _MATH.match(rest)
    if span and not _CURRENCY.match(rest):
      return formula(span)
    found = _clause(rest)
    spans = list(_MATH.finditer(found))
    if spans and not _CURRENCY.match(found, spans[-1].start()):
      return formula(spans[-1])
    found = found.rpartition("=")[2].strip()
    if re.search(r"[\d\\$]", found):
      return found
    clause = found if clause is None else clause
  return clause


def key(text: str) -> str | None:
  """The answer in a normal form, so that equal answers vote together.

  By the first mark there is; without one, a short text is its own answer and
  of a long one the last number is.
  """
  answer = marked(text)
  if answer is None:
    answer = cued(text)
  if answer is None:
    answer = text.strip()
    if len(answer) > 200 or "\n" in answer:
      found = numerals.free_standing(text)
      return str(found[-1][0]) if found else None
  number = numerals.stated(answer)
  if number is not None:
    return f"{number[0]}{'%' if number[1] else ''}"
  return " ".join(answer.lower().split()) or None


def votes(
  texts: Sequence[str], correct: Sequence[bool]
) -> list[tuple[str, bool] | None]:
  """What each text votes for in maj@k; None for no answer, which never wins.

  The verdict is part of a vote: texts that read alike here but were judged
  differently are two answers.
  """
  keys = [key(text) for text in texts]
  return [
    None if found is None else (found, bool(right))
    for found, right in zip(keys, correct, strict=True)
  ]


def last_formula(text: str) -> str | None:
  """What the last pair of dollars, \\(...\\) or \\[...\\] holds."""
  spans = list(_MATH.finditer(text))
  return formula(spans[-1]) if spans else None


def formula(span: re.Match) -> str:
  return next(group for group in span.groups() if group is not None).strip()


def _clause(rest: str) -> str:
  """The start of `rest` up to punctuation outside all brackets."""
  for end in _CLAUSE_END.finditer(rest):
    clause = rest[: end.start()]
    opened = sum(clause.count(c) for c in "([{")
    if opened <= sum(clause.count(c) for c in ")]}"):
      return clause
  return rest
