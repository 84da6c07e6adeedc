"""Tokenizers for chain arithmetic that cut the same text differently.

`char` has one id per character. `merged` reads two digits as one id ("37"),
and an operator with the digit after it as one id ("+4"), greedily from the
left. `operator` reads only the latter as one id. All are lossless on the
characters of the task, so policies that use them can exchange text but not
token ids. They are written as Hugging Face directories, which is how any other
tokenizer reaches the trainer.
"""

import json
import pathlib

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

CHARACTERS = "0123456789+-*=, ;\n"
ROLES = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}


_OPERATIONS = [(sign, digit) for sign in "+-*" for digit in "0123456789"]


def char() -> tokenizers.Tokenizer:
  """One id per character."""
  return _bpe([])


def merged() -> tokenizers.Tokenizer:
  """Ids for 00 .. 99 and +0 .. *9 besides those of `char`."""
  tokenizer = _bpe(
    _OPERATIONS
    + [(tens, units) for tens in "0123456789" for units in "0123456789"]
  )
  # Without the split, "912" would follow the order of the merges: 9|12.
  tokenizer.pre_tokenizer = pre_tokenizers.Split(
    tokenizers.Regex(r"[+*-][0-9]|[0-9]{1,2}"), behavior="isolated"
  )
  return tokenizer


def operator() -> tokenizers.Tokenizer:
  """Ids for +0 .. *9 besides those of `char`."""
  return _bpe(_OPERATIONS)


def _bpe(merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
  tokens = [*ROLES.values(), *CHARACTERS, *("".join(pair) for pair in merges)]
  vocabulary = {token: i for i, token in enumerate(tokens)}
  tokenizer = tokenizers.Tokenizer(
    models.BPE(vocabulary, merges, unk_token=ROLES["unk_token"])
  )
  tokenizer.decoder = decoders.Fuse()
  tokenizer.add_special_tokens(list(ROLES.values()))
  return tokenizer


def write(directory: str, tokenizer: tokenizers.Tokenizer) -> None:
  """Writes the tokenizer's files of a Hugging Face directory."""
  root = pathlib.Path(directory)
  root.mkdir(parents=True, exist_ok=True)
  tokenizer.save(str(root / "tokenizer.json"))
  config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    **ROLES,
  }
  for name, content in (
    ("tokenizer_config.json", config),
    ("special_tokens_map.json", ROLES),
  ):
    text = json.dumps(content, indent=2) + "\n"
    (root / name).write_text(text, encoding="utf-8")
