"""Attention with the prompt's keys shared by all samples of the prompt.

Queries of G rows meet their prompt's keys in one batched product, so the
prompt is neither copied nor attended to G times over; a row's own keys are a
second part, and one softmax runs over both. Only the small statistics of
that softmax are brought into a common layout, never the scores.

This is the plain form, which XLA compiles for any machine; `flash.py` has the
same three functions as kernels for TPU.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mrl_jax.model import cache as cache_lib

MASKED = -1e30  # added to a score; finite, so a row with no key stays finite


class Attention(NamedTuple):
  """Three kinds of attention: each takes where things lie, once for all
  layers, and returns the function that a layer calls with its window.

  over_itself(positions [N, P]) -> attend(q, k, v, window)
  over_prompt_and_itself(positions [N, P], steps) -> attend(q, prompt_k,
    prompt_v, k, v, window)
  over_cache(cache) -> attend(q, k, v, window), whose window is static
  """

  over_itself: Callable[..., Callable]
  over_prompt_and_itself: Callable[..., Callable]
  over_cache: Callable[..., Callable]


def chosen(name: str, platform: str) -> str:
  """What `name` means on a platform: "auto" is the kernels on a TPU."""
  if name != "auto":
    return name
  return "pallas" if platform == "tpu" else "plain"


def plain(windows: tuple[int, ...]) -> Attention:
  """Attention as matrix products; layers have these windows, 0 is full."""

  def biases(seen, distance):
    # A function of the window; made once if no layer has one.
    if any(windows):
      return functools.partial(bias, seen, distance)
    made = bias(seen, distance, None)
    return lambda window: made

  def itself(positions):
    distance = positions[:, :, None] - positions[:, None, :]
    mask = biases((positions >= 0)[:, None, :], distance)
    return lambda q, k, v, window: over_itself(q, k, v, mask(window))

  def prompt_and_itself(positions, steps):
    # The last prompt token is the first input of the completion.
    last = positions[:, -1:]
    real = (positions >= 0) & (positions < last)
    later = last + jnp.arange(steps)[None, :]
    prompt = biases(real[:, None, :], later[:, :, None] - positions[:, None, :])
    distance = jnp.arange(steps)[:, None] - jnp.arange(steps)[None, :]
    own = biases(jnp.ones((), bool), distance)

    def attend(q, prompt_k, prompt_v, k, v, window):
      return over_prompt_and_itself(
        q, prompt_k, prompt_v, k, v, prompt(window), own(window)
      )

    return attend

  def cached(cache):
    masks = {
      window: jnp.where(cache_lib.seen(cache, window), 0.0, MASKED)
      for window in {*(windows or (0,))}
    }
    return lambda q, k, v, window: over_cache(q, k, v, masks[window])

  return Attention(itself, prompt_and_itself, cached)


def bias(
  seen: Bool[Array, "..."],
  distance: Int[Array, "..."],
  window: Int[Array, ""] | int | None,
) -> Float[Array, "..."]:
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


def over_cache(
  q: Float[Array, "B K R h"],
  k: Float[Array, "B K C h"],
  v: Float[Array, "B K C h"],
  mask: Float[Array, "B C"],
) -> Float[Array, "B K R h"]:
  """The same for one token per row, over a cache laid out to be read.

  A column that is not seen has mass 0, but must hold finite numbers.
  """
  scores = _scores("bkrh,bkch->bkrc", q, k) + mask[:, None, None]
  masses = jnp.exp(scores - scores.max(-1, keepdims=True))
  total = masses.sum(-1)
  out = _weigh("bkrc,bkch->bkrh", masses, v)
  return (out / total[..., None]).astype(q.dtype)


def _scores(equation, q, k):
  scale = q.shape[-1] ** -0.5
  return jnp.einsum(equation, q * scale, k, preferred_element_type=jnp.float32)


def _weigh(equation, masses, v):
  return jnp.einsum(
    equation, masses.astype(v.dtype), v, preferred_element_type=jnp.float32
  )
