"""Variants of one tokenizer that differ in what a piece of text may do.

Two things make a stock tokenizer unsafe on a piece of text. It turns the
string "<|im_end|>" into the token that closes a turn, whoever wrote it; and a
SentencePiece-like one puts a space in front, as if every piece began a
document. Both are properties of the vocabulary file, so each variant is an
edited copy of it: control tokens renamed to something that no text contains,
the added space removed. The ids stay what they were.
"""

import json
import secrets
from typing import Any

import tokenizers

from mrl_jax.text import files, token_bytes

_OPENING = ("<", "[", "{", "|")
_CLOSING = (">", "]", "}", "|")


def controls(state: dict[str, Any], special: frozenset[str]) -> frozenset[str]:
  """Contents of the control tokens.

  These are all special tokens, and of the other added tokens those that look
  like markup: <think>, [TOOL], {{x}}. Added words and runs of spaces are
  content.
  """
  contents = {token["content"] for token in state["added_tokens"]}
  markup = {
    content
    for content in contents
    if content.startswith(files.HOLE)
    or (content.startswith(_OPENING) and content.endswith(_CLOSING))
  }
  return special | markup


def build(
  state: dict[str, Any], hidden: frozenset[str], start: bool
) -> tokenizers.Tokenizer:
  """A tokenizer on which the tokens `hidden` cannot be reached from text.

  Args:
    state: the vocabulary file.
    hidden: contents of the tokens to hide.
    start: keep the space that the tokenizer puts in front of a text.
  """
  state = {**state, "truncation": None, "padding": None}
  if not start:
    state = without_prefix(state)
  if hidden:
    state = _hide(state, hidden)
  return tokenizers.Tokenizer.from_str(json.dumps(state))


def without_prefix(state: dict[str, Any]) -> dict[str, Any]:
  """The same vocabulary, adding no space in front of a text."""
  return {
    **state,
    "normalizer": _strip_normalizer(state.get("normalizer")),
    "pre_tokenizer": _strip_pre_tokenizer(state.get("pre_tokenizer")),
  }


def _strip_normalizer(step: dict[str, Any] | None) -> dict[str, Any] | None:
  if step is None:
    return None
  if step["type"] == "Sequence":
    kept = [_strip_normalizer(inner) for inner in step["normalizers"]]
    return {**step, "normalizers": [inner for inner in kept if inner]}
  # A conversion may write the added space as a pattern at the text's start.
  pattern = str((step.get("pattern") or {}).get("Regex", ""))
  at_start = step["type"] == "Replace" and pattern.startswith(("\\A", "^"))
  return None if at_start or step["type"] == "Prepend" else step


def _strip_pre_tokenizer(step: dict[str, Any] | None) -> dict[str, Any] | None:
  if step is None:
    return None
  if step["type"] == "Sequence":
    inner = [_strip_pre_tokenizer(part) for part in step["pretokenizers"]]
    return {**step, "pretokenizers": inner}
  if step["type"] == "ByteLevel":
    return {**step, "add_prefix_space": False}
  if step["type"] == "Metaspace":
    kept = {k: v for k, v in step.items() if k != "add_prefix_space"}
    return {**kept, "prepend_scheme": "never"}
  return step


def _hide(state: dict[str, Any], hidden: frozenset[str]) -> dict[str, Any]:
  secret = secrets.token_hex(8)  # cannot be guessed, so cannot be written
  names = {
    content: f"\ufdd1{secret}{i}\ufdd1"
    for i, content in enumerate(sorted(hidden))
  }
  added = [
    {**token, "content": names.get(token["content"], token["content"])}
    for token in state["added_tokens"]
  ]
  model = dict(state["model"])
  if isinstance(model["vocab"], dict):
    model["vocab"] = {names.get(t, t): i for t, i in model["vocab"].items()}
  else:
    model["vocab"] = [[names.get(t, t), score] for t, score in model["vocab"]]
  if model.get("unk_token") in names:
    model["unk_token"] = names[model["unk_token"]]
  if "merges" in model:
    # A conversion may list "<" + "s>": a merge into a control token.
    model["merges"] = [
      merge
      for merge in map(_pair, model["merges"])
      if not hidden.intersection((*merge, "".join(merge)))
    ]
  return {**state, "added_tokens": added, "model": model}


def _pair(merge: str | list[str]) -> tuple[str, str]:
  left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
  return left, right


def has_prefix(state: dict[str, Any]) -> bool:
  """Whether the tokenizer puts a space in front of a text."""
  normalizer = state.get("normalizer")
  if _strip_normalizer(normalizer) != normalizer:
    return True
  pre_tokenizer = state.get("pre_tokenizer")
  return any(
    step.get("add_prefix_space", False)
    if step["type"] == "ByteLevel"
    else step.get("prepend_scheme", "always") != "never"
    for step in token_bytes.steps(pre_tokenizer)
    if step["type"] in ("ByteLevel", "Metaspace")
  )
