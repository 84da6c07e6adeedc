"""Log-probs and entropies of given tokens, without a [B, T, V] array.

`score` computes the logits of a few time steps at a time, in the sampling
distribution (see `support.py`), and keeps two numbers per position; its
backward pass computes each block again. On a mesh every device scores its own
rows against its own part of the vocabulary: what crosses are sums over the
vocabulary, two gathers of the unembedding's shards over the axes that share
rows, and one reduction of its gradient, however many blocks there are.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from mrl_jax.kernels import support

# The name of support.py is also this module's.
from mrl_jax.kernels.support import adjust as adjust
from mrl_jax.parallel import sharding
from mrl_jax.types import Distribution, Scores

# Bytes of one float32 block of logits. On a CPU a block of few rows stays in
# cache through its passes, which pays for computing the logits twice. An
# accelerator reads the unembedding once a block, which about 500 rows pay for.
_BLOCK_BYTES = {"cpu": 64 * 2**20}
_LARGE_BLOCK = 512 * 2**20
_CPU_ROWS = 128


class _Layout(NamedTuple):
  """Over which mesh axes the arguments are cut; static."""

  rows: tuple[str, ...] = ()
  vocab: str | None = None
  embed: tuple[str, ...] = ()  # of the unembedding's gradient
  spread: bool = False  # whether there is a mesh at all


def score(
  hidden: Float[Array, "B T D"],
  unembedding: Float[Array, "V D"],
  tokens: Int[Array, "B T"],
  allowed: Bool[Array, "V"],
  distribution: Distribution,
  block_bytes: int | None = None,
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
      the current mesh; a block is at least one time step of all rows. None:
      what suits the platform.
  """
  support.check(distribution)
  rows, steps, _ = hidden.shape
  layout, parts = _layout(hidden.shape, unembedding.shape)
  sizes = (rows // parts[0], steps, unembedding.shape[0] // parts[1])
  width = _width(*sizes, sharding.platform(), block_bytes)
  pad = -steps % width
  if pad:
    hidden = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0)))
    tokens = jnp.pad(tokens, ((0, 0), (0, pad)))
  logprobs, entropies = _score(
    hidden, unembedding, tokens, allowed, distribution, width, layout
  )
  return Scores(logprobs[:, :steps], entropies[:, :steps])


