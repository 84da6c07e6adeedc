"""Models in the GGUF format, as llama.cpp packs them.

A GGUF file is a whole model in one: its shape, its tokenizer, and its
matrices in blocks of a few bits. They are turned back into float32 here.
Queries and keys are stored with the rows of each head interleaved for a
rotation of neighbours, and are put back into the order of two halves.
"""

import importlib
import itertools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mrl_jax.model import hf_names, transformer
from mrl_jax.model import spec as spec_lib

PACKAGE = "gguf==0.19.0"

_ENDS = {
  "embedding": "token_embd.weight",
  "norm": "output_norm.weight",
  "unembedding": "output.weight",
}
_LAYERS = {
  "attention_norm": "attn_norm",
  "mlp_norm": "ffn_norm",
  "q": "attn_q",
  "k": "attn_k",
  "v": "attn_v",
  "o": "attn_output",
  "gate": "ffn_gate",
  "up": "ffn_up",
  "down": "ffn_down",
}


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
  """The file's metadata, and its tensors, still packed, by name.

  Raises:
    ModuleNotFoundError: the package that knows the format is not installed.
    ValueError: the file is not in this format.
  """
  try:
    package = importlib.import_module("gguf")
  except ModuleNotFoundError:
    raise ModuleNotFoundError(
      f"reading {os.fspath(path)} needs a package: pip install {PACKAGE}"
    ) from None
  try:
    reader = package.GGUFReader(os.fspath(path))
  except ValueError as error:
    raise ValueError(f"{os.fspath(path)} is no GGUF file: {error}") from error
  fields = {name: field.contents() for name, field in reader.fields.items()}
  return fields, {tensor.name: tensor for tensor in reader.tensors}


def config(fields: dict[str, Any], tensors: dict[str, Any]) -> spec_lib.Config:
  """The config.json that says the same.

  Raises:
    ValueError: the architecture is not a plain Llama.
  """
  family = fields.get("general.architecture")
  if family != "llama":
    raise ValueError(f"general.architecture is {family!r}; allowed: ['llama']")

  scaled = [name for name in fields if name.startswith("llama.rope.scaling")]
  if scaled:
    raise ValueError(f"{scaled}: scaled rotary embeddings are not supported")

  def get(name: str, default: Any = None) -> Any:
    return fields.get(f"llama.{name}", default)

  heads = get("attention.head_count")
  width = get("embedding_length")
  return {
    "model_type": "llama",
    "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    "hidden_size": width,
    "num_hidden_layers": get("block_count"),
    "num_attention_heads": heads,
    "num_key_value_heads": get("attention.head_count_kv", heads),
    "head_dim": get("rope.dimension_count", width // heads),
    "intermediate_size": get("feed_forward_length"),
    # Stored in float32: 9.999999747378752e-06 was 1e-5.
    "rms_norm_eps": float(f"{get('attention.layer_norm_rms_epsilon'):.6g}"),
    "rope_theta": float(get("rope.freq_base", 10000.0)),
    "max_position_embeddings": get("context_length"),
    "tie_word_embeddings": _ENDS["unembedding"] not in tensors,
    "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
    "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
    "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
  }


def params(
  model: transformer.Model, tensors: dict[str, Any]
) -> transformer.Params:
  """The parameters, float32, on the default device.

  Raises:
    ValueError: naming the tensors that are missing or unknown.
  """
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  names = {name: _ENDS[name] for name in shapes if name != "layers"}
  layers = {
    name: [f"blk.{i}.{_LAYERS[name]}.weight" for i in range(model.spec.layers)]
    for name in shapes["layers"]
  }
  _check({*names.values(), *itertools.chain(*layers.values())}, set(tensors))
  places = hf_names.places(shapes)
  heads = {"q": model.spec.heads, "k": model.spec.kv_heads}
  found = {
    name: _read(tensors[tensor], places[name], shapes[name].shape)
    for name, tensor in names.items()
  }
  found["layers"] = {}
  for name, leaf in shapes["layers"].items():
    stacked = np.empty(leaf.shape, np.float32)
    for layer, tensor in zip(stacked, layers[name], strict=True):
      place = places["layers"][name]
      layer[...] = _read(
        tensors[tensor], place, layer.shape, heads.get(name, 0)
      )
    found["layers"][name] = stacked
  return jax.tree.map(jnp.asarray, found)


def _check(wanted: set[str], present: set[str]) -> None:
  wrong = [f"missing {name}" for name in sorted(wanted - present)]
  wrong += [f"unknown {name}" for name in sorted(present - wanted)]
  if wrong:
    raise ValueError(f"the tensors of the GGUF file: {'; '.join(wrong)}")


def _read(
  tensor: Any, place: hf_names.Place, shape: tuple[int, ...], heads: int = 0
) -> np.ndarray:
  quants = importlib.import_module("gguf").quants
  value = quants.dequantize(tensor.data, tensor.tensor_type)
  if heads:
    value = halves(value, heads)
  return hf_names.from_stored(place, value, shape)


def halves(rows: np.ndarray, heads: int) -> np.ndarray:
  """Rows (0 h/2 1 h/2+1 ...) of each head to (0 1 ... h/2 h/2+1 ...)."""
  paired = rows.reshape(heads, -1, 2, rows.shape[-1])
  return paired.swapaxes(1, 2).reshape(rows.shape)
