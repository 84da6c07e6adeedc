"""What a potential of prefixes is worth along a response.

A potential g gives every prefix s_t = (x, y_<=t) of a response a number. Only
differences within one response are used, from its start on, and the whole
response has none: so what is added along the way adds up to nothing.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def telescoping(
  values: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
  """phi(s_t) = (g(s_t) - g(s_0)) 1[t < length], entry t after t tokens.

  Exactly 0 at the start and on padding; the end, whether by EOS or by the
  limit, is the prefix of `length` tokens, which has no entry and counts as
  0. Shaping rewards phi(s_t+1) - phi(s_t) then add up to 0, and from token t
  on to -phi(s_t): a baseline that depends on the past alone.

  Ng, Harada & Russell 1999,
  https://people.eecs.berkeley.edu/~russell/papers/icml99-shaping.pdf;
  MeRLa 2026, https://arxiv.org/abs/2607.26094, in our theory-checked form.

  Args:
    values: g(s_t), anything where the mask is false.
    mask: which entries are tokens of the response.
  """
  start = values[:, :1]
  return jnp.where(mask & mask[:, :1], values - start, 0.0)


def last(
  values: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B"]:
  """Phi(x, y) = g(s_{length-1}): the response without its last token.

  That token is EOS where the response ended by itself. 0 for an empty row.
  """
  place = jnp.maximum(mask.sum(-1) - 1, 0)
  found = jnp.take_along_axis(values, place[:, None], axis=1)[:, 0]
  return jnp.where(mask.any(-1), found, 0.0)
