"""Batched sampling: one prefill per prompt, jitted decode blocks, exact keys.

A prompt is prefilled once for its G samples. Decoding runs in jitted blocks
that each end where the completion cache is full; between blocks the host
doubles the cache, so attention covers what is used and not the limit, and a
block in which every row has stopped is the last. Each token is drawn by
inverting the CDF at one uniform number, whose key is derived from (seed,
policy, round, prompt id, sample, position): a sample does not depend on its
neighbours in the batch or on the device count, and no key serves twice.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from mrl_jax import collate
from mrl_jax.kernels import logprobs
from mrl_jax.model import cache as cache_lib
from mrl_jax.model import transformer
from mrl_jax.parallel import sharding
from mrl_jax.types import Distribution

FIRST_BLOCK = 32  # completion tokens before the cache first grows
_CDF_BLOCK = 128


class Samples(NamedTuple):
  """Completions on the host; rows of prompt n are n*G .. (n+1)*G - 1."""

  tokens: np.ndarray  # [B, T] i32, EOS included, 0 beyond the length
  lengths: np.ndarray  # [B] i32
  logprobs: np.ndarray  # [B, T] f32, of the exact sampling distribution
  entropies: np.ndarray  # [B, T] f32, in nats, of the same distribution
  finished: np.ndarray  # [B] bool: stopped by an EOS id, not by the limit


class Decoding(NamedTuple):
  """The carry of the decode loop."""

  hidden: Array  # [B, D], predicts the next token
  cache: cache_lib.Cache
  done: Array  # [B] bool
  step: Array  # [] i32, tokens generated so far


Generate = Callable[[dict, Sequence[Sequence[int]], np.ndarray], Samples]


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


def make(
  model: transformer.Model,
  mesh: jax.sharding.Mesh,
  *,
  samples: int,
  limit: int,
  stop_ids: tuple[int, ...],
  allowed: Bool[np.ndarray, "V"],
  distribution: Distribution,
  seed: int,
  rows: int = 0,
) -> Generate:
  """Builds `generate(params, prompts, ids) -> Samples`.

  Args:
    model: the policy's pure functions.
    mesh: where rows are spread over the data and fsdp axes.
    samples: G, completions per prompt.
    limit: most completion tokens; a row that reaches it is unfinished.
    stop_ids: any of these ends a row and stays in it.
    allowed: vocabulary ids that may be sampled.
    distribution: temperature, top-k, top-p.
    seed: of the run.
    rows: most rows decoded at a time; 0 is all at once.

  Returns:
    A function of the parameters, the prompts as lists of ids, and `ids`
    [B, W] uint32, the words that name each row (see `words`).
  """
  spread = mesh.shape["data"] * mesh.shape["fsdp"]
  stops = np.asarray(stop_ids, np.int32)
  start = _make_start(model, samples)
  block = _make_block(model, stops, distribution, seed)
  mask = jnp.asarray(allowed)

  def chunk(params, prompts, ids) -> list[np.ndarray]:
    context, lengths = collate.left_pad(prompts)
    placed = jax.device_put((context, lengths, ids), sharding.batch(mesh))
    context, lengths, ids = placed
    begin, end = 0, min(FIRST_BLOCK, limit)
    state = start(params, context, lengths, end)
    parts = []
    while True:
      state, part = block(params, state, ids, mask, begin, end)
      parts.append(part)
      if end >= limit or bool(jnp.all(state.done)):
        break
      begin, end = end, min(2 * end, limit)
      state = state._replace(cache=cache_lib.grow(state.cache, end))
    columns = zip(*jax.device_get(parts), strict=True)
    done = jax.device_get(state.done)[:, None]
    return [np.concatenate(c, axis=1) for c in columns] + [done]

  def generate(params, prompts, ids) -> Samples:
    per_chunk = max(1, rows // samples) if rows else len(prompts)
    per_chunk = min(per_chunk, len(prompts))
    per_chunk += -per_chunk % spread
    order = np.argsort([len(p) for p in prompts], kind="stable")
    ids = np.asarray(ids, np.uint32).reshape(len(prompts), samples, -1)
    found: list[list[np.ndarray] | None] = [None] * len(prompts)
    with jax.set_mesh(mesh):
      for begin in range(0, len(prompts), per_chunk):
        picked = order[begin : begin + per_chunk]
        # A short last chunk is filled up with copies, which are dropped.
        filled = np.resize(picked, per_chunk)
        words_ = ids[filled].reshape(per_chunk * samples, -1)
        outs = chunk(params, [prompts[i] for i in filled], words_)
        for place, prompt in enumerate(picked):
          span = slice(place * samples, (place + 1) * samples)
          found[prompt] = [out[span] for out in outs]
    return _gather(found)

  return generate


def _make_start(model, samples):
  def start(params, context, lengths, capacity):
    hidden, cache = model.prefill(
      params, context, lengths, samples=samples, capacity=capacity
    )
    hidden = jnp.repeat(hidden, samples, axis=0)
    done = jnp.zeros(hidden.shape[:1], bool)
    return Decoding(hidden, cache, done, jnp.zeros((), jnp.int32))

  return jax.jit(start, static_argnums=3)


def _make_block(model, stops, distribution, seed):
  """Decodes completion positions [begin, end), or until all rows stopped."""

  def run(params, state, ids, allowed, begin, end):
    keys = row_keys(seed, ids)
    unembedding = model.unembedding(params)
    shape = (state.done.shape[0], end - begin)
    kinds = (jnp.int32, jnp.float32, jnp.float32, jnp.bool_)
    out = tuple(jnp.zeros(shape, kind) for kind in kinds)

    def step(carry):
      state, out = carry
      logits = jnp.einsum(
        "bd,vd->bv",
        state.hidden,
        unembedding,
        preferred_element_type=jnp.float32,
      )
      logits = logprobs.adjust(logits, allowed, distribution)
      at = jax.vmap(jax.random.fold_in, (0, None))(keys, state.step)
      live = ~state.done
      values = (*draw(logits, jax.vmap(jax.random.uniform)(at)), live)
      values = [jnp.where(live, v, jnp.zeros((), v.dtype)) for v in values]
      out = tuple(
        jax.lax.dynamic_update_slice(o, v[:, None], (0, state.step - begin))
        for o, v in zip(out, values, strict=True)
      )
      stopped = jnp.any(values[0][:, None] == stops[None, :], axis=-1)
      hidden, cache = model.decode(params, values[0], state.cache)
      done = state.done | stopped
      return Decoding(hidden, cache, done, state.step + 1), out

    def more(carry):
      state, _ = carry
      return (state.step < end) & ~jnp.all(state.done)

    return jax.lax.while_loop(more, step, (state, out))

  return jax.jit(run, static_argnums=(4, 5), donate_argnums=1)


def _gather(found: list[list[np.ndarray]]) -> Samples:
  """Joins the prompts' parts and trims them to the longest completion."""
  lengths = np.concatenate([part[3].sum(axis=1) for part in found])
  width = max(1, int(lengths.max()))

  def join(column):
    out = np.zeros((len(lengths), width), found[0][column].dtype)
    row = 0
    for part in found:
      values = part[column][:, :width]
      out[row : row + len(values), : values.shape[1]] = values
      row += len(values)
    return out

  finished = np.concatenate([part[4][:, 0] for part in found])
  return Samples(join(0), lengths.astype(np.int32), join(1), join(2), finished)
