"""TPU generations: what one device computes, holds and moves.

A device is what JAX calls one: a whole chip, or half of one on TPU7x, whose
two cores are told apart. Figures are those that Google
publishes for the chip (https://cloud.google.com/tpu/docs); memory is what the
compiler lets a program use of it, as it says where a program asks for more.
Nothing here needs a TPU, or finds out about one.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import jax

GIB = 2**30


class Chip(NamedTuple):
  """One device, dense bfloat16, all per second."""

  name: str
  flops: float
  memory: int  # bytes of HBM that a program may use
  traffic: float  # bytes to and from HBM
  wire: float  # bytes received from other chips
  clock: float  # cycles


# By the device's kind. The clock follows from the peak and the size of the
# matrix units: v5e, for example, has four of 128 x 128.
CHIPS = {
  "TPU v4": Chip("v4", 275e12, int(30.75 * GIB), 1228e9, 300e9, 1.05e9),
  "TPU v5 lite": Chip("v5e", 197e12, int(15.75 * GIB), 819e9, 200e9, 1.5e9),
  "TPU v5": Chip("v5p", 459e12, int(95.74 * GIB), 2765e9, 600e9, 1.75e9),
  "TPU v6 lite": Chip("v6e", 918e12, int(31.25 * GIB), 1638e9, 400e9, 1.75e9),
  "TPU7x": Chip("tpu7x", 1153.5e12, int(94.75 * GIB), 3690e9, 300e9, 2.2e9),
}
_NAME = re.compile(r"(v4|v5e|v5p|v6e|tpu7x):\d+x\d+(x\d+)?")


def devices(topology: str) -> list[jax.Device]:
  """Devices to compile for, of a topology such as v5e:2x4 or v5p:4x4x4.

  Raises:
    ValueError: for a topology that there is not.
    ImportError: where libtpu, which has the compiler, is not installed.
  """
  if not _NAME.fullmatch(topology):
    raise ValueError(
      f"topology is {topology!r}; allowed: v5e:2x4, v6e:4x4, v5p:2x2x4 and "
      "the like, of v4, v5e, v5p, v6e or tpu7x"
    )
  try:
    import libtpu  # noqa: F401
  except ImportError:
    raise ImportError(
      "compiling for a TPU needs libtpu, which is not installed: pip install "
      "'mrl_jax[tpu]'"
    ) from None
  from jax.experimental import topologies

  # Its two cores are one device to JAX; the compiler's default is not that.
  v4 = {"chip_config_name": "megacore"} if topology.startswith("v4:") else {}
  with _no_tpu_here():
    try:
      found = topologies.get_topology_desc(
        platform="tpu", topology_name=topology, **v4
      )
    except Exception as error:
      raise ValueError(
        f"topology is {topology!r}, which the compiler refuses: {error}"
      ) from None
  return list(found.devices)


@contextmanager
def _no_tpu_here() -> Iterator[None]:
  """Lets libtpu start where there is no TPU, beside other processes."""
  wanted = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  }
  added = {k: v for k, v in wanted.items() if k not in os.environ}
  os.environ.update(added)
  try:
    yield
  finally:
    for name in added:
      del os.environ[name]


def of(device: jax.Device) -> Chip:
  """The figures of a device.

  Raises:
    ValueError: for a device that is not in the table.
  """
  if device.device_kind not in CHIPS:
    raise ValueError(
      f"device kind is {device.device_kind!r}; known: {', '.join(CHIPS)}"
    )
  return CHIPS[device.device_kind]
