"""Streams parameters to a safetensors file.

The format is the length of a header, the header as JSON (each tensor's dtype,
shape and place), and the numbers. Written by hand, a file needs one parameter
in host memory at a time, where the usual writer wants all of them.
"""

import json
import math
from collections.abc import Iterator
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from mrl_jax.model import hf_names


def weights(
  leaves: list[tuple[hf_names.Place, jax.Array]], file: BinaryIO | None
) -> None:
  """Writes the parameters in float32, each gathered only when it is written.

  Several processes must all call this; only one has a `file`.
  """
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  offset = 0
  for place, leaf in leaves:
    for name, shape in hf_names.tensors(place, leaf.shape).items():
      stop = offset + 4 * math.prod(shape)
      header[name] = {
        "dtype": "F32",
        "shape": shape,
        "data_offsets": (offset, stop),
      }
      offset = stop
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)
  if file is not None:
    file.write(len(text).to_bytes(8, "little") + text)
  for place, leaf in leaves:
    for value in _host(place, leaf):
      if file is not None:
        tensor = hf_names.to_stored(place, value)
        file.write(np.ascontiguousarray(tensor, "<f4").data)


def _host(place: hf_names.Place, leaf: jax.Array) -> Iterator[np.ndarray]:
  """The parameter on the host, layer by layer.

  An array that was read keeps its host copy for as long as it lives, so what
  is read here are short-lived copies.
  """
  if hf_names.LAYER in place.name:
    parts = (leaf[i] for i in range(leaf.shape[0]))
  else:
    parts = (jnp.copy(leaf) for _ in range(1))
  for part in parts:
    if not part.is_fully_addressable:
      part = multihost_utils.process_allgather(part, tiled=True)
    yield np.asarray(part)
