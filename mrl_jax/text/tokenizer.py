"""One tokenizer, seen as exact bytes.

`encode` and `decode` here keep two promises that stock ones do not. Text
written by a user or a peer never becomes a control token: "<|im_end|>" is ten
characters. And ids are turned back into text through the bytes of each token,
so nothing is tidied up on the way: no space is added, dropped or moved, and a
completion cut inside a character ends at the last whole one.
"""

import codecs
import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Bool, Int

from mrl_jax.text import encoders, files, token_bytes

Ids = Sequence[int] | Int[np.ndarray, "T"]

_NEVER_SAMPLED = ("bos", "pad", "unk", "cls", "sep", "mask")


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """A vocabulary and the roles of its special tokens; `load` makes one."""

  vocab_size: int  # highest id + 1
  token_bytes: tuple[bytes | None, ...] = dataclasses.field(repr=False)
  special_ids: frozenset[int] = dataclasses.field(repr=False)
  control_ids: frozenset[int] = dataclasses.field(repr=False)
  holes: frozenset[int] = dataclasses.field(repr=False)  # ids without a token
  unsampled_ids: frozenset[int]  # begin, pad, unknown: never sampled
  eos_ids: tuple[int, ...]  # any of them ends a completion
  pad_id: int  # the first EOS where the tokenizer has no padding token
  bos_id: int | None
  adds_bos: bool  # a raw prompt begins with bos_id
  prefix_space: bool  # a text's start is encoded with a space in front
  spaced: bool  # spaces between words are implied, not in the tokens
  chat_template: str | None = dataclasses.field(repr=False)
  roles: dict[str, str]  # "eos_token" -> "</s>", for the chat template
  identity: str  # equal for equal vocabularies, whatever their directory
  _state: dict[str, Any] = dataclasses.field(repr=False)
  _controls: frozenset[str] = dataclasses.field(repr=False)
  _built: dict[tuple[bool, bool], tokenizers.Tokenizer] = dataclasses.field(
    default_factory=dict, repr=False
  )

  def encode(
    self, text: str, *, controls: bool = False, start: bool = False
  ) -> list[int]:
    """Ids of a piece of text; adds no special token.

    For a lossless tokenizer the tokens' bytes are exactly those of the text.

    Args:
      text: the text.
      controls: turn control strings into control tokens. Only for text that
        this program wrote, such as a chat template.
      start: the text begins a document: where `prefix_space` is set, the
        bytes have one space more in front.
    """
    return (
      self._encoder(controls, start).encode(text, add_special_tokens=False).ids
    )

  def decode(self, ids: Ids) -> str:
    """Text of ids: special tokens dropped, whole characters only.

    Bytes that are no UTF-8 become U+FFFD; `decode_exact` tells.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(self._bytes(ids))  # not final: keeps a cut one back

  def decode_exact(self, ids: Ids) -> str | None:
    """Text of ids; None where they hold no exact text.

    That is: an id that has no token, or bytes that are not whole UTF-8.
    """
    if not all(map(self._known, map(int, ids))):
      return None
    try:
      return self._bytes(ids).decode("utf-8")
    except UnicodeDecodeError:
      return None

  def round_trip(self, text: str) -> str | None:
    """Why the tokens of `text` do not spell it; None where they do.

    The reasons: "surrogate" (the text is not UTF-8), "unknown" (a character
    outside the vocabulary), "changed" (normalised, or spaces are implied).
    """
    try:
      wanted = text.encode()
    except UnicodeEncodeError:
      return "surrogate"
    pieces = [self.token_bytes[i] for i in self.encode(text)]
    known = [piece for piece in pieces if piece is not None]
    if len(known) < len(pieces):
      return "unknown"
    exact = b"".join(known) == wanted and not self.spaced
    return None if exact else "changed"

  def allowed(self, vocab_size: int) -> Bool[np.ndarray, "V"]:
    """Which ids of a model's vocabulary may be sampled.

    An id may be sampled if the tokenizer has a token for it. So the ids by
    which a model's matrices are padded are out, and markup such as <think>
    or <|im_start|>, which a model may write, is in. Out as well are the
    tokens that stand for no output: begin, padding, unknown, separator,
    mask. EOS ids are always in.

    Raises:
      ValueError: the model cannot embed one of the tokenizer's text tokens.
    """
    mask = np.zeros(max(vocab_size, self.vocab_size), bool)
    mask[: self.vocab_size] = True
    mask[list(self.holes | self.unsampled_ids)] = False
    mask[list(self.eos_ids)] = True
    beyond = set(np.flatnonzero(mask[vocab_size:]) + vocab_size)
    if beyond - self.control_ids or beyond.intersection(self.eos_ids):
      raise ValueError(
        f"vocab_size: the model has {vocab_size} ids, its tokenizer needs"
        f" {self.vocab_size}; do they belong together?"
      )
    return mask[:vocab_size]

  def _known(self, number: int) -> bool:
    return 0 <= number < self.vocab_size and number not in self.holes

  def _bytes(self, ids: Ids) -> bytes:
    known = filter(self._known, map(int, ids))
    pieces = [self.token_bytes[i] for i in known]
    joined = b"".join(piece for piece in pieces if piece is not None)
    return joined.removeprefix(b" ") if self.spaced else joined

  def _encoder(self, controls: bool, start: bool) -> tokenizers.Tokenizer:
    key = (controls, start and self.prefix_space)
    if key not in self._built:
      hidden = frozenset() if controls else self._controls
      self._built[key] = encoders.build(self._state, hidden, key[1])
    return self._built[key]


def load(directory: str) -> Tokenizer:
  """Reads a tokenizer from a Hugging Face directory.

  Raises:
    FileNotFoundError: the directory holds no vocabulary.
    ValueError: a file cannot be used, or nothing says how a text ends.
  """
  found = files.read(directory)
  state = found.state
  contents = _contents(state)
  holes = frozenset(
    i
    for i in range(max(contents, default=-1) + 1)
    if i not in contents or contents[i].startswith(files.HOLE)
  )
  special = _ids(state, found.special)
  roles = {
    name: number
    for name, content in found.roles.items()
    for number in _ids(state, frozenset([content]))
  }
  controls = encoders.controls(state, found.special)
  eos = _eos_ids(str(directory), found, roles, contents)
  table = list(token_bytes.table(state, found.special))
  for number in eos:
    table[number] = None
  bos = roles.get("bos_token")
  reference = encoders.build(state, frozenset(), start=True)
  _check(str(directory), state, reference)
  adds_bos = _adds_bos(reference, bos, found.adds_bos)
  reference.post_processor = None  # from here on, nobody adds specials
  prefix = encoders.has_prefix(state)
  return Tokenizer(
    vocab_size=len(table),
    token_bytes=tuple(table),
    special_ids=special.union(eos),
    control_ids=_ids(state, controls).union(eos),
    holes=holes,
    unsampled_ids=frozenset(
      roles[f"{role}_token"]
      for role in _NEVER_SAMPLED
      if f"{role}_token" in roles
    ).difference(eos),
    eos_ids=eos,
    pad_id=roles.get("pad_token", eos[0]),
    bos_id=bos,
    adds_bos=adds_bos,
    prefix_space=prefix,
    spaced=token_bytes.is_spaced(state),
    chat_template=found.chat_template,
    roles=found.roles,
    identity=_identity(reference),
    _state=state,
    _controls=controls,
    _built={(True, prefix): reference},
  )


def _contents(state: dict[str, Any]) -> dict[int, str]:
  contents = {i: t for t, i in files.model_vocabulary(state).items()}
  return contents | {t["id"]: t["content"] for t in state["added_tokens"]}


def _ids(state: dict[str, Any], contents: frozenset[str]) -> frozenset[int]:
  added = state["added_tokens"]
  return frozenset(t["id"] for t in added if t["content"] in contents)


def _eos_ids(
  directory: str,
  found: files.Files,
  roles: dict[str, int],
  contents: dict[int, str],
) -> tuple[int, ...]:
  added = {token["id"] for token in found.state["added_tokens"]}
  ids = [roles["eos_token"]] if "eos_token" in roles else []
  ids += found.generation_eos
  # A config.json may carry a default that never belonged to this vocabulary;
  # an ordinary word must not end completions.
  ids += [i for i in found.config_eos if i in added]
  for number in ids:
    if number not in contents:
      raise ValueError(
        f"eos_token_id {number} of {directory!r} is not in its tokenizer,"
        f" which has {len(contents)} tokens"
      )
  if not ids:
    raise ValueError(
      f"no end-of-sequence token for {directory!r}: looked for eos_token in"
      " tokenizer_config.json and special_tokens_map.json, and for"
      " eos_token_id in generation_config.json and config.json"
    )
  return tuple(dict.fromkeys(ids))


def _check(
  directory: str, state: dict[str, Any], reference: tokenizers.Tokenizer
) -> None:
  for token in state["added_tokens"]:
    number = reference.token_to_id(token["content"])
    if number != token["id"]:
      raise ValueError(
        f"tokenizer.json of {directory!r} gives token"
        f" {token['content']!r} the id {token['id']}, but its vocabulary"
        f" makes it {number}"
      )


def _adds_bos(
  reference: tokenizers.Tokenizer, bos: int | None, stated: bool | None
) -> bool:
  if bos is None or stated is not None:
    return bos is not None and bool(stated)
  return reference.encode("").ids[:1] == [bos]


def _identity(reference: tokenizers.Tokenizer) -> str:
  # The library writes a vocabulary in one order, whatever the file's.
  return hashlib.sha256(reference.to_str().encode()).hexdigest()[:16]
