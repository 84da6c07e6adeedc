"""Attention of one new token per row, reading only the filled cache columns.

Decoding is bound by the reading of the cache. A row fills some columns of its
prompt and some of the ring, so the kernel walks over blocks of columns and
is told for each row which of them hold anything. A block that does not is
neither computed nor fetched: its turn names a block that is there already,
and Pallas copies nothing where the name stays the same. What lies in columns
that are not seen never reaches the output, whatever it is.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from mrl_jax.model import attention, shards
from mrl_jax.model import cache as cache_lib

_LANES = 128
_COLUMNS = 1024  # most columns of a block
_BYTES = 2**19  # most bytes of a block of keys; the values are as many


def over_cache(
  cache: cache_lib.Cache, *, interpret: bool
) -> Callable[..., Array]:
  """attend(q, k, v, window), as `attention.Attention` says."""
  width, capacity = cache.positions.shape[1], cache.capacity

  @functools.cache
  def plan(window, size):
    # The same for all layers of a window.
    start, count, newest = cache_lib.bounds(cache, window)
    named = turns(cache_lib.seen(cache, window), size)
    return named, start, count, newest[None]

  def attend(
    q: Float[Array, "B K R h"],
    k: Float[Array, "B K C h"],
    v: Float[Array, "B K C h"],
    window: int,
  ) -> Float[Array, "B K R h"]:
    rows, kv_heads, repeats, head_dim = q.shape
    groups = shards.groups(kv_heads * repeats, kv_heads)
    # A device takes all its heads in one block; but where several devices
    # read one head, each of its groups names the head that it meets.
    shared = groups != kv_heads
    together = 1 if shared else shards.local(kv_heads)
    heads = jnp.arange(groups) * kv_heads // groups * shared
    size = block(k.shape[2], together * head_dim * k.dtype.itemsize)
    run = functools.partial(
      _attend,
      together=together,
      size=size,
      width=width,
      capacity=capacity,
      interpret=interpret,
    )
    whole = shards.ROWS_AND_HEADS
    row, head, step = ("batch",), ("kv_heads",), (None,)
    axes = (whole, whole, whole, head, ("batch", None), row, row, step)
    grouped = q.reshape(rows, groups, -1, head_dim)
    out = shards.each(run, *axes)(grouped, k, v, heads, *plan(window, size))
    return out.reshape(q.shape)

  return attend


def block(columns: int, width: int) -> int:
  """Columns of a block, where a column's keys are `width` bytes."""
  if columns <= _LANES:
    return columns
  size = min(_BYTES // width, _COLUMNS, columns)
  return max(size // _LANES, 1) * _LANES


def turns(seen: Bool[Array, "B C"], size: int) -> Int[Array, "B ..."]:
  """The block that is in memory at each block's turn.

  A block with a seen column names itself, another the last such before it,
  or else the first.
  """
  rows, columns = seen.shape
  seen = jnp.pad(seen, ((0, 0), (0, -columns % size)))
  needed = seen.reshape(rows, -1, size).any(-1)
  numbers = jnp.arange(needed.shape[1])[None, :]
  last = jax.lax.cummax(jnp.where(needed, numbers, -1), axis=1)
  return jnp.maximum(last, jnp.argmax(needed, axis=1)[:, None])


def _attend(
  q: Float[Array, "B K R h"],
  k: Float[Array, "B N C h"],
  v: Float[Array, "B N C h"],
  heads: Int[Array, "K"],
  named: Int[Array, "B ..."],
  start: Int[Array, "B"],
  count: Int[Array, "B"],
  newest: Int[Array, "1"],
  *,
  together: int,
  size: int,
  width: int,
  capacity: int,
  interpret: bool,
) -> Float[Array, "B K R h"]:
  """softmax(q k^T / sqrt(h)) v over the seen columns, block after block.

  Running maximum and sum as in Milakov & Gimelshein 2018,
  https://arxiv.org/abs/1805.02867, algorithm 3. Groups of query heads, in
  blocks of `together`, meet the blocks `heads` of the key-value heads.
  """
  rows, groups, repeats, head_dim = q.shape
  blocks = named.shape[1]

  def queries(row, group, turn, *_):
    return row, group, 0, 0

  def columns(row, group, turn, heads, named, *_):
    return row, heads[group], named[row * blocks + turn], 0

  query = pl.BlockSpec((None, together, repeats, head_dim), queries)
  column = pl.BlockSpec((None, together, size, head_dim), columns)
  state = [(together, repeats, n) for n in (1, 1, head_dim)]
  kernel = functools.partial(_kernel, width=width, capacity=capacity)
  call = pl.pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=5,
      grid=(rows, groups // together, blocks),
      in_specs=[query, column, column],
      out_specs=query,
      scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in state],
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary")
    ),
    interpret=interpret,
    name="decode",
  )
  # One axis, since scalar memory would pad a second one to 128.
  bounds = named.reshape(-1), start, count, newest
  return call(heads, *bounds, q * head_dim**-0.5, k, v)


def _kernel(
  heads,
  named,
  start,
  count,
  newest,
  q,
  k,
  v,
  out,
  top,
  total,
  mean,
  *,
  width,
  capacity,
):
  """One block of columns of one row, added to what the row has so far."""
  del heads
  row, turn, turns_ = pl.program_id(0), pl.program_id(2), pl.num_programs(2)
  size = k.shape[1]

  def seen(shape, axis):
    columns = turn * size + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    bounds = cache_lib.Bounds(start[row], count[row], newest[0])
    return bounds.hold(columns, width, capacity)

  @pl.when(turn == 0)
  def begin():
    top[...] = jnp.full_like(top, attention.MASKED)
    total[...] = jnp.zeros_like(total)
    mean[...] = jnp.zeros_like(mean)

  @pl.when(named[row * turns_ + turn] == turn)
  def add():
    scores = jnp.einsum(
      "krh,kch->krc", q[...], k[...], preferred_element_type=jnp.float32
    )
    scores = jnp.where(seen(scores.shape, 2), scores, attention.MASKED)
    highest = jnp.maximum(top[...], scores.max(-1, keepdims=True))
    masses = jnp.exp(scores - highest)
    kept = jnp.exp(top[...] - highest)
    # A mass of 0 is not enough: the last block ends beyond the cache.
    values = jnp.where(seen(v.shape, 1), v[...], jnp.zeros((), v.dtype))
    weighed = jnp.einsum(
      "krc,kch->krh",
      masses.astype(v.dtype),
      values,
      preferred_element_type=jnp.float32,
    )
    top[...] = highest
    total[...] = kept * total[...] + masses.sum(-1, keepdims=True)
    mean[...] = kept * mean[...] + weighed

  @pl.when(turn == turns_ - 1)
  def end():
    out[...] = (mean[...] / total[...]).astype(out.dtype)
