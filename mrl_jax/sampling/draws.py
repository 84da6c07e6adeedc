"""Keys and draws: one uniform number per token, and the CDF inverted there.

The key of a token is derived from (seed, policy, round, prompt id, sample,
position): a sample does not depend on its neighbours in the batch or on the
device count, and no key serves twice.
"""

import hashlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

_CDF_BLOCK = 128


def words(*parts: int | str) -> list[int]:
  """Turns names and numbers into the 32-bit words a row's key folds in.

  A string becomes the first 64 bits of its SHA-256, as two words.
  """
  out = []
  for part in parts:
    if isinstance(part, str):
      digest = hashlib.sha256(part.encode()).digest()
      out += [int.from_bytes(digest[i : i + 4], "big") for i in (0, 4)]
    else:
      out.append(part)
  return out


def row_keys(seed: int, ids: UInt32[Array, "B W"]) -> Array:
  """One key per row: `ids` folded into the seed's key word by word."""

  def one(row):
    return jax.lax.fori_loop(
      0, row.shape[0], lambda i, k: jax.random.fold_in(k, row[i]), base
    )

  base = jax.random.key(seed)
  return jax.vmap(one)(ids)


def invert_cdf(
  probabilities: Float[Array, "B V"], uniform: Float[Array, "B"]
) -> Int[Array, "B"]:
  """Draws `min {v : sum_{w <= v} p_w > u sum_w p_w}`, one uniform per row.

  The running sum is two-level, over blocks and then inside the chosen one:
  it costs one pass over [B, V] and no sort, and a token of probability 0 is
  never drawn.
  """
  rows, vocab = probabilities.shape
  width = min(_CDF_BLOCK, vocab)
  padded = jnp.pad(probabilities, ((0, 0), (0, -vocab % width)))
  blocks = padded.reshape(rows, -1, width)
  ends = jnp.cumsum(blocks.sum(-1), axis=-1)
  target = uniform * ends[:, -1]
  block = _first_above(ends, target)
  index = jnp.arange(rows)
  start = jnp.where(block > 0, ends[index, block - 1], 0.0)
  inside = blocks[index, block]
  offset = _first_above(jnp.cumsum(inside, axis=-1), target - start)
  # Rounding can push the target past the block's own sum.
  last = width - 1 - jnp.argmax(inside[:, ::-1] > 0, axis=-1)
  return (block * width + jnp.minimum(offset, last)).astype(jnp.int32)


def _first_above(
  ends: Float[Array, "B K"], target: Float[Array, "B"]
) -> Int[Array, "B"]:
  count = jnp.sum(ends <= target[:, None], axis=-1)
  return jnp.minimum(count, ends.shape[-1] - 1)


def draw(
  logits: Float[Array, "B V"], uniform: Float[Array, "B"]
) -> tuple[Int[Array, "B"], Float[Array, "B"], Float[Array, "B"]]:
  """Token, its log-prob and the entropy under softmax(logits)."""
  # Relative to the greatest logit, as the scorer has it: to the last digit.
  x = logits - jnp.max(logits, axis=-1, keepdims=True)
  weights = jnp.exp(x)
  total = weights.sum(-1)
  token = invert_cdf(weights, uniform)
  log_total = jnp.log(total)
  chosen = jnp.take_along_axis(x, token[:, None], axis=-1)[:, 0]
  mean = (weights * jnp.where(weights > 0, x, 0.0)).sum(-1) / total
  return token, chosen - log_total, log_total - mean
