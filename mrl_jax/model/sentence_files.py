"""What a sentence-transformers directory says besides its tensors.

Which module of the pipeline is the encoder, how its states become one vector,
and how a text becomes word pieces.
"""

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers

_MODULES = ("Transformer", "Pooling", "Normalize")
_POOLING = {"cls_token": "cls", "mean_tokens": "mean"}


def modules(root: pathlib.Path) -> tuple[pathlib.Path, bool]:
  """Where the encoder's files are, and whether its first state is the vector.

  The vector is the mean of the states where nothing is said about it.

  Raises:
    ValueError: a part of the pipeline that is not supported.
  """
  listed = root / "modules.json"
  where = {"Transformer": "", "Pooling": "1_Pooling"}
  if listed.is_file():
    parts = _json(listed)
    where = {part["type"].rpartition(".")[2]: part["path"] for part in parts}
  for kind in where:
    _among(f"a module's type in {listed}", kind, _MODULES)
  path = root / where.get("Pooling", "1_Pooling") / "config.json"
  first = path.is_file() and _pooling(path) == "cls"
  return root / where.get("Transformer", ""), first


def tokenizer(
  root: pathlib.Path, most: int, vocab: int
) -> Callable[[Sequence[str]], list[tuple[int, ...]]]:
  """Texts to word pieces: the last `most`, between [CLS] and [SEP].

  Raises:
    FileNotFoundError: there is no tokenizer.json.
    ValueError: it has more than `vocab` tokens, or adds other special tokens
      to a text than one on each side.
  """
  path = root / "tokenizer.json"
  if not path.is_file():
    raise FileNotFoundError(f"no tokenizer: {str(path)!r} is not a file")
  made = tokenizers.Tokenizer.from_file(str(path))
  made.no_padding()
  made.no_truncation()
  if made.get_vocab_size() > vocab:
    raise ValueError(
      f"{path} has {made.get_vocab_size()} tokens; config.json's vocab_size"
      f" {vocab} is the most"
    )
  around = made.encode("").ids
  if len(around) != 2:
    raise ValueError(
      f"{path} adds {len(around)} special tokens to a text; it must add two,"
      " one on each side"
    )

  def pieces(texts: Sequence[str]) -> list[tuple[int, ...]]:
    found = [made.encode(text, add_special_tokens=False).ids for text in texts]
    return [(around[0], *ids[-most:], around[1]) for ids in found]

  return pieces


def _pooling(path: pathlib.Path) -> str:
  """The one mode that is on; files have a flag for each, or its name."""
  config, stem = _json(path), "pooling_mode_"
  names = [key.removeprefix(stem) for key in config if key.startswith(stem)]
  modes = [_POOLING.get(n, n) for n in names if config[stem + n]]
  mode = config.get("pooling_mode", " and ".join(modes))
  return _among(f"pooling_mode in {path}", mode, tuple(_POOLING.values()))


def _json(path: pathlib.Path) -> Any:
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except ValueError as error:
    raise ValueError(f"{path} is not valid JSON: {error}") from error


def _among(field: str, value: Any, allowed: tuple[str, ...]) -> Any:
  if value not in allowed:
    raise ValueError(f"{field} is {value!r}; allowed: {[*allowed]}")
  return value
