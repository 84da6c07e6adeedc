"""Moving a policy's arrays to host memory and back, bit for bit.

Where policies take turns on the same devices, the state of those that wait
can leave the devices. `to_host` copies every array into host memory, shard by
shard, and frees the device's; `to_device` is its inverse. Where the backend
has pinned host memory the arrays stay JAX arrays with the same sharding in
another kind of memory; elsewhere each becomes a `Shards` of NumPy arrays.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

HOST = "pinned_host"


@dataclasses.dataclass(frozen=True)
class Shards:
  """A sharded array as NumPy pieces, one for each part that is here."""

  shape: tuple[int, ...]
  sharding: jax.sharding.Sharding
  pieces: dict[tuple, np.ndarray]  # by index; copies of a part are kept once


def to_host(tree: Any, pinned: bool = True) -> Any:
  """Moves a tree's device arrays to host memory, and frees the device's.

  Whatever is on the host already stays as it is. The given arrays cannot be
  used any more, nor others that share their buffers.

  Args:
    tree: Any tree; leaves that are no JAX arrays are left alone.
    pinned: Use the backend's pinned host memory if it has any.
  """
  leaves, structure = jax.tree.flatten(tree)
  there = [i for i, leaf in enumerate(leaves) if _on_device(leaf)]
  gone = [leaves[i] for i in there]
  for i in there:
    leaves[i] = _copied(leaves[i], pinned)
  # Not before every copy is there: two leaves may share one buffer.
  jax.block_until_ready(leaves)
  for leaf in gone:
    leaf.delete()
  return jax.tree.unflatten(structure, leaves)


def to_device(tree: Any, shardings: Any) -> Any:
  """Moves a tree to the devices; `shardings` has its structure.

  Arrays that lie as they should stay as they are; host copies are freed.

  Raises:
    ValueError: for `Shards` that should come back with another sharding than
      they had.
  """
  leaves, structure = jax.tree.flatten(tree)
  lies = structure.flatten_up_to(shardings)
  placed = [_placed(leaf, to) for leaf, to in zip(leaves, lies, strict=True)]
  jax.block_until_ready(placed)
  for leaf in leaves:
    if isinstance(leaf, jax.Array) and leaf.sharding.memory_kind == HOST:
      leaf.delete()
  return jax.tree.unflatten(structure, placed)


def device_bytes(tree: Any) -> int:
  """Bytes that a tree's arrays take on this process's devices, together."""
  return sum(
    shard.data.nbytes
    for leaf in jax.tree.leaves(tree)
    if _on_device(leaf)
    for shard in leaf.addressable_shards
  )


def _on_device(leaf: Any) -> bool:
  return isinstance(leaf, jax.Array) and leaf.sharding.memory_kind != HOST


def _has_pinned(sharding: jax.sharding.Sharding) -> bool:
  return all(
    any(memory.kind == HOST for memory in device.addressable_memories())
    for device in sharding.addressable_devices
  )


def _copied(leaf: jax.Array, pinned: bool) -> Any:
  if pinned and _has_pinned(leaf.sharding):
    return jax.device_put(leaf, leaf.sharding.with_memory_kind(HOST))
  pieces: dict[tuple, np.ndarray] = {}
  for shard in leaf.addressable_shards:
    if _key(shard.index) not in pieces:
      pieces[_key(shard.index)] = np.array(shard.data)  # a copy, always
  return Shards(leaf.shape, leaf.sharding, pieces)


def _placed(leaf: Any, sharding: jax.sharding.Sharding) -> jax.Array:
  if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
    return leaf
  if not isinstance(leaf, Shards):
    return jax.device_put(leaf, sharding)
  if leaf.sharding != sharding:
    raise ValueError(
      f"shards of an array {leaf.shape} under {leaf.sharding} cannot come "
      f"back under {sharding}: move them back as they were, then reshard"
    )
  return jax.make_array_from_callback(
    leaf.shape, sharding, lambda index: leaf.pieces[_key(index)]
  )


def _key(index: tuple[slice, ...]) -> tuple:
  return tuple((part.start, part.stop) for part in index)
