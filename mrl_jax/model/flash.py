"""Attention over sequences by a kernel that never writes its scores.

The kernel is JAX's own splash attention, forward and backward: it walks over
blocks of queries and keys, and skips those that the mask empties. The mask is
static, because a row's real tokens stand side by side: so many columns apart
are so many positions apart. A completion's keys are its prompt's columns but
the last, then its own, and it is causal from there on. Padding is told by
segment ids. Lengths are padded to whole blocks.

The prompt's keys and values are repeated for its completions, for as long as
a layer takes. One long row of the G completions would need no copy, but the
backward kernel would then walk over G times as many blocks, most of them
empty; two passes joined by their statistics would keep another output, which
is larger than the copy where query heads share keys.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_mask as masks,
)
from jaxtyping import Array, Bool, Float, Int

from mrl_jax.model import attention, flash_decode, shards

OUTPUT = "attention"  # names what a backward pass needs of the forward kernel
_BLOCKS = (512, 256, 128)  # of queries as of keys; the lanes are 128


def make(windows: tuple[int, ...], interpret: bool) -> attention.Attention:
  """Attention by kernels; interpreted, so that any machine can run them."""
  distinct = tuple(sorted({*windows})) or (0,)

  def itself(positions):
    def attend(q, k, v, window):
      q, k, v = (_heads_first(x) for x in (_flat(q), k, v))
      out = _by_window(distinct, window, interpret, q, k, v, positions >= 0)
      return _grouped(jnp.swapaxes(out, 1, 2), k.shape[1])

    return attend

  def prompt_and_itself(positions, steps):
    real = (positions >= 0)[:, :-1]

    def attend(q, prompt_k, prompt_v, k, v, window):
      lead, group = q.shape[:3], q.shape[1]
      q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
      q, k, v = (_heads_first(x) for x in (_flat(q), k, v))
      prompt = (_heads_first(x[:, :-1]) for x in (prompt_k, prompt_v))
      k, v = (
        jnp.concatenate([_repeated(old, group, 0), new], axis=2)
        for old, new in zip(prompt, (k, v), strict=True)
      )
      rows = jnp.repeat(real, group, axis=0)
      own = jnp.ones((len(rows), steps), bool)
      seen = jnp.concatenate([rows, own], axis=1)
      out = _by_window(distinct, window, interpret, q, k, v, seen)
      out = _grouped(jnp.swapaxes(out, 1, 2), k.shape[1])
      return out.reshape(*lead, *out.shape[2:])

    return attend

  cached = functools.partial(flash_decode.over_cache, interpret=interpret)
  return attention.Attention(itself, prompt_and_itself, cached)


def block(length: int) -> tuple[int, int]:
  """The length in whole blocks, and the size of a block.

  The largest block that adds no more than an eighth to the smallest's.
  """
  least = -(-length // _BLOCKS[-1]) * _BLOCKS[-1]
  for size in _BLOCKS:
    whole = -(-length // size) * size
    if 8 * whole <= 9 * least:
      return whole, size
  raise AssertionError(length)


def _by_window(
  windows: tuple[int, ...],
  window: Int[Array, ""],
  interpret: bool,
  q: Float[Array, "B H S h"],
  k: Float[Array, "B K C h"],
  v: Float[Array, "B K C h"],
  seen: Bool[Array, "B C"],
) -> Float[Array, "B H S h"]:
  """Attention with the kernel of a layer's window, one of a few."""
  # A window as wide as the row is none.
  sizes = [0 if size >= k.shape[2] else size for size in windows]
  kinds = [
    functools.partial(_attend, window=size, interpret=interpret)
    for size in sizes
  ]
  if len({*sizes}) == 1:
    return kinds[0](q, k, v, seen)
  which = jnp.argmax(jnp.asarray(windows) == window)
  return jax.lax.switch(which, kinds, q, k, v, seen)


def _attend(
  q: Float[Array, "B H S h"],
  k: Float[Array, "B K C h"],
  v: Float[Array, "B K C h"],
  seen: Bool[Array, "B C"],
  *,
  window: int,
  interpret: bool,
) -> Float[Array, "B H S h"]:
  """softmax(q k^T / sqrt(h)) v over the seen keys that are not ahead.

  The last query stands at the last key. Dao et al. 2022,
  https://arxiv.org/abs/2205.14135, by the kernel of Google's JAX.
  """
  steps, columns = q.shape[2], k.shape[2]
  (queries, query_block), (keys, key_block) = block(steps), block(columns)
  spread = shards.groups(q.shape[1], k.shape[1])
  k, v = (_repeated(x, spread // k.shape[1], 1) for x in (k, v))
  q = _padded(q * q.shape[-1] ** -0.5, queries)
  k, v = _padded(k, keys), _padded(v, keys)
  ids = jnp.pad(seen, ((0, 0), (0, keys - columns))).astype(jnp.int32)

  def run(q, k, v, ids):
    mask = _mask((queries, keys), columns - steps, window)
    kernel = splash.make_splash_mha_single_device(
      masks.MultiHeadMask([mask] * q.shape[1]),
      block_sizes=_sizes(query_block, key_block),
      residual_checkpoint_name=OUTPUT,
      interpret=interpret,
    )
    ones = jnp.ones((queries,), jnp.int32)

    def row(q, k, v, ids):
      return kernel(q, k, v, splash.SegmentIds(ones, ids))

    return jax.vmap(row)(q, k, v, ids)

  names = (shards.ROWS_AND_HEADS,) * 3
  out = shards.each(run, *names, ("batch", None))(q, k, v, ids)
  return out[:, :, :steps]


def _mask(shape: tuple[int, int], offset: int, window: int) -> masks.Mask:
  """Causal from `offset` on, in a window if it is not 0."""
  if window:
    return masks.LocalMask(shape, (window - 1, 0), offset)
  return masks.CausalMask(shape, offset)


def _sizes(queries: int, keys: int) -> splash.BlockSizes:
  """The same blocks forward and backward."""
  return splash.BlockSizes(
    block_q=queries,
    block_kv=keys,
    block_q_dkv=queries,
    block_kv_dkv=keys,
    block_q_dq=queries,
    block_kv_dq=keys,
  )


def _padded(x: Array, size: int) -> Array:
  """Zeros after the last position of [B, H, S, h]."""
  return jnp.pad(x, ((0, 0), (0, 0), (0, size - x.shape[2]), (0, 0)))


def _repeated(x: Array, times: int, axis: int) -> Array:
  """jnp.repeat whose gradient is summed in float32."""
  if times == 1:
    return x
  exact = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  return jnp.repeat(exact, times, axis=axis).astype(x.dtype)


def _heads_first(x: Array) -> Array:
  return jnp.swapaxes(x, 1, 2)


def _flat(q: Array) -> Array:
  """[B, S, K, R, h] -> [B, S, H, h]."""
  return q.reshape(*q.shape[:2], -1, q.shape[-1])


def _grouped(out: Array, kv_heads: int) -> Array:
  """[B, S, H, h] -> [B, S, K, R, h]."""
  return out.reshape(*out.shape[:2], kv_heads, -1, out.shape[-1])
