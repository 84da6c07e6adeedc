"""Log-probs and entropies of given tokens, without a [B, T, V] array.

`adjust` defines the sampling distribution once, for the sampler and for the
scorer: temperature, barred ids, top-k, top-p. `score` applies it to the
logits of a few time steps at a time and keeps two numbers per position; its
backward pass computes each block of logits again. Blocks run over time with
the whole vocabulary inside, so rows may be spread over data axes and the
vocabulary over a tensor axis, and top-k and top-p stay exact.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from mrl_jax.types import Distribution, Scores

BLOCK_BYTES = 64 * 2**20
# On a CPU a block of few rows stays in cache through its passes, which pays
# for computing the logits twice; an accelerator wants the whole block.
_CPU_ROWS = 128
# A nucleus is full at this share of its mass, so that rounding does not let
# in one more token where the masses add up to top_p exactly.
_FULL = 1.0 - 1e-6


def adjust(
  logits: Float[Array, "*batch V"],
  allowed: Bool[Array, "V"],
  distribution: Distribution,
) -> Float[Array, "*batch V"]:
  """Logits whose softmax is the exact sampling distribution, in float32.

  x_v = logits_v / temperature, or -inf outside the support. The support is
  the allowed ids, then the top_k largest of them, then of those the fewest
  largest whose mass reaches top_p; ids tied with the last one kept are kept.

  Holtzman et al. 2020 (top-p), https://arxiv.org/abs/1904.09751; Fan et al.
  2018 (top-k), https://arxiv.org/abs/1805.04833.

  Raises:
    ValueError: for a distribution that is none.
  """
  _check(distribution)
  x = logits.astype(jnp.float32)
  if distribution.temperature != 1.0:
    x = x / distribution.temperature
  x = jnp.where(jnp.broadcast_to(allowed, x.shape), x, -jnp.inf)
  if 0 < distribution.top_k < x.shape[-1]:
    ones = jnp.ones_like(x)
    x = _keep_largest(x, ones, jnp.full(x.shape[:-1], distribution.top_k))
  if distribution.top_p < 1.0:
    masses = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    least = masses.sum(-1) * (distribution.top_p * _FULL)
    x = _keep_largest(x, masses, least)
  return x


def _check(distribution: Distribution) -> None:
  temperature, top_k, top_p = distribution
  if not temperature > 0:
    raise ValueError(f"temperature must be above 0, got {temperature}")
  if top_k < 0:
    raise ValueError(f"top_k must be at least 0, got {top_k}")
  if not 0 < top_p <= 1:
    raise ValueError(f"top_p must be in (0, 1], got {top_p}")


def _keep_largest(
  x: Float[Array, "*batch V"],
  masses: Float[Array, "*batch V"],
  least: Array,
) -> Float[Array, "*batch V"]:
  """Bars all but the fewest largest entries whose masses reach `least`.

  Finds the threshold bit by bit, in integers ordered as the floats are: 32
  reductions over the vocabulary, exact, and much cheaper than a sort.
  """
  order = _ordered(x)

  def bit(index, threshold):
    trial = threshold | (jnp.uint32(1 << 31) >> jnp.uint32(index))
    above = order >= trial[..., None]
    enough = jnp.where(above, masses, 0.0).sum(-1) >= least
    return jnp.where(enough, trial, threshold)

  none = jnp.zeros(x.shape[:-1], jnp.uint32)
  threshold = jax.lax.fori_loop(0, 32, bit, none)
  return jnp.where(order >= threshold[..., None], x, -jnp.inf)


def _ordered(x: Float[Array, "*shape"]) -> UInt32[Array, "*shape"]:
  """Unsigned integers in the order of the float32 values."""
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  sign = jnp.uint32(1 << 31)
  return jnp.where(bits >= sign, ~bits, bits | sign)


def score(
  hidden: Float[Array, "B T D"],
  unembedding: Float[Array, "V D"],
  tokens: Int[Array, "B T"],
  allowed: Bool[Array, "V"],
  distribution: Distribution,
  block_bytes: int = BLOCK_BYTES,
) -> Scores:
  """Log-prob of each token and entropy (nats) of its distribution, float32.

  x = adjust(hidden W^T);  log p = x_token - logsumexp(x)
  H = logsumexp(x) - sum_v p_v x_v
  d log p / dx_v = [v = token] - p_v;  dH / dx_v = -p_v (log p_v + H)

  The token counts as in the support even where top-k, top-p or `allowed`
  would bar it: parameters may have moved since it was sampled. Matmuls take
  the dtype of `hidden` and accumulate in float32.

  Args:
    hidden: the state that predicts tokens[:, t].
    unembedding: the output projection.
    tokens: what was sampled.
    allowed: ids that may be sampled.
    distribution: as the sampler has it; static.
    block_bytes: most bytes of one float32 block of logits on each device of
      the current mesh; a block is at least one time step of all rows.
  """
  _check(distribution)
  rows, steps, _ = hidden.shape
  width = _width(rows, steps, unembedding.shape[0], block_bytes)
  pad = -steps % width
  if pad:
    hidden = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0)))
    tokens = jnp.pad(tokens, ((0, 0), (0, pad)))
  logprobs, entropies = _score(
    hidden, unembedding, tokens, allowed, distribution, width
  )
  return Scores(logprobs[:, :steps], entropies[:, :steps])


def _width(rows: int, steps: int, vocab: int, block_bytes: int) -> int:
  """Time steps per block: all blocks about equal, none over the limit.

  Each block adds to the unembedding's gradient, over the devices that share
  the rows, so few large blocks are better than many where memory allows.
  """
  devices = max(1, jax.sharding.get_abstract_mesh().size)  # 0: no mesh
  most = block_bytes * devices // (4 * vocab)
  if jax.default_backend() == "cpu":
    most = min(most, _CPU_ROWS * devices)
  blocks = math.ceil(steps / max(1, most // rows))
  return math.ceil(steps / blocks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _score(hidden, unembedding, tokens, allowed, distribution, width):
  return _forward(hidden, unembedding, tokens, allowed, distribution, width)[0]


def _forward(hidden, unembedding, tokens, allowed, distribution, width):
  def body(index, outs):
    h, token = _slices((hidden, tokens), index, width)
    x, chosen = _logits(h, unembedding, token, allowed, distribution)
    top = jnp.max(x, axis=-1, keepdims=True)
    below = x - top  # digits are lost by adding `top` back before the end
    masses = jnp.exp(below)
    total = masses.sum(-1)
    mean = (masses * _finite(below)).sum(-1) / total
    top, log_total = top[..., 0], jnp.log(total)
    values = (chosen - top - log_total, log_total - mean, log_total + top)
    return _update(outs, values, index, width)

  empty = (jnp.zeros(tokens.shape, jnp.float32),) * 3
  outs = _loop(tokens, width, body, empty)
  logprobs, entropies, log_totals = outs
  saved = (hidden, unembedding, tokens, allowed, entropies, log_totals)
  return (logprobs, entropies), saved


def _backward(distribution, width, saved, cotangents):
  hidden, unembedding, tokens, allowed, entropies, log_totals = saved
  arrays = (hidden, tokens, entropies, log_totals, *cotangents)

  def body(index, carry):
    d_hidden, d_unembedding = carry
    h, token, entropy, log_total, g, k = _slices(arrays, index, width)
    x, _ = _logits(h, unembedding, token, allowed, distribution)
    logp = x - log_total[..., None]
    weight = g[..., None] + k[..., None] * (_finite(logp) + entropy[..., None])
    dx = jnp.where(_chosen(token, x), g[..., None], 0.0)
    dx = (dx - jnp.exp(logp) * weight) / distribution.temperature
    dx = dx.astype(hidden.dtype)
    (d_hidden,) = _update(
      (d_hidden,), (_einsum("btv,vd->btd", dx, unembedding),), index, width
    )
    return d_hidden, d_unembedding + _flat_gradient(dx, h)

  zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (hidden, unembedding))
  d_hidden, d_unembedding = _loop(tokens, width, body, zeros)
  return (
    d_hidden.astype(hidden.dtype),
    d_unembedding.astype(unembedding.dtype),
    None,
    None,
  )


_score.defvjp(_forward, _backward)


def _logits(h, unembedding, token, allowed, distribution):
  """Adjusted logits of a block, the token's own put back, and the latter."""
  raw = _einsum("btd,vd->btv", h, unembedding)
  chosen = jnp.take_along_axis(raw, token[..., None], axis=-1)
  chosen = chosen / distribution.temperature
  x = adjust(raw, allowed, distribution)
  return jnp.where(_chosen(token, x), chosen, x), chosen[..., 0]


def _einsum(equation, a, b):
  return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _flat_gradient(dx, h):
  """sum_{b,t} dx_btv h_btd; XLA:CPU is slow at contracting two axes."""
  rows, width = dx.reshape(-1, dx.shape[-1]), h.shape[-1]
  return _einsum("nv,nd->vd", rows, h.reshape(-1, width))


def _chosen(token, x):
  ids = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
  return ids == token[..., None]


def _finite(x):
  return jnp.where(x > -jnp.inf, x, 0.0)  # 0 * -inf is nan


def _loop(tokens, width, body, init):
  blocks = tokens.shape[1] // width
  if blocks == 1:
    return body(0, init)
  return jax.lax.fori_loop(0, blocks, body, init)


def _slices(arrays, index, width):
  return tuple(
    jax.lax.dynamic_slice_in_dim(x, index * width, width, axis=1)
    for x in arrays
  )


def _update(outs, values, index, width):
  return tuple(
    jax.lax.dynamic_update_slice_in_dim(out, value, index * width, axis=1)
    for out, value in zip(outs, values, strict=True)
  )
