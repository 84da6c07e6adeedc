"""A BERT encoder: its directory read into arrays, and one forward pass.

Unlike the decoder it sees a text from both sides, and normalises after each
addition. It is only ever read, never trained: parameters are float32, and so
are its matrix products on every kind of device.
"""

import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from jaxtyping import Array, Float, Int

from mrl_jax.model import attention, hf

Params = dict[str, Any]

_WEIGHTS = "model.safetensors"
_PREFIX = "bert."  # of all tensors, where the file holds a head as well
_SIZES = {
  "layers": "num_hidden_layers",
  "heads": "num_attention_heads",
  "width": "hidden_size",
  "mlp": "intermediate_size",
  "positions": "max_position_embeddings",
  "vocab": "vocab_size",
  "types": "type_vocab_size",
}
_FIXED = {
  "model_type": "bert",
  "hidden_act": "gelu",
  "position_embedding_type": "absolute",
  "is_decoder": False,
}
# Weight and bias pairs of a layer.
_QKV = tuple(f"attention.self.{part}" for part in ("query", "key", "value"))
_PAIRS = {
  "out": "attention.output.dense",
  "attention_norm": "attention.output.LayerNorm",
  "up": "intermediate.dense",
  "down": "output.dense",
  "norm": "output.LayerNorm",
}


class Spec(NamedTuple):
  """The sizes of an encoder; static under jit."""

  layers: int
  heads: int
  width: int
  mlp: int
  positions: int  # longest input, special tokens included
  vocab: int
  types: int
  norm_eps: float


def load(directory: hf.Directory) -> tuple[Spec, Params]:
  """Reads config.json and model.safetensors; the arrays are NumPy's.

  Raises:
    FileNotFoundError: one of the files is missing.
    ValueError: another architecture, or tensors that are missing or
      misshapen: one error that names them all.
  """
  root = pathlib.Path(directory)
  spec = _spec(hf.read_config(root))
  tensors = _tensors(root / _WEIGHTS, _shapes(spec))
  stem = "embeddings."
  layers = [_layer(tensors, number) for number in range(spec.layers)]
  # A text is of type 0 throughout, so that vector is part of its positions.
  types = tensors[stem + "token_type_embeddings.weight"]
  return spec, {
    "words": tensors[stem + "word_embeddings.weight"],
    "positions": tensors[stem + "position_embeddings.weight"] + types[:1],
    "norm": _pair(tensors, stem + "LayerNorm"),
    "layers": jax.tree.map(lambda *leaves: np.stack(leaves), *layers),
  }


