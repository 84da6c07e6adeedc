"""Draws from a vocabulary in parts are those from a whole one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax.parallel import costs, hlo, sharding
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.sampling import draws
from mrl_jax.types import Distribution

ROWS, WIDTH, VOCAB = 16, 8, 1024


def arguments(seed=0):
  rng = np.random.default_rng(seed)
  hidden = jnp.asarray(rng.normal(size=(ROWS, WIDTH)) * 2, jnp.float32)
  unembedding = jnp.asarray(rng.normal(size=(VOCAB, WIDTH)), jnp.float32)
  allowed = jnp.arange(VOCAB) % 5 != 2
  # Also the ends of the unit interval, where rounding has most to spoil.
  uniform = rng.uniform(size=ROWS).astype(np.float32)
  uniform[:2] = 0.0, np.nextafter(np.float32(1), np.float32(0))
  return hidden, unembedding, allowed, jnp.asarray(uniform)


def run(mesh, distribution, seed=0):
  hidden, unembedding, allowed, uniform = arguments(seed)

  def sample(h, w):
    return draws.sample(h, w, allowed, distribution, uniform)

  with jax.set_mesh(mesh):
    return jax.device_get(jax.jit(sample)(hidden, unembedding))


@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 2, 2)], ids=str)
@pytest.mark.parametrize(
  "distribution",
  [Distribution(0.8), Distribution(1.5, 40, 0.9), Distribution(0.02, 3)],
  ids=["plain", "cut", "sharp"],
)
def test_any_mesh_draws_the_same(shape, distribution):
  one = mesh_lib.make(1, 1, 1, devices=jax.devices()[:1])
  for seed in range(3):
    wanted = run(one, distribution, seed)
    found = run(mesh_lib.make(*shape), distribution, seed)
    np.testing.assert_array_equal(found[0], wanted[0])
    for x, y in zip(found[1:], wanted[1:], strict=True):
      np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
  assert (wanted[0] % 5 != 2).all() and np.isfinite(wanted[1]).all()


def test_no_logits_cross():
  mesh = mesh_lib.make(2, 2, 2)
  hidden, unembedding, allowed, uniform = arguments()
  place = sharding.spec(("vocab", None), unembedding.shape, mesh)
  place = jax.sharding.NamedSharding(mesh, place)
  rows = sharding.batch(mesh)

  def sample(h, w, u):
    return draws.sample(h, w, allowed, Distribution(1.0, 7), u)

  with jax.set_mesh(mesh):
    compiled = (
      jax.jit(sample)
      .lower(
        jax.device_put(hidden, rows),
        jax.device_put(unembedding, place),
        jax.device_put(uniform, rows),
      )
      .compile()
    )
  cost = costs.measure(hlo.parse(compiled.as_text()), 8)
  assert cost.moved
  assert max(moved.shape.size for moved in cost.moved) <= ROWS * WIDTH
