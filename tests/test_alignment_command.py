"""People can look at an alignment: in words and as a figure."""

import pytest

from experiments import alignment
from tests import factories


def tokenizer(name):
  return factories.member(name).tokenizer


def test_what_is_not_one_to_one_is_said_in_words():
  text = alignment.describe("12+3,45", tokenizer("char"), tokenizer("merged"))
  assert text.splitlines() == [
    "[1] [2]  =  [12]",
    "[+] [3]  =  [+3]",
    "[4] [5]  =  [45]",
    "7 and 4 tokens, 4 chunks, 3 of them not one to one",
  ]


def test_the_figure_has_a_box_for_every_token():
  pair = tokenizer("char"), tokenizer("merged")
  shown = alignment.figure("12+3,45" * 10, *pair, ("char", "merged"))
  assert len(shown.axes) == 2  # 70 bytes, 48 a line
  texts = [label.get_text() for label in shown.axes[0].texts]
  assert texts.count("12") == 10
  assert texts.count("1") == texts.count("2") == 10


@pytest.mark.parametrize(
  ("piece", "shown"),
  [
    (b" a\n", "·a↵"),
    (b"\xe6\x97", "E6 97"),
    ("日".encode(), "E6 97 A5"),
    ("é".encode(), "é"),
    (None, "?"),
  ],
)
def test_every_token_can_be_shown(piece, shown):
  assert alignment.label(piece) == shown


def test_a_text_that_a_tokenizer_lacks_is_one_line(tmp_path, capsys):
  root = "experiments/assets/"
  arguments = ["é", root + "char", root + "merged"]
  with pytest.raises(SystemExit) as stopped:
    alignment.main([*arguments, f"--out={tmp_path / 'a.png'}"])
  assert stopped.value.code == 2
  assert "cannot spell the text: unknown" in capsys.readouterr().err
  alignment.main(["12", *arguments[1:], f"--out={tmp_path / 'a.png'}"])
  assert (tmp_path / "a.png").stat().st_size > 1000