def hidden(
  spec: Spec,
  params: Params,
  tokens: Int[Array, "B S"],
  lengths: Int[Array, "B"],
) -> Float[Array, "B S D"]:
  """The last states of right-padded rows; those of padding mean nothing.

  x = LN(x + Attention(x)); x = LN(x + W gelu(V x)).

  Devlin et al. 2018, https://arxiv.org/abs/1810.04805.
  """
  rows, steps = tokens.shape
  real = jnp.arange(steps)[None, :] < lengths[:, None]
  bias = jnp.where(real, 0.0, attention.MASKED)[:, None, None, :]
  shape = (rows, steps, spec.heads, spec.width // spec.heads)

  def layer(x, part):
    q, k, v = jnp.split(_affine(x, part["qkv"]), 3, axis=-1)
    q, k, v = (y.reshape(shape) for y in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / shape[-1] ** 0.5
    masses = jax.nn.softmax(scores + bias, axis=-1)
    out = jnp.einsum("bhqk,bkhd->bqhd", masses, v).reshape(x.shape)
    x = _norm(x + _affine(out, part["out"]), part["attention_norm"], spec)
    y = jax.nn.gelu(_affine(x, part["up"]), approximate=False)
    return _norm(x + _affine(y, part["down"]), part["norm"], spec), None

  # Accelerators would otherwise round the factors to 8 or 10 bits.
  with jax.default_matmul_precision("float32"):
    x = jnp.take(params["words"], tokens, axis=0)
    x = _norm(x + params["positions"][None, :steps], params["norm"], spec)
    return jax.lax.scan(layer, x, params["layers"])[0]


def _affine(x: Array, pair: tuple[Array, Array]) -> Array:
  """W x + b, as one flat matrix product."""
  weight, bias = pair
  out = jnp.dot(x.reshape(-1, x.shape[-1]), weight) + bias[None]
  return out.reshape(*x.shape[:-1], -1)


def _norm(x: Array, pair: tuple[Array, Array], spec: Spec) -> Array:
  """(x - mean) / sqrt(variance + eps) * weight + bias.

  Ba et al. 2016, https://arxiv.org/abs/1607.06450.
  """
  weight, bias = (y[None, None] for y in pair)
  x = x - x.mean(-1, keepdims=True)
  variance = jnp.mean(x * x, axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(variance + spec.norm_eps) * weight + bias


def _spec(config: dict[str, Any]) -> Spec:
  for field, allowed in _FIXED.items():
    value = config.get(field, None if field == "model_type" else allowed)
    if value != allowed:
      raise ValueError(f"{field} is {value!r}; allowed: {[allowed]}")
  sizes = {name: config.get(field) for name, field in _SIZES.items()}
  for name, value in sizes.items():
    if not isinstance(value, int) or value < 1:
      raise ValueError(
        f"{_SIZES[name]} must be a positive integer, got {value!r}"
      )
  if sizes["width"] % sizes["heads"]:
    raise ValueError(
      f"hidden_size {sizes['width']} must be a multiple of"
      f" num_attention_heads {sizes['heads']}"
    )
  return Spec(**sizes, norm_eps=float(config.get("layer_norm_eps", 1e-12)))


def _shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
  """The tensors that the file must hold; matrices are [out, in]."""
  d, f = spec.width, spec.mlp
  tables = {
    "word": (spec.vocab, d),
    "position": (spec.positions, d),
    "token_type": (spec.types, d),
  }
  shapes = {f"embeddings.{n}_embeddings.weight": s for n, s in tables.items()}
  sizes = dict.fromkeys((*_QKV, _PAIRS["out"]), (d, d))
  sizes |= {_PAIRS["up"]: (f, d), _PAIRS["down"]: (d, f)}
  sizes |= dict.fromkeys((_PAIRS["attention_norm"], _PAIRS["norm"]), (d,))
  pairs = {"embeddings.LayerNorm": (d,)}
  for number in range(spec.layers):
    stem = f"encoder.layer.{number}."
    pairs |= {stem + name: shape for name, shape in sizes.items()}
  for name, shape in pairs.items():
    shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
  return shapes


def _tensors(
  path: pathlib.Path, shapes: dict[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
  """Those of the file that are asked for, in float32."""
  if not path.is_file():
    raise FileNotFoundError(f"no weights: {str(path)!r} is not a file")
  found, wrong = {}, []
  try:
    with safetensors.safe_open(str(path), framework="np") as file:
      names = {name.removeprefix(_PREFIX): name for name in file.keys()}  # noqa: SIM118
      for name, shape in shapes.items():
        if name not in names:
          wrong.append(f"missing {name}")
          continue
        tensor = file.get_tensor(names[name])
        if tensor.shape != shape:
          wrong.append(f"{name} is {tensor.shape}, not {shape}")
        found[name] = np.asarray(tensor, np.float32)
  except safetensors.SafetensorError as error:
    raise ValueError(f"{path} cannot be read: {error}") from error
  if wrong:
    raise ValueError(
      f"{path} does not fit its config.json ({len(wrong)} tensors):"
      f" {'; '.join(wrong)}"
    )
  return found


def _layer(tensors: dict[str, np.ndarray], number: int) -> Params:
  """One layer; its queries, keys and values are one matrix product."""
  stem = f"encoder.layer.{number}."
  qkv = zip(*(_pair(tensors, stem + name) for name in _QKV), strict=True)
  pairs = {key: _pair(tensors, stem + name) for key, name in _PAIRS.items()}
  return {"qkv": tuple(np.concatenate(x, axis=-1) for x in qkv), **pairs}


def _pair(
  tensors: dict[str, np.ndarray], name: str
) -> tuple[np.ndarray, np.ndarray]:
  """Weight, as [in, out] if it is a matrix, and bias."""
  return tensors[f"{name}.weight"].T, tensors[f"{name}.bias"]
