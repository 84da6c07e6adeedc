"""Which tensor of a Hugging Face checkpoint holds which parameter, and how.

Checkpoints store a matrix as [out, in], each layer on its own and heads
flattened into rows; here matrices are [in, out], layers are stacked and heads
have their own axis. One table says both: the tensor's name, and for each of
its dimensions which of the parameter's axes it runs over. Reading, writing and
checking shapes all follow from it.
"""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from mrl_jax.model import spec as spec_lib

LAYER = "{layer}"

Index = tuple[slice, ...]


class Place(NamedTuple):
  """Where one parameter (of one layer) is stored."""

  name: str  # with LAYER in it if there is one tensor per layer
  axes: tuple[tuple[int, ...], ...]  # ((1, 2), (0,)): rows 1 and 2, columns 0


_VECTOR = ((0,),)
_TABLE = ((0,), (1,))
_MATRIX = ((1,), (0,))
_INTO_HEADS = ((1, 2), (0,))
_FROM_HEADS = ((2,), (0, 1))
_FLAT = ((0, 1),)

_ENDS = {
  "embedding": Place("model.embed_tokens.weight", _TABLE),
  "norm": Place("model.norm.weight", _VECTOR),
  "unembedding": Place("lm_head.weight", _TABLE),
}
_LAYERS = {
  "attention_norm": ("input_layernorm.weight", _VECTOR),
  "mlp_norm": ("post_attention_layernorm.weight", _VECTOR),
  "q": ("self_attn.q_proj.weight", _INTO_HEADS),
  "k": ("self_attn.k_proj.weight", _INTO_HEADS),
  "v": ("self_attn.v_proj.weight", _INTO_HEADS),
  "o": ("self_attn.o_proj.weight", _FROM_HEADS),
  "q_bias": ("self_attn.q_proj.bias", _FLAT),
  "k_bias": ("self_attn.k_proj.bias", _FLAT),
  "v_bias": ("self_attn.v_proj.bias", _FLAT),
  "o_bias": ("self_attn.o_proj.bias", _VECTOR),
  "q_norm": ("self_attn.q_norm.weight", _VECTOR),
  "k_norm": ("self_attn.k_norm.weight", _VECTOR),
  "gate": ("mlp.gate_proj.weight", _MATRIX),
  "up": ("mlp.up_proj.weight", _MATRIX),
  "down": ("mlp.down_proj.weight", _MATRIX),
}


def places(params: dict[str, Any]) -> dict[str, Any]:
  """The place of every leaf, as a tree like the parameters (or shapes)."""
  layers = {
    name: Place(f"model.layers.{LAYER}.{_LAYERS[name][0]}", _LAYERS[name][1])
    for name in params["layers"]
  }
  ends = {name: _ENDS[name] for name in params if name != "layers"}
  return {**ends, "layers": layers}


def paired(params: dict[str, Any]) -> list[tuple[Place, Any]]:
  """Each leaf with its place."""
  found = jax.tree.leaves(
    places(params), is_leaf=lambda node: isinstance(node, Place)
  )
  return list(zip(found, jax.tree.leaves(params), strict=True))


def tensors(place: Place, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
  """Names and shapes of the tensors that make up a parameter of `shape`."""
  layered = LAYER in place.name
  inner = shape[1:] if layered else shape
  stored = tuple(math.prod(inner[i] for i in axes) for axes in place.axes)
  names = [place.name]
  if layered:
    names = [place.name.replace(LAYER, str(i)) for i in range(shape[0])]
  return dict.fromkeys(names, stored)


def stored_index(place: Place, shape: tuple[int, ...], index: Index) -> Index:
  """The part of a tensor that holds a part of a parameter (of one layer).

  Raises:
    ValueError: the part is not contiguous in the tensor (a parameter is only
      ever cut along the first of the axes that share a dimension).
  """
  parts = []
  for axes in place.axes:
    first, rest = axes[0], axes[1:]
    if any(bounds(index[i], shape[i]) != (0, shape[i]) for i in rest):
      raise ValueError(f"{place.name}: axes {rest} cannot be cut: {index}")
    size = math.prod(shape[i] for i in rest)
    start, stop = bounds(index[first], shape[first])
    parts.append(slice(start * size, stop * size))
  return tuple(parts)


def bounds(part: slice, size: int) -> tuple[int, int]:
  """Start and stop of a slice without a step."""
  return part.indices(size)[:2]


def from_stored(
  place: Place, tensor: np.ndarray, shape: tuple[int, ...]
) -> np.ndarray:
  """A (part of a) tensor in the layout of a parameter of `shape`."""
  order = [i for axes in place.axes for i in axes]
  split = tensor.reshape([shape[i] for i in order])
  return split.transpose(np.argsort(order))


def to_stored(place: Place, value: np.ndarray) -> np.ndarray:
  """A parameter (of one layer) in the layout of its tensor."""
  stored = tuple(math.prod(value.shape[i] for i in axes) for axes in place.axes)
  order = [i for axes in place.axes for i in axes]
  return value.transpose(order).reshape(stored)


def is_ignored(name: str, spec: spec_lib.Spec) -> bool:
  """Whether a tensor says nothing new: a buffer, or a copy of a tied matrix."""
  copied = spec.tied and name == _ENDS["unembedding"].name
  return copied or name.endswith("rotary_emb.inv_freq")
