"""Keys and draws: one uniform number per token, and the CDF inverted there.

The key of a token is derived from (seed, policy, round, prompt id, sample,
position): a sample does not depend on its neighbours in the batch or on the
device count, and no key serves twice.
"""

import functools
import hashlib

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from mrl_jax.kernels import support
from mrl_jax.parallel import sharding
from mrl_jax.types import Distribution

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


def sample(
  hidden: Float[Array, "B D"],
  unembedding: Float[Array, "V D"],
  allowed: Bool[Array, "V"],
  distribution: Distribution,
  uniform: Float[Array, "B"],
) -> tuple[Int[Array, "B"], Float[Array, "B"], Float[Array, "B"]]:
  """`draw` from the states' sampling distribution.

  Where the mesh cuts the vocabulary each device keeps its part of the
  logits: it inverts the CDF inside its own span, which one of them has.
  """
  mesh = jax.sharding.get_abstract_mesh()
  cut = () if mesh.empty else sharding.names("vocab", len(unembedding), mesh)
  if not cut:
    logits = _logits(hidden, unembedding)
    return draw(support.adjust(logits, allowed, distribution), uniform)
  (axis,) = cut
  rows = sharding.names("batch", len(hidden), mesh)
  row, part = PartitionSpec(rows or None), PartitionSpec(axis)
  run = functools.partial(_sample_part, distribution, axis)
  run = jax.shard_map(
    run,
    in_specs=(row, part, part, row),
    out_specs=(row,) * 3,
    check_vma=False,
  )
  return run(hidden, unembedding, allowed, uniform)


def _logits(hidden, unembedding):
  return jnp.einsum(
    "bd,vd->bv", hidden, unembedding, preferred_element_type=jnp.float32
  )


def _sample_part(distribution, axis, hidden, unembedding, allowed, uniform):
  logits = _logits(hidden, unembedding)
  logits = support.adjust(logits, allowed, distribution, axis)
  x = logits - support.largest(logits, axis)[:, None]
  weights = jnp.exp(x)
  masses = jax.lax.all_gather(weights.sum(-1), axis, axis=1)
  ends = jnp.cumsum(masses, axis=-1)
  total, index = ends[:, -1], jax.lax.axis_index(axis)
  # The last part with any mass, where rounding has pushed the target past it.
  last = masses.shape[1] - 1 - jnp.argmax(masses[:, ::-1] > 0, axis=-1)
  part = jnp.minimum(_first_above(ends, uniform * total), last)
  before = jnp.take_along_axis(ends - masses, part[:, None], axis=1)[:, 0]
  share = jnp.take_along_axis(masses, part[:, None], axis=1)[:, 0]
  inside = invert_cdf(weights, jnp.clip((uniform * total - before) / share, 0))
  mine = part == index
  chosen = jnp.take_along_axis(x, inside[:, None], axis=-1)[:, 0]
  token = jnp.where(mine, inside + index * x.shape[1], 0)
  token, chosen = jax.lax.psum((token, jnp.where(mine, chosen, 0.0)), axis)
  log_total = jnp.log(total)
  finite = weights * jnp.where(weights > 0, x, 0.0)
  mean = support.total(finite, axis) / total
  return token.astype(jnp.int32), chosen - log_total, log_total - mean
