"""Attention with the prompt's keys shared by all samples of the prompt.

Queries of G rows meet their prompt's keys in one batched product, so the
prompt is neither copied nor attended to G times over; a row's own keys are a
second part, and one softmax runs over both. Only the small statistics of
that softmax are brought into a common layout, never the scores.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mrl_jax.model import spec as spec_lib

MASKED = -1e30  # added to a score; finite, so a row with no key stays finite


def frequencies(rope: spec_lib.Rope, head_dim: int) -> np.ndarray:
  """Radians per position of each of the head_dim / 2 rotations.

  Su et al. 2021, https://arxiv.org/abs/2104.09864; for llama3, the long
  wavelengths are stretched by `factor` and the middle ones blended.
  """
  inverse = rope.theta ** -(np.arange(0, head_dim, 2) / head_dim)
  if rope.kind == "linear":
    return inverse / rope.factor
  if rope.kind == "llama3":
    turns = rope.original_positions * inverse / (2 * np.pi)
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return inverse * (keep + (1.0 - keep) / rope.factor)
  return inverse


def rotate(
  x: Float[Array, "*batch heads h"], angles: Float[Array, "*batch half"]
) -> Float[Array, "*batch heads h"]:
  """Rotates the halves of each head: (a, b) -> (a cos - b sin, b cos + a sin)."""
  cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
  cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
  a, b = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def bias(
  seen: Bool[Array, "*shape"],
  distance: Int[Array, "*shape"],
  window: Int[Array, ""] | None,
) -> Float[Array, "*shape"]:
  """0 where a query sees a key, else a large negative number.

  A key is seen if it is real, not ahead, and fewer than `window` back.
  """
  seen = seen & (distance >= 0)
  if window is not None:
    seen &= (window == 0) | (distance < window)
  return jnp.where(seen, 0.0, MASKED)


def over_itself(
  q: Float[Array, "N S K R h"],
  k: Float[Array, "N S K h"],
  v: Float[Array, "N S K h"],
  mask: Float[Array, "N S S"],
) -> Float[Array, "N S K R h"]:
  """Softmax attention of a sequence over itself."""
  scores = _scores("nskrh,ntkh->nkrst", q, k) + mask[:, None, None]
  top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
  masses = jnp.exp(scores - top)
  total = masses.sum(-1)
  out = _weigh("nkrst,ntkh->nskrh", masses, v)
  return (out / jnp.moveaxis(total, 3, 1)[..., None]).astype(q.dtype)


def over_prompt_and_itself(
  q: Float[Array, "N G T K R h"],
  prompt_k: Float[Array, "N P K h"],
  prompt_v: Float[Array, "N P K h"],
  k: Float[Array, "N G T K h"],
  v: Float[Array, "N G T K h"],
  prompt_mask: Float[Array, "N T P"],
  mask: Float[Array, "T T"],
) -> Float[Array, "N G T K R h"]:
  """Softmax attention of G completions over one prompt and themselves."""
  first = _scores("ngtkrh,npkh->nkgrtp", q, prompt_k)
  first += prompt_mask[:, None, None, None]
  second = _scores("ngtkrh,ngskh->ngkrts", q, k)
  second += mask[None, None, None, None]
  top = jnp.maximum(first.max(-1), jnp.swapaxes(second.max(-1), 1, 2))
  top = jax.lax.stop_gradient(top)
  first = jnp.exp(first - top[..., None])
  second = jnp.exp(second - jnp.swapaxes(top, 1, 2)[..., None])
  total = first.sum(-1) + jnp.swapaxes(second.sum(-1), 1, 2)
  out = _weigh("nkgrtp,npkh->ngtkrh", first, prompt_v)
  out += _weigh("ngkrts,ngskh->ngtkrh", second, v)
  total = jnp.transpose(total, (0, 2, 4, 1, 3))  # nkgrt -> ngtkr
  return (out / total[..., None]).astype(q.dtype)


def over_caches(
  q: Float[Array, "N G K R h"],
  prompt_k: Float[Array, "N K P h"],
  prompt_v: Float[Array, "N K P h"],
  k: Float[Array, "N G K C h"],
  v: Float[Array, "N G K C h"],
  prompt_mask: Float[Array, "N P"],
  mask: Float[Array, "C"],
) -> Float[Array, "N G K R h"]:
  """The same for one token per row, over caches laid out to be read."""
  first = _scores("ngkrh,nkph->nkgrp", q, prompt_k)
  first += prompt_mask[:, None, None, None]
  second = _scores("ngkrh,ngkch->ngkrc", q, k)
  second += mask[None, None, None, None]
  top = jnp.maximum(jnp.swapaxes(first.max(-1), 1, 2), second.max(-1))
  first = jnp.exp(first - jnp.swapaxes(top, 1, 2)[..., None])
  second = jnp.exp(second - top[..., None])
  total = jnp.swapaxes(first.sum(-1), 1, 2) + second.sum(-1)
  out = _weigh("nkgrp,nkph->ngkrh", first, prompt_v)
  out += _weigh("ngkrc,ngkch->ngkrh", second, v)
  return (out / total[..., None]).astype(q.dtype)


def _scores(equation, q, k):
  scale = q.shape[-1] ** -0.5
  return jnp.einsum(equation, q * scale, k, preferred_element_type=jnp.float32)


def _weigh(equation, masses, v):
  return jnp.einsum(
    equation, masses.astype(v.dtype), v, preferred_element_type=jnp.float32
  )
