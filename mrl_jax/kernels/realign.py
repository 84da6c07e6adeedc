"""Moves log-probs from a peer's tokens onto this policy's tokens.

Two tokenizers cut one text at different bytes. A source token's log-prob is
spread over its own bytes, and each receiver token collects what its bytes
carry; within a chunk, whose ends are token ends on both sides, nothing is
lost or gained. All work is gathers along a row, so no array of source by
receiver tokens exists and rows may be spread over devices.

Sums over spans are built from blocks of doubled length inside the span. The
difference of two running sums would be shorter, but in float32 it loses
digits to everything that stands before, and one -inf would reach every token
behind it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mrl_jax.types import Trace


def collect(trace: Trace) -> Float[Array, "B T"]:
  """Source log-probs spread over their bytes, collected by receiver tokens.

  lb~_t = sum_i lb_i |bytes_i & bytes_t| / |bytes_i|
        = lb_first first_part + sum_{first < i < last} lb_i + lb_last last_part

  A token that is its source token has exactly its log-prob. Padding has 0.

  Spreading by bytes is this project's choice for the re-tokenised behaviour
  of Mutual RL 2026, https://arxiv.org/abs/2605.07244.
  """
  edges = _part(trace.logprobs, trace.first, trace.first_part)
  edges += _part(trace.logprobs, trace.last, trace.last_part)
  return edges + span_sums(trace.logprobs, trace.first + 1, trace.last)


def collect_chunks(trace: Trace) -> Float[Array, "B T"]:
  """Each chunk's log-prob, spread over all the bytes of the chunk.

  lb~_t = L_c |bytes_t| / |bytes_c|,  L_c = sum_{i in c} lb_i

  The same chunks and the same sums as `collect`, smoother inside a chunk.
  """
  return chunk_sums(collect(trace), trace) * trace.byte_share


def chunk_sums(
  values: Float[Array, "B T"], trace: Trace
) -> Float[Array, "B T"]:
  """At each token the sum over its chunk: sum_{s in c(t)} values_s."""
  return span_sums(values, trace.chunk_start, trace.chunk_stop)


def span_sums(
  values: Float[Array, "B N"], start: Int[Array, "B T"], stop: Int[Array, "B T"]
) -> Float[Array, "B T"]:
  """sum_{start <= i < stop} values_i, and 0 for an empty span.

  With block_k[i] = sum values[i : i + 2^k] a span is one block for each bit
  of its length (the sparse table of Bender & Farach-Colton 2000,
  https://doi.org/10.1007/10719839_9, with disjoint blocks): at most
  2 log2(N) roundings, and nothing outside the span is read.
  """
  left = jnp.maximum(stop - start, 0)
  sums = jnp.zeros(start.shape, values.dtype)
  blocks, size = values, 1
  while size <= values.shape[1]:
    found = jnp.take_along_axis(blocks, start, axis=1, mode="clip")
    used = (left & size) != 0
    sums = jnp.where(used, sums + found, sums)
    start = jnp.where(used, start + size, start)
    # Fused into one another, the levels would be computed again and again.
    blocks = jax.lax.optimization_barrier(
      blocks + jnp.pad(blocks[:, size:], ((0, 0), (0, size)))
    )
    size *= 2
  return sums


def _part(logprobs, index, part):
  """logprobs_index part; 0 if there is no part, whatever stands there."""
  found = jnp.take_along_axis(logprobs, index, axis=1, mode="clip")
  return jnp.where(part > 0, found * part, 0.0)