def _layout(
  hidden: tuple[int, ...], unembedding: tuple[int, ...]
) -> tuple[_Layout, tuple[int, int]]:
  """How the current mesh cuts rows and vocabulary, and into how many parts."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return _Layout(), (1, 1)
  rows = sharding.names("batch", hidden[0], mesh)
  vocab = sharding.names("vocab", unembedding[0], mesh)
  embed = sharding.names("embed", unembedding[1], mesh)
  embed = embed if set(embed) <= set(rows) else ()
  parts = tuple(
    math.prod(mesh.shape[n] for n in names) for names in (rows, vocab)
  )
  return _Layout(rows, vocab[0] if vocab else None, embed, True), parts


def _width(
  rows: int,
  steps: int,
  vocab: int,
  platform: str,
  block_bytes: int | None = None,
) -> int:
  """Time steps per block: all blocks about equal, none over the limit.

  Each block adds to the unembedding's gradient, so few large blocks are
  better than many where memory allows.
  """
  block_bytes = block_bytes or _BLOCK_BYTES.get(platform, _LARGE_BLOCK)
  most = block_bytes // (4 * vocab)
  if platform == "cpu":
    most = min(most, _CPU_ROWS)
  blocks = math.ceil(steps / max(1, most // rows))
  return math.ceil(steps / blocks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _score(hidden, unembedding, tokens, allowed, distribution, width, layout):
  arguments = (hidden, unembedding, tokens, allowed)
  return _forward(*arguments, distribution, width, layout)[0]


def _forward(hidden, unembedding, tokens, allowed, distribution, width, layout):
  def run(hidden, unembedding, tokens, allowed):
    def body(index, outs):
      h, token = _slices((hidden, tokens), index, width)
      x, chosen = _logits(
        h, unembedding, token, allowed, distribution, layout.vocab
      )
      top = support.largest(x, layout.vocab)
      below = x - top[..., None]  # digits are lost by adding `top` back early
      masses = jnp.exp(below)
      mass = support.total(masses, layout.vocab)
      mean = support.total(masses * _finite(below), layout.vocab) / mass
      log_mass = jnp.log(mass)
      values = (chosen - top - log_mass, log_mass - mean, log_mass + top)
      return _update(outs, values, index, width)

    empty = (jnp.zeros(tokens.shape, jnp.float32),) * 3
    return _loop(tokens, width, body, empty)

  rows = _over(layout.rows)
  arguments = (hidden, unembedding, tokens, allowed)
  outs = _on_mesh(run, layout, _places(layout), (rows,) * 3)(*arguments)
  logprobs, entropies, log_totals = outs
  return (logprobs, entropies), (*arguments, entropies, log_totals)


def _backward(distribution, width, layout, saved, cotangents):
  hidden, unembedding, *_ = saved

  def run(hidden, unembedding, tokens, allowed, *more):
    arrays = (hidden, tokens, *more)

    def body(index, carry):
      d_hidden, d_unembedding = carry
      h, token, entropy, log_total, g, k = _slices(arrays, index, width)
      x, _ = _logits(h, unembedding, token, allowed, distribution, layout.vocab)
      logp = x - log_total[..., None]
      weight = k[..., None] * (_finite(logp) + entropy[..., None])
      weight = weight + g[..., None]
      dx = jnp.where(_chosen(token, x, layout.vocab), g[..., None], 0.0)
      dx = (dx - jnp.exp(logp) * weight) / distribution.temperature
      dx = dx.astype(hidden.dtype)
      part = _einsum("btv,vd->btd", dx, unembedding)
      (d_hidden,) = _update((d_hidden,), (part,), index, width)
      return d_hidden, d_unembedding + _flat_gradient(dx, h)

    zeros = tuple(
      jnp.zeros(x.shape, jnp.float32) for x in (hidden, unembedding)
    )
    d_hidden, d_unembedding = _loop(tokens, width, body, zeros)
    if layout.vocab:
      d_hidden = jax.lax.psum(d_hidden, layout.vocab)
    return d_hidden, _reduced(d_unembedding, layout)

  rows = _over(layout.rows)
  table = PartitionSpec(layout.vocab, layout.embed or None)
  places = (*_places(layout), *(rows,) * 4)
  run = _on_mesh(run, layout, places, (rows, table))
  d_hidden, d_unembedding = run(*saved, *cotangents)
  return (
    d_hidden.astype(hidden.dtype),
    d_unembedding.astype(unembedding.dtype),
    None,
    None,
  )


_score.defvjp(_forward, _backward)


def _over(rows: tuple[str, ...]) -> PartitionSpec:
  return PartitionSpec(rows or None)


def _places(layout: _Layout) -> tuple[PartitionSpec, ...]:
  """Of the states, the unembedding, the tokens and the allowed ids."""
  rows, vocab = _over(layout.rows), PartitionSpec(layout.vocab)
  return rows, vocab, rows, vocab


def _on_mesh(run, layout: _Layout, takes, gives):
  if not layout.spread:
    return run
  return jax.shard_map(run, in_specs=takes, out_specs=gives, check_vma=False)


def _reduced(gradient: Array, layout: _Layout) -> Array:
  """The sum over the devices that share the rows, cut as the table is."""
  for name in layout.embed:
    gradient = jax.lax.psum_scatter(
      gradient, name, scatter_dimension=1, tiled=True
    )
  rest = tuple(name for name in layout.rows if name not in layout.embed)
  if rest:
    gradient = jax.lax.psum(gradient, rest)
  # XLA:TPU fails where it tries to move this sum out of a loop that adds up
  # microbatches ("while_loop_all_reduce_code_motion").
  return jax.lax.optimization_barrier(gradient)


def _logits(h, unembedding, token, allowed, distribution, axis):
  """Adjusted logits of a block, the token's own put back, and the latter."""
  raw = _einsum("btd,vd->btv", h, unembedding)
  if axis is None:
    chosen = jnp.take_along_axis(raw, token[..., None], axis=-1)
  else:  # one device has it
    mine = jnp.where(_chosen(token, raw, axis), raw, 0.0)
    chosen = support.total(mine, axis)[..., None]
  chosen = chosen / distribution.temperature
  x = adjust(raw, allowed, distribution, axis)
  return jnp.where(_chosen(token, x, axis), chosen, x), chosen[..., 0]


def _einsum(equation, a, b):
  return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _flat_gradient(dx, h):
  """sum_{b,t} dx_btv h_btd; XLA:CPU is slow at contracting two axes."""
  rows, width = dx.reshape(-1, dx.shape[-1]), h.shape[-1]
  return _einsum("nv,nd->vd", rows, h.reshape(-1, width))


def _chosen(token, x, axis):
  ids = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
  if axis is not None:
    ids += jax.lax.axis_index(axis) * x.shape[-1]
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
