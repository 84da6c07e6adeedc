"""The sampling distribution, defined once for the sampler and the scorer.

Temperature, barred ids, top-k and top-p turn logits into logits of what is
really sampled. The vocabulary may be cut over a mesh axis: then each device
has its own part of the logits, and only sums over it cross.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt32

from mrl_jax.types import Distribution

# A nucleus is full at this share of its mass, so that rounding does not let
# in one more token where the masses add up to top_p exactly.
_FULL = 1.0 - 1e-6


def total(x: Float[Array, "*batch V"], axis: str | None) -> Array:
  """Sum over the vocabulary, of which `axis` has a part on each device."""
  found = x.sum(-1)
  return found if axis is None else jax.lax.psum(found, axis)


def largest(x: Float[Array, "*batch V"], axis: str | None) -> Array:
  """Maximum over the vocabulary."""
  found = x.max(-1)
  return found if axis is None else jax.lax.pmax(found, axis)


def adjust(
  logits: Float[Array, "*batch V"],
  allowed: Bool[Array, "V"],
  distribution: Distribution,
  axis: str | None = None,
) -> Float[Array, "*batch V"]:
  """Logits whose softmax is the exact sampling distribution, in float32.

  x_v = logits_v / temperature, or -inf outside the support. The support is
  the allowed ids, then the top_k largest of them, then of those the fewest
  largest whose mass reaches top_p; ids tied with the last one kept are kept.

  Holtzman et al. 2020 (top-p), https://arxiv.org/abs/1904.09751; Fan et al.
  2018 (top-k), https://arxiv.org/abs/1805.04833.

  Args:
    logits: of the whole vocabulary, or of this device's part of it.
    allowed: likewise.
    distribution: static.
    axis: of the mesh, over which the vocabulary is cut; None: it is whole.

  Raises:
    ValueError: for a distribution that is none.
  """
  check(distribution)
  x = logits.astype(jnp.float32)
  if distribution.temperature != 1.0:
    x = x / distribution.temperature
  x = jnp.where(jnp.broadcast_to(allowed, x.shape), x, -jnp.inf)
  parts = 1 if axis is None else jax.lax.axis_size(axis)
  if 0 < distribution.top_k < x.shape[-1] * parts:
    ones = jnp.ones_like(x)
    least = jnp.full(x.shape[:-1], distribution.top_k)
    x = _keep_largest(x, ones, least, axis)
  if distribution.top_p < 1.0:
    masses = jnp.exp(x - largest(x, axis)[..., None])
    least = total(masses, axis) * (distribution.top_p * _FULL)
    x = _keep_largest(x, masses, least, axis)
  return x


def check(distribution: Distribution) -> None:
  """Raises ValueError for a distribution that is none."""
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
  axis: str | None,
) -> Float[Array, "*batch V"]:
  """Bars all but the fewest largest entries whose masses reach `least`.

  Finds the threshold bit by bit, in integers ordered as the floats are: 32
  reductions over the vocabulary, exact, and much cheaper than a sort.
  """
  order = _ordered(x)

  def bit(index, threshold):
    trial = threshold | (jnp.uint32(1 << 31) >> jnp.uint32(index))
    above = order >= trial[..., None]
    enough = total(jnp.where(above, masses, 0.0), axis) >= least
    return jnp.where(enough, trial, threshold)

  none = jnp.zeros(x.shape[:-1], jnp.uint32)
  threshold = jax.lax.fori_loop(0, 32, bit, none)
  return jnp.where(order >= threshold[..., None], x, -jnp.inf)


def _ordered(x: Float[Array, "*shape"]) -> UInt32[Array, "*shape"]:
  """Unsigned integers in the order of the float32 values."""
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  sign = jnp.uint32(1 << 31)
  return jnp.where(bits >= sign, ~bits, bits | sign)
