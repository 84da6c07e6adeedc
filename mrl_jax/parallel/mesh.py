"""The device mesh: three named axes, whatever the machine.

Rows of a batch are spread over `data` and `fsdp`; parameters are spread over
`fsdp` and gathered where they are used; heads, feed-forward and vocabulary
are spread over `tensor`. The axes are Auto: the compiler propagates shardings
from a few annotations. (`jax.make_mesh` alone makes Explicit axes in recent
JAX, under which several operations refuse sharded input.)
"""

import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType

AXES = ("data", "fsdp", "tensor")


def make(
  data: int,
  fsdp: int,
  tensor: int,
  devices: Sequence[jax.Device] | None = None,
) -> jax.sharding.Mesh:
  """A mesh of shape (data, fsdp, tensor); one of them may be -1 (the rest).

  Args:
    data: replicas of the parameters.
    fsdp: shards of the parameters, gathered layer by layer.
    tensor: shards of each matrix product.
    devices: all devices of the process group if None.

  Raises:
    ValueError: where the sizes do not multiply to the number of devices.
  """
  devices = list(jax.devices() if devices is None else devices)
  return jax.make_mesh(
    sizes(data, fsdp, tensor, len(devices)),
    AXES,
    axis_types=(AxisType.Auto,) * 3,
    devices=devices,
  )


def sizes(
  data: int, fsdp: int, tensor: int, devices: int
) -> tuple[int, int, int]:
  """The shape of the mesh, with what -1 stands for.

  Raises:
    ValueError: as `make`.
  """
  found = [data, fsdp, tensor]
  rest = [i for i, size in enumerate(found) if size == -1]
  wrong = [s for s in found if s < 1 and s != -1]
  if wrong or len(rest) > 1:
    raise ValueError(
      f"mesh {tuple(found)}: sizes are positive, at most one is -1"
    )
  known = math.prod(size for size in found if size > 0)
  if rest and devices % known == 0:
    found[rest[0]] = devices // known
    known = devices
  if known != devices:
    raise ValueError(
      f"mesh {tuple(found)} does not fit {devices} devices: the product of "
      "data, fsdp and tensor must be their number"
    )
  return tuple(found)
