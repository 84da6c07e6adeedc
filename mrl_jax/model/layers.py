"""One layer's parameters and token-wise halves, and what stands around them.

These Flax NNX modules name each parameter and its logical axes once. They
hold no attention over positions: `transformer.py` runs that between `qkv`
and `finish`, in training over sequences and in sampling over caches.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from mrl_jax.model import rope
from mrl_jax.model import spec as spec_lib
from mrl_jax.parallel import sharding

PRODUCT = "product"  # names the matrix products with weights


class Block(nnx.Module):
  """One layer's parameters and its token-wise halves."""

  def __init__(self, spec: spec_lib.Spec, rngs: nnx.Rngs):
    d, f, h = spec.width, spec.mlp, spec.head_dim
    self.spec = spec
    self.attention_norm = _ones((d,), ("embed",))
    self.mlp_norm = _ones((d,), ("embed",))
    self.q = _normal(rngs, (d, spec.heads, h), ("embed", "heads", "head_dim"))
    kv = ("embed", "kv_heads", "head_dim")
    self.k = _normal(rngs, (d, spec.kv_heads, h), kv)
    self.v = _normal(rngs, (d, spec.kv_heads, h), kv)
    out = ("heads", "head_dim", "embed")
    self.o = _normal(rngs, (spec.heads, h, d), out, spec.heads * h)
    self.gate = _normal(rngs, (d, f), ("embed", "mlp"))
    self.up = _normal(rngs, (d, f), ("embed", "mlp"))
    self.down = _normal(rngs, (f, d), ("mlp", "embed"))
    if spec.qkv_bias:
      self.q_bias = _zeros((spec.heads, h), ("heads", "head_dim"))
      self.k_bias = _zeros((spec.kv_heads, h), ("kv_heads", "head_dim"))
      self.v_bias = _zeros((spec.kv_heads, h), ("kv_heads", "head_dim"))
    if spec.out_bias:
      self.o_bias = _zeros((d,), ("embed",))
    if spec.qk_norm:
      self.q_norm = _ones((h,), ("head_dim",))
      self.k_norm = _ones((h,), ("head_dim",))

  def qkv(
    self, x: Array, turns: tuple[Array, Array]
  ) -> tuple[Array, Array, Array]:
    """[..., D] -> queries [..., K, R, h], keys and values [..., K, h]."""
    spec = self.spec
    x = rms_norm(x, self.attention_norm, spec.norm_eps)
    q, k, v = (_project(x, w) for w in (self.q, self.k, self.v))
    if spec.qkv_bias:
      biases = (self.q_bias, self.k_bias, self.v_bias)
      q, k, v = (
        y + _ranked(b, y) for y, b in zip((q, k, v), biases, strict=True)
      )
    if spec.qk_norm:
      q = rms_norm(q, self.q_norm, spec.norm_eps)
      k = rms_norm(k, self.k_norm, spec.norm_eps)
    q = rope.rotate(q, *turns).astype(x.dtype)
    k = rope.rotate(k, *turns).astype(x.dtype)
    repeats = spec.heads // spec.kv_heads
    return q.reshape(*k.shape[:-1], repeats, spec.head_dim), k, v

  def finish(self, x: Array, attended: Array) -> Array:
    """Output projection and feed-forward, each added to the stream."""
    heads = (self.spec.heads, self.spec.head_dim)
    attended = attended.reshape(*attended.shape[:-3], *heads)
    out = _project(attended, self.o, over=2)
    if self.spec.out_bias:
      out += _ranked(self.o_bias, x)
    x = x + out
    y = rms_norm(x, self.mlp_norm, self.spec.norm_eps)
    gated = jax.nn.silu(_project(y, self.gate)) * _project(y, self.up)
    return x + _project(gated, self.down)


class Ends(nnx.Module):
  """What stands before and after the layers."""

  def __init__(self, spec: spec_lib.Spec, rngs: nnx.Rngs):
    shape, axes = (spec.vocab, spec.width), ("vocab", "embed")
    self.embedding = _normal(rngs, shape, axes, spec.width)
    self.norm = _ones((spec.width,), ("embed",))
    if not spec.tied:
      self.unembedding = _normal(rngs, shape, axes, spec.width)


def rms_norm(x: Array, weight: Any, eps: float) -> Array:
  """x / sqrt(mean(x^2) + eps) * weight, in float32 inside.

  Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467, equation 4.
  """
  y = x.astype(jnp.float32)
  y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
  return (y * _ranked(weight, y)).astype(x.dtype)


def _ranked(weight: Any, x: Array) -> Array:
  """A parameter in the rank and dtype of what it is combined with."""
  value = weight[...]
  return value.reshape((1,) * (x.ndim - value.ndim) + value.shape).astype(
    x.dtype
  )


def _project(x: Array, weight: Any, over: int = 1) -> Array:
  """Contracts the last `over` axes of x with the first ones of the weight.

  As one flat matrix product: XLA:CPU takes twice as long for the weight's
  gradient where several axes are contracted. In the stream's dtype,
  accumulated in float32; a CPU must be told so to reach its bfloat16 units,
  elsewhere it would have devices exchange partial sums in float32.
  """
  value = weight[...].astype(x.dtype)
  lead, rest = x.shape[: x.ndim - over], value.shape[over:]
  size = math.prod(value.shape[:over])
  kind = jnp.float32 if sharding.platform() == "cpu" else x.dtype
  out = jnp.dot(
    x.reshape(-1, size),
    value.reshape(size, -1),
    preferred_element_type=kind,
  )
  # Kept for the backward pass in this dtype, not in the accumulator's.
  return checkpoint_name(out.astype(x.dtype), PRODUCT).reshape(*lead, *rest)


def _normal(rngs: nnx.Rngs, shape, axes, fan_in: int | None = None):
  scale = (fan_in or shape[0]) ** -0.5
  value = scale * jax.random.normal(rngs.params(), shape, jnp.float32)
  return nnx.Param(value, axes=axes)


def _ones(shape, axes):
  return nnx.Param(jnp.ones(shape, jnp.float32), axes=axes)


def _zeros(shape, axes):
  return nnx.Param(jnp.zeros(shape, jnp.float32), axes=axes)
