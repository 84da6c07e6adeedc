"""Where arrays lie: each names its axes once, and one table maps the names.

A parameter carries a tuple of logical axis names, such as ("vocab", "embed");
RULES says which mesh axes each of them is spread over. A new layout is
another table, and no model code changes. An axis whose size the mesh does not
divide is replicated, so small models run on any mesh.
"""

import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

Axes = tuple[str | None, ...]
AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh

RULES: dict[str | None, tuple[str, ...]] = {
  "batch": ("data", "fsdp"),
  "time": ("tensor",),
  "vocab": ("tensor",),
  "heads": ("tensor",),
  "kv_heads": ("tensor",),
  "mlp": ("tensor",),
  "embed": ("fsdp",),
  "layers": (),
  "head_dim": (),
  None: (),
}


def spec(axes: Axes, shape: tuple[int, ...], mesh: AnyMesh) -> PartitionSpec:
  """The partition of an array; a mesh axis serves one dimension, the first.

  Raises:
    ValueError: for a name that RULES lacks, or a number of names that is not
      the array's number of dimensions.
  """
  if len(axes) != len(shape):
    raise ValueError(f"axes {axes} do not name the dimensions of {shape}")
  used: set[str] = set()
  parts: list[tuple[str, ...] | str | None] = []
  for name, size in zip(axes, shape, strict=True):
    found = names(name, size, mesh)
    if not found or used.intersection(found):
      parts.append(None)
      continue
    used.update(found)
    parts.append(found if len(found) > 1 else found[0])
  return PartitionSpec(*parts)


def names(axis: str | None, size: int, mesh: AnyMesh) -> tuple[str, ...]:
  """The mesh axes that a dimension is spread over; none that cannot cut it.

  Raises:
    ValueError: for a name that RULES lacks.
  """
  if axis not in RULES:
    raise ValueError(
      f"axis {axis!r} is not one of {sorted(filter(None, RULES))}"
    )
  found = tuple(name for name in RULES[axis] if mesh.shape[name] > 1)
  ways = math.prod(mesh.shape[name] for name in found)
  return found if size % ways == 0 else ()


def platform() -> str:
  """Of the current mesh's devices (`jax.set_mesh`), else the default one.

  A program may be compiled for devices that this machine does not have.
  """
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device.platform if device else jax.default_backend()


def tree(axes_tree: Any, shapes_tree: Any, mesh: jax.sharding.Mesh) -> Any:
  """Shardings of a tree of arrays (or shapes) from its tree of axis names."""
  return jax.tree.map(
    lambda leaf, axes: NamedSharding(mesh, spec(axes, leaf.shape, mesh)),
    shapes_tree,
    axes_tree,
  )


def batch(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Of a leaf [B, ...]: rows spread over data and fsdp."""
  return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
  """A whole copy on every device."""
  return NamedSharding(mesh, PartitionSpec())


def constrain(x: jax.Array, axes: Axes) -> jax.Array:
  """Pins an intermediate array under the current mesh (`jax.set_mesh`).

  The identity where there is no mesh, or a mesh of one device.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return x
  return jax.lax.with_sharding_constraint(x, spec(axes, x.shape, mesh))
