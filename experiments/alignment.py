"""Draws how two tokenizers cut one text, and which tokens face each other.

    python -m experiments.alignment TEXT DIR_A DIR_B [--out=alignment.png]

Each box is a token, as wide as its bytes. Boxes of one colour are a chunk:
the smallest span whose ends are token ends on both sides, inside which
log-probs are spread. Grey boxes face exactly one token of the other side.
"""

import argparse
import pathlib
from collections.abc import Sequence

import matplotlib.axes
import matplotlib.figure
import matplotlib.patches

from experiments import plots
from mrl_jax.text import align
from mrl_jax.text import tokenizer as tokenizer_lib

_SINGLE = "#E4E4E4"
_BYTES_PER_LINE = 48


def spellings(
  text: str,
  first: tokenizer_lib.Tokenizer,
  second: tokenizer_lib.Tokenizer,
) -> tuple[align.Spelling, align.Spelling]:
  """The text in both tokenizers.

  Raises:
    ValueError: one of them cannot spell it; says why.
  """
  found = []
  for name, tokenizer in (("first", first), ("second", second)):
    told = align.retokenize(tokenizer, text, False)
    if isinstance(told, str):
      raise ValueError(f"the {name} tokenizer cannot spell the text: {told}")
    if not len(told.tokens):
      raise ValueError("text: '' has no tokens")
    found.append(told)
  return found[0], found[1]


def figure(
  text: str,
  first: tokenizer_lib.Tokenizer,
  second: tokenizer_lib.Tokenizer,
  names: tuple[str, str] = ("first", "second"),
) -> matplotlib.figure.Figure:
  """One pair of rows for every few dozen bytes of the text."""
  sides = spellings(text, first, second)
  total = int(sides[0].ends[-1])
  lines = -(-total // _BYTES_PER_LINE)
  canvas = matplotlib.figure.Figure(
    figsize=(12, 1.5 * lines + 0.4), layout="constrained"
  )
  grid = canvas.subplots(lines, 1, squeeze=False)[:, 0]
  colors = _colors(align.chunks(sides[0].ends, sides[1].ends))
  for line, axes in enumerate(grid):
    begin = line * _BYTES_PER_LINE
    width = min(_BYTES_PER_LINE, max(total, 1))
    axes.set_xlim(begin, begin + width)
    axes.set_ylim(-0.1, 2.1)
    axes.set_yticks([1.5, 0.5], labels=names)
    axes.tick_params(length=0, colors="#555555")
    axes.spines[:].set_visible(False)
    for side, (told, tokenizer) in enumerate(
      zip(sides, (first, second), strict=True)
    ):
      _boxes(axes, told, tokenizer, colors[side], 1.05 - 1.05 * side)
  grid[-1].set_xlabel("byte of the text", color=plots.INK)
  return canvas


def _colors(
  chunks: Sequence[tuple[list[int], list[int]]],
) -> tuple[dict[int, str], dict[int, str]]:
  """A colour per token of each side; neighbours of many differ."""
  found: tuple[dict[int, str], dict[int, str]] = ({}, {})
  many = 0
  for chunk in chunks:
    single = len(chunk[0]) == len(chunk[1]) == 1
    color = _SINGLE if single else plots.COLORS[many % len(plots.COLORS)]
    many += not single
    for side in (0, 1):
      found[side].update(dict.fromkeys(chunk[side], color))
  return found


def _boxes(
  axes: matplotlib.axes.Axes,
  told: align.Spelling,
  tokenizer: tokenizer_lib.Tokenizer,
  colors: dict[int, str],
  bottom: float,
) -> None:
  starts = [0, *told.ends[:-1].tolist()]
  for index, (start, end) in enumerate(zip(starts, told.ends, strict=True)):
    color = colors[index]
    box = matplotlib.patches.Rectangle(
      (start, bottom),
      end - start,
      0.9,
      facecolor=color,
      edgecolor="white",
      linewidth=1.5,
      alpha=1.0 if color == _SINGLE else 0.55,
    )
    axes.add_patch(box)
    axes.text(
      (start + end) / 2,
      bottom + 0.45,
      label(tokenizer.token_bytes[told.tokens[index]]),
      ha="center",
      va="center",
      fontsize=9,
      color=plots.INK,
      clip_on=True,
    )


def label(piece: bytes | None) -> str:
  """A token for people: spaces and line ends visible, odd bytes in hex."""
  if piece is None:
    return "?"
  try:
    text = piece.decode("utf-8")
  except UnicodeDecodeError:
    return piece.hex(" ").upper()
  if not text.isascii():  # fonts rarely hold every script
    return text if text.isalpha() and len(piece) < 3 else piece.hex(" ").upper()
  return text.replace(" ", "·").replace("\n", "↵").replace("\t", "→")


def describe(
  text: str,
  first: tokenizer_lib.Tokenizer,
  second: tokenizer_lib.Tokenizer,
) -> str:
  """One line per chunk that is not one to one, and their share."""
  sides = spellings(text, first, second)
  chunks = align.chunks(sides[0].ends, sides[1].ends)
  lines = []
  for chunk in chunks:
    if len(chunk[0]) == len(chunk[1]) == 1:
      continue
    words = [
      " ".join(
        label(tokenizer.token_bytes[told.tokens[i]]).join("[]") for i in part
      )
      for part, told, tokenizer in zip(
        chunk, sides, (first, second), strict=True
      )
    ]
    lines.append(f"{words[0]}  =  {words[1]}")
  counts = [len(told.tokens) for told in sides]
  lines.append(
    f"{counts[0]} and {counts[1]} tokens, {len(chunks)} chunks, "
    f"{len(lines)} of them not one to one"
  )
  return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    prog="python -m experiments.alignment",
    description="Draws how two tokenizers cut one text.",
    allow_abbrev=False,
  )
  parser.add_argument("text")
  parser.add_argument("first", help="a Hugging Face directory")
  parser.add_argument("second", help="another one")
  parser.add_argument("--out", default="alignment.png")
  options = parser.parse_args(arguments)
  names = options.first, options.second
  try:
    loaded = [tokenizer_lib.load(name) for name in names]
    print(describe(options.text, *loaded))
    shown = figure(
      options.text, *loaded, tuple(pathlib.Path(n).name for n in names)
    )
  except (ValueError, OSError) as error:
    parser.error(str(error))
  shown.savefig(options.out, dpi=150, facecolor="white")
  print(options.out)


if __name__ == "__main__":
  main()
