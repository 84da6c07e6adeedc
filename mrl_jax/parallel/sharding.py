"""Where arrays lie: logical axes, and one table from them to mesh axes.

A parameter or activation names its axes once, where it is made; this table
alone says which mesh axes they are spread over. An axis whose size does not
divide is replicated, so small models run on any mesh.
"""

import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

Axes = tuple[str | None, ...]

RULES: dict[str | None, tuple[str, ...]] = {
  "batch": ("data", "fsdp"),
  "embed": ("fsdp",),
  "vocab": ("tensor",),
  "heads": ("tensor",),
  "kv_heads": ("tensor",),
  "mlp": ("tensor",),
  "layers": (),
  "head_dim": (),
  None: (),
}


def spec(
  axes: Axes, shape: tuple[int, ...], mesh: jax.sharding.Mesh
) -> PartitionSpec:
  """The PartitionSpec of an array with these logical axes.

  Raises:
    ValueError: as many axes as dimensions are needed.
    KeyError: an axis that `RULES` does not know.
  """
  if len(axes) != len(shape):
    raise ValueError(f"{len(axes)} logical axes {axes} for shape {shape}")
  used: set[str] = set()
  parts: list[tuple[str, ...] | None] = []
  for axis, size in zip(axes, shape, strict=True):
    names = tuple(n for n in RULES[axis] if n not in used)
    ways = math.prod(mesh.shape[n] for n in names)
    if ways == 1 or size % ways:
      parts.append(None)
      continue
    used.update(names)
    parts.append(names)
  return PartitionSpec(*parts)


def tree(axes: Any, shapes: Any, mesh: jax.sharding.Mesh) -> Any:
  """NamedShardings for a tree of arrays (or shapes) and its logical axes."""
  return jax.tree.map(
    lambda leaf, names: NamedSharding(mesh, spec(names, leaf.shape, mesh)),
    shapes,
    axes,
  )


def batch(mesh: jax.sharding.Mesh) -> NamedSharding:
  """For leaves that lead with rows, of any rank."""
  return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
  """The same on every device."""
  return NamedSharding(mesh, PartitionSpec())


def constrain(x: jax.Array, axes: Axes) -> jax.Array:
  """Pins an activation under `jax.set_mesh`; identity where none is set."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return x
  return jax.lax.with_sharding_constraint(x, spec(axes, x.shape, mesh))
