"""The exact bytes that each token id stands for.

A token is not a piece of text: a byte-level vocabulary splits one emoji over
several ids, so decoding ids one by one is lossy and character offsets are
useless. Bytes are exact. How a vocabulary entry spells its bytes is stated by
the tokenizer's decoder, and that is what is read here, never its name.
"""

from collections.abc import Callable, Iterator
from typing import Any

from mrl_jax.text import files

Spell = Callable[[str], bytes]
_SPACING = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer")
_SILENT = ("Fuse", "Strip", "ByteFallback")  # nothing to say about one token


def table(
  state: dict[str, Any], special: frozenset[str]
) -> tuple[bytes | None, ...]:
  """The bytes of every id; None for special tokens and ids without a token."""
  spell = _speller(state)
  vocabulary = files.model_vocabulary(state)
  added = state["added_tokens"]
  numbers = [*vocabulary.values(), *(token["id"] for token in added)]
  entries: list[bytes | None] = [None] * (max(numbers, default=-1) + 1)
  for token, number in vocabulary.items():
    entries[number] = spell(token)
  for token in added:
    # An added token is matched in the text as it stands, so a byte-level
    # vocabulary does not spell it in its alphabet.
    content = token["content"]
    literal = content.encode() if _is_byte_level(state) else spell(content)
    hidden = content in special or content.startswith(files.HOLE)
    entries[token["id"]] = None if hidden else literal
  return tuple(entries)


def is_spaced(state: dict[str, Any]) -> bool:
  """Whether the spaces between words are implied (WordPiece, word level).

  The table then gives each word the space in front of it, and a decoded text
  does not begin with one.
  """
  decoders = list(steps(state.get("decoder"), "decoders"))
  if any(decoder["type"] == "WordPiece" for decoder in decoders):
    return True
  if decoders:
    return False
  kinds = {s["type"] for s in steps(state.get("pre_tokenizer"))}
  wordpiece = state["model"].get("type") == "WordPiece"
  return wordpiece or bool(kinds.intersection(_SPACING))


def steps(
  component: dict[str, Any] | None, inner: str = "pretokenizers"
) -> Iterator[dict[str, Any]]:
  """The steps of a normalizer, pre-tokenizer or decoder, sequences opened."""
  if component is None:
    return
  if component["type"] != "Sequence":
    yield component
    return
  for step in component[inner]:
    yield from steps(step, inner)


def _is_byte_level(state: dict[str, Any]) -> bool:
  decoders = list(steps(state.get("decoder"), "decoders"))
  chosen = decoders or list(steps(state.get("pre_tokenizer")))
  return any(step["type"] == "ByteLevel" for step in chosen)


def _speller(state: dict[str, Any]) -> Spell:
  if _is_byte_level(state):
    return _byte_level()
  if is_spaced(state):
    return _word(_continuation(state))
  replacements = _replacements(state)
  fallback = bool(state["model"].get("byte_fallback")) or any(
    step["type"] == "ByteFallback"
    for step in steps(state.get("decoder"), "decoders")
  )
  return _pieces(replacements, fallback)


def _alphabet() -> dict[str, int]:
  """GPT-2's printable alphabet for the 256 bytes (Radford et al., 2019)."""
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = sorted(set(range(256)).difference(printable))
  letters = {chr(byte): byte for byte in printable}
  return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_level() -> Spell:
  alphabet = _alphabet()

  def spell(token: str) -> bytes:
    try:
      return bytes([alphabet[letter] for letter in token])
    except KeyError:  # not written in the alphabet: the text itself
      return token.encode()

  return spell


def _continuation(state: dict[str, Any]) -> str:
  for step in steps(state.get("decoder"), "decoders"):
    if step["type"] == "WordPiece":
      return step["prefix"]
  return state["model"].get("continuing_subword_prefix") or ""


def _word(continuation: str) -> Spell:
  def spell(token: str) -> bytes:
    if continuation and token.startswith(continuation):
      return token[len(continuation) :].encode()
    return b" " + token.encode()

  return spell


def _replacements(state: dict[str, Any]) -> list[tuple[str, str]]:
  decoders = list(steps(state.get("decoder"), "decoders"))
  if not decoders:  # the decoder of a Metaspace vocabulary may be left out
    found = steps(state.get("pre_tokenizer"))
    decoders = [step for step in found if step["type"] == "Metaspace"]
  pairs = []
  for step in decoders:
    pattern = step.get("pattern") or {}
    if step["type"] == "Replace" and "String" in pattern:
      pairs.append((pattern["String"], step["content"]))
    elif step["type"] == "Metaspace":
      pairs.append((step["replacement"], " "))
    elif step["type"] == "BPEDecoder":
      pairs.append((step["suffix"], " "))
    elif step["type"] not in _SILENT:
      raise ValueError(
        f"tokenizer.json: decoder step {step!r} is not supported; allowed"
        " are ByteLevel, ByteFallback, Replace (of a string), Metaspace,"
        " BPEDecoder, WordPiece, Fuse and Strip"
      )
  return pairs


def _pieces(replacements: list[tuple[str, str]], fallback: bool) -> Spell:
  def spell(token: str) -> bytes:
    if fallback and len(token) == 6 and token.startswith("<0x"):
      return bytes.fromhex(token[3:5])
    for old, new in replacements:
      token = token.replace(old, new)
    return token.encode()

  return spell
