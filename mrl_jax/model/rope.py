"""Rotary position embedding: a head's vector is turned by its position.

The head is split in two halves; entries i and i + h/2 form a plane that turns
by position * frequency_i, so a query-key product depends on their distance
alone. Long-context models slow some of the frequencies down.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

KINDS = ("default", "linear", "llama3")


class Rope(NamedTuple):
  """Base and scaling of the frequencies."""

  theta: float = 10000.0
  kind: str = "default"
  factor: float = 1.0
  low: float = 1.0  # llama3: turns in `original` below which all is slowed
  high: float = 4.0  # llama3: turns above which nothing is
  original: int = 8192  # llama3: positions of the original training


def from_config(config: dict[str, Any]) -> Rope:
  """Reads `rope_parameters`, or the older `rope_theta` and `rope_scaling`.

  Raises:
    ValueError: for a scaling that is not supported.
  """
  values = {**(config.get("rope_scaling") or {})}
  values |= config.get("rope_parameters") or {}
  theta = values.get("rope_theta", config.get("rope_theta", 10000.0))
  kind = values.get("rope_type", values.get("type", "default"))
  if kind not in KINDS:
    raise ValueError(f"rope_type is {kind!r}; allowed: {list(KINDS)}")
  partial = values.get(
    "partial_rotary_factor", config.get("partial_rotary_factor", 1.0)
  )
  if partial != 1.0:
    raise ValueError(f"partial_rotary_factor is {partial}; allowed: [1.0]")
  rope = Rope(theta=float(theta), kind=kind)
  if kind == "default":
    return rope
  rope = rope._replace(factor=_number(values, "factor"))
  if kind == "linear":
    return rope
  return rope._replace(
    low=_number(values, "low_freq_factor"),
    high=_number(values, "high_freq_factor"),
    original=int(_number(values, "original_max_position_embeddings")),
  )


def _number(values: dict[str, Any], field: str) -> float:
  if field not in values:
    raise ValueError(f"rope scaling: {field} is missing, got {values}")
  return float(values[field])


def to_config(rope: Rope) -> dict[str, Any]:
  """Both spellings, so that old and new readers agree."""
  scaling: dict[str, Any] = {"rope_type": rope.kind}
  if rope.kind != "default":
    scaling["factor"] = rope.factor
  if rope.kind == "llama3":
    scaling |= {
      "low_freq_factor": rope.low,
      "high_freq_factor": rope.high,
      "original_max_position_embeddings": rope.original,
    }
  return {
    "rope_theta": rope.theta,
    "rope_scaling": None if rope.kind == "default" else scaling,
    "rope_parameters": {"rope_theta": rope.theta, **scaling},
  }


def frequencies(rope: Rope, head_dim: int) -> Float[np.ndarray, "half"]:
  """Radians per position of each plane.

  f_i = theta^(-2i/h); linear: f_i / factor; llama3: by turns n_i =
  original f_i / 2pi, f_i / factor below `low`, f_i above `high`, and between
  s f_i + (1 - s) f_i / factor with s = (n_i - low) / (high - low).

  Su et al. 2021, https://arxiv.org/abs/2104.09864; Llama Team 2024,
  https://arxiv.org/abs/2407.21783.
  """
  f = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
  if rope.kind == "linear":
    f = f / rope.factor
  if rope.kind == "llama3":
    turns = rope.original * f / (2 * math.pi)
    s = np.clip((turns - rope.low) / (rope.high - rope.low), 0.0, 1.0)
    f = s * f + (1 - s) * f / rope.factor
  return f.astype(np.float32)


def angles(
  rope: Rope, head_dim: int, positions: Int[Array, "*batch"]
) -> tuple[Float[Array, "*batch half"], Float[Array, "*batch half"]]:
  """Cosines and sines of each position's turns, in float32."""
  turned = positions[..., None].astype(jnp.float32)
  turned = turned * jnp.broadcast_to(
    frequencies(rope, head_dim), (*positions.shape, head_dim // 2)
  )
  return jnp.cos(turned), jnp.sin(turned)


def rotate(
  x: Float[Array, "*batch h"],
  cosines: Float[Array, "*#batch half"],
  sines: Float[Array, "*#batch half"],
) -> Float[Array, "*batch h"]:
  """Turns each plane: (a, b) -> (a cos - b sin, b cos + a sin)."""
  a, b = jnp.split(x, 2, axis=-1)
  return jnp.concatenate(
    [a * cosines - b * sines, b * cosines + a * sines], axis=-1
  )
