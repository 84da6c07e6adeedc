"""Rows of an embedding that lies in parts on a mesh.

The table is cut twice: its rows over the tensor axis, its columns over the
axis that shards parameters, which also cuts the tokens. Moving the table
would cost V D numbers; instead every device looks up its own columns for the
tokens of all who share them, and the columns change places: tokens times D
numbers. Backwards each device adds up its own part of the gradient, which is
never whole anywhere.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from mrl_jax.parallel import sharding


class _Layout(NamedTuple):
  """Over which mesh axes tokens, table rows and table columns are cut."""

  rows: tuple[str, ...]
  vocab: str | None
  embed: str | None


def take(
  table: Float[Array, "V D"], tokens: Int[Array, "B ..."], kind: str
) -> Float[Array, "B ... D"]:
  """y_i = table[token_i], in the dtype `kind`; gradients add in the table's.

  Tokens are in [0, V).
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return jnp.take(table, tokens, axis=0).astype(kind)
  rows = sharding.names("batch", tokens.shape[0], mesh)
  vocab = sharding.names("vocab", table.shape[0], mesh)
  embed = sharding.names("embed", table.shape[1], mesh)
  layout = _Layout(
    rows,
    vocab[0] if vocab else None,
    embed[0] if embed and embed[0] in rows else None,
  )
  return _take(table, tokens, kind, layout)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _take(table, tokens, kind, layout):
  def run(table, tokens):
    ids, mine = _own(tokens, table.shape[0], layout)
    out = jnp.take(table, jnp.where(mine, ids, 0), axis=0)
    out = jnp.where(mine[..., None], out, 0.0).astype(kind)
    if layout.embed:
      out = jax.lax.all_to_all(out, layout.embed, 0, out.ndim - 1, tiled=True)
    return jax.lax.psum(out, layout.vocab) if layout.vocab else out

  return _on_mesh(run, layout, gives=_rows(layout))(table, tokens)


def _forward(table, tokens, kind, layout):
  return _take(table, tokens, kind, layout), (table, tokens)


def _backward(kind, layout, saved, cotangent):
  def run(table, tokens, cotangent):
    ids, mine = _own(tokens, table.shape[0], layout)
    if layout.embed:
      cotangent = jax.lax.all_to_all(
        cotangent, layout.embed, cotangent.ndim - 1, 0, tiled=True
      )
    places = jnp.where(mine, ids, table.shape[0]).reshape(-1)
    cotangent = cotangent.astype(table.dtype).reshape(-1, table.shape[1])
    out = jnp.zeros_like(table).at[places].add(cotangent, mode="drop")
    rest = tuple(name for name in layout.rows if name != layout.embed)
    return jax.lax.psum(out, rest) if rest else out

  run = _on_mesh(run, layout, _rows(layout), gives=_table(layout))
  return run(*saved, cotangent), None


_take.defvjp(_forward, _backward)


def _own(tokens, size: int, layout: _Layout):
  """The tokens of all who share the columns, as rows of this part.

  Returns ids in it, and which of them are there.
  """
  if layout.embed:
    tokens = jax.lax.all_gather(tokens, layout.embed, axis=0, tiled=True)
  first = jax.lax.axis_index(layout.vocab) * size if layout.vocab else 0
  ids = tokens - first
  return ids, (ids >= 0) & (ids < size)


def _rows(layout: _Layout) -> PartitionSpec:
  return PartitionSpec(layout.rows or None)


def _table(layout: _Layout) -> PartitionSpec:
  return PartitionSpec(layout.vocab, layout.embed)


def _on_mesh(run, layout: _Layout, *more, gives):
  takes = (_table(layout), _rows(layout), *more)
  return jax.shard_map(run, in_specs=takes, out_specs=gives, check_vma=False)
