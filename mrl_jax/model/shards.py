"""Attention kernels on the devices of a mesh.

The compiler does not partition a Pallas kernel, so each device is given its
part of the arrays by hand: rows over the axes of the batch, heads over the
tensor axis. Query heads spread over it where it divides their number, as
their projections do. It may not divide the fewer key-value heads: these are
then whole on each device, and a device reads those that its queries meet.
"""

import math
from collections.abc import Callable

import jax
from jaxtyping import Array

from mrl_jax.parallel import sharding

ROWS_AND_HEADS = ("batch", "kv_heads", None, None)


def groups(heads: int, kv_heads: int) -> int:
  """The least number of groups of query heads that can be spread.

  A multiple of kv_heads, so that a group meets one key-value head; kv_heads
  itself if the devices divide it, or do not divide the query heads either.
  """
  ways = _ways()
  return kv_heads if heads % ways else math.lcm(kv_heads, ways)


def local(heads: int) -> int:
  """How many of the heads each device holds."""
  ways = _ways()
  return heads if heads % ways else heads // ways


def each(
  function: Callable[..., Array], *axes: sharding.Axes
) -> Callable[..., Array]:
  """`function` on each device's part of arrays with these logical axes.

  What it returns lies as its first argument.
  """

  def apply(*arrays: Array) -> Array:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
      return function(*arrays)
    specs = tuple(
      sharding.spec(names, array.shape, mesh)
      for names, array in zip(axes, arrays, strict=True)
    )
    mapped = jax.shard_map(
      function, in_specs=specs, out_specs=specs[0], check_vma=False
    )
    return mapped(*arrays)

  return apply


def _ways() -> int:
  mesh = jax.sharding.get_abstract_mesh()
  names = sharding.RULES["kv_heads"]
  return 1 if mesh.empty else math.prod(mesh.shape[name] for name in names)
