"""Rotation against complex numbers in float64, and its laws."""

import cmath
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl_jax.model import rope

LLAMA3 = rope.Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 64)
ROPES = [rope.Rope(), rope.Rope(1e6, "linear", 4.0), LLAMA3]


def slow_frequency(r: rope.Rope, plane: int, head_dim: int) -> float:
  """One plane at a time, the three llama3 bands spelled out."""
  f = r.theta ** (-2 * plane / head_dim)
  if r.kind == "default":
    return f
  if r.kind == "linear":
    return f / r.factor
  wavelength = 2 * math.pi / f
  if wavelength < r.original / r.high:
    return f
  if wavelength > r.original / r.low:
    return f / r.factor
  smooth = (r.original / wavelength - r.low) / (r.high - r.low)
  return (1 - smooth) * f / r.factor + smooth * f


def turn(r, x, positions):
  angles = rope.angles(r, x.shape[-1], jnp.asarray(positions))
  return rope.rotate(jnp.asarray(x), *angles)


@pytest.mark.parametrize("r", ROPES, ids=lambda r: r.kind)
def test_frequencies_match_the_bands(r):
  want = [slow_frequency(r, i, 32) for i in range(16)]
  np.testing.assert_allclose(rope.frequencies(r, 32), want, rtol=1e-6)


def test_llama3_has_all_three_bands():
  ratio = rope.frequencies(LLAMA3, 32) / rope.frequencies(
    rope.Rope(LLAMA3.theta), 32
  )
  assert ratio[0] == 1.0
  assert ratio[-1] == pytest.approx(1 / 8)
  assert np.any((ratio > 0.13) & (ratio < 0.99))


@pytest.mark.parametrize("r", ROPES, ids=lambda r: r.kind)
def test_rotation_is_a_complex_product(r):
  x = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
  positions = [0, 1, 7, 100, 3000]
  got = np.asarray(turn(r, x, positions))
  for row, position in enumerate(positions):
    for i in range(4):
      z = complex(x[row, i], x[row, i + 4])
      z *= cmath.exp(1j * position * slow_frequency(r, i, 8))
      np.testing.assert_allclose(
        got[row, [i, i + 4]], [z.real, z.imag], atol=2e-3
      )


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 200))
def test_products_depend_on_distance_alone(i, j, shift):
  x, y = jax.random.normal(jax.random.key(0), (2, 1, 8))

  def product(a, b):
    r = rope.Rope()
    return float(jnp.sum(turn(r, x, [a]) * turn(r, y, [b])))

  assert product(i, j) == pytest.approx(product(i + shift, j + shift), abs=2e-3)


def test_position_zero_is_the_identity_and_norms_are_kept():
  x = np.random.default_rng(1).normal(size=(2, 8)).astype(np.float32)
  got = np.asarray(turn(rope.Rope(), x, [0, 55]))
  np.testing.assert_array_equal(got[0], x[0])
  np.testing.assert_allclose(
    np.linalg.norm(got, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5
  )


def test_old_and_new_spellings_read_the_same():
  scaling = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
  }
  old = {"rope_theta": 500000.0, "rope_scaling": scaling}
  new = {"rope_parameters": {"rope_theta": 500000.0, **scaling}}
  assert rope.from_config(old) == rope.from_config(new) == LLAMA3
  older = {"rope_scaling": {"type": "linear", "factor": 2.0}}
  assert rope.from_config(older) == rope.Rope(1e4, "linear", 2.0)


@pytest.mark.parametrize("r", ROPES, ids=lambda r: r.kind)
def test_round_trip(r):
  assert rope.from_config(rope.to_config(r)) == r


@pytest.mark.parametrize(
  ("config", "message"),
  [
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn.*llama3"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
  ],
)
def test_what_is_not_supported_is_named(config, message):
  with pytest.raises(ValueError, match=message):
    rope.from_config(config)
