"""Where arrays lie: each names its axes once, and one table maps the names.

A parameter carries a tuple of logical axis names, such as ("vocab", "embed");
RULES says which mesh axes each of them is spread over. A new layout is
another table, and no model code changes. An axis whose size the mesh does not
divide is replicated, so small models run on any mesh.
"""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

Axes = tuple[str | None, ...]
AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh

RULES: dict[str | None, tuple[str, ...]] = {
  "batch": ("data", "fsdp"),
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
    if name not in RULES:
      raise ValueError(
        f"axis {name!r} is not one of {sorted(filter(None, RULES))}"
      )
    names = tuple(n for n in RULES[name] if mesh.shape[n] > 1)
    ways = 1
    for n in names:
      ways *= mesh.shape[n]
    if not names or used.intersection(names) or size % ways:
      parts.append(None)
      continue
    used.update(names)
    parts.append(names if len(names) > 1 else names[0])
  return PartitionSpec(*parts)


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
