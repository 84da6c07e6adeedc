"""The device mesh: three named axes, whatever the machine.

Rows of a batch are spread over `data` and `fsdp`; parameters are spread over
`fsdp` and gathered where they are used; heads, feed-forward and vocabulary
are spread over `tensor`. The axes are Auto: the compiler propagates shardings
from a few annotations. (`jax.make_mesh` alone makes Explicit axes in recent
JAX, under which several operations refuse sharded input.)
"""

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
  sizes = [data, fsdp, tensor]
  rest = [i for i, size in enumerate(sizes) if size == -1]
  wrong = [s for s in sizes if s < 1 and s != -1]
  if wrong or len(rest) > 1:
    raise ValueError(
      f"mesh {tuple(sizes)}: sizes are positive, at most one is -1"
    )
  known = 1
  for size in sizes:
    known *= size if size > 0 else 1
  if rest and len(devices) % known == 0:
    sizes[rest[0]] = len(devices) // known
    known = len(devices)
  if known != len(devices):
    raise ValueError(
      f"mesh {tuple(sizes)} does not fit {len(devices)} devices: the product "
      "of data, fsdp and tensor must be their number"
    )
  return jax.make_mesh(
    tuple(sizes), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices
  )
