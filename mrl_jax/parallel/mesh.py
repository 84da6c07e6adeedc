"""The device mesh: three named axes, however many devices there are.

`data` and `fsdp` both spread rows; `fsdp` also spreads parameters over their
embedding axis, and `tensor` spreads heads, feed-forward and vocabulary.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np

AXES = ("data", "fsdp", "tensor")


def make(
  data: int = -1,
  fsdp: int = 1,
  tensor: int = 1,
  devices: Sequence[jax.Device] | None = None,
) -> jax.sharding.Mesh:
  """A mesh of (data, fsdp, tensor) devices; one size may be -1, the rest.

  Axes are Auto: the compiler propagates shardings from what is annotated.

  Raises:
    ValueError: the devices do not fill the mesh.
  """
  devices = jax.devices() if devices is None else list(devices)
  sizes = [data, fsdp, tensor]
  if -1 in sizes:
    known = -math.prod(sizes)
    sizes[sizes.index(-1)] = len(devices) // max(known, 1)
  if min(sizes) < 1 or math.prod(sizes) != len(devices):
    raise ValueError(
      f"data x fsdp x tensor = {data} x {fsdp} x {tensor} must use all of "
      f"the {len(devices)} devices"
    )
  kinds = (jax.sharding.AxisType.Auto,) * len(AXES)
  if devices == jax.devices():
    return jax.make_mesh(tuple(sizes), AXES, axis_types=kinds)
  grid = np.asarray(devices).reshape(sizes)
  return jax.sharding.Mesh(grid, AXES, axis_types=kinds)
