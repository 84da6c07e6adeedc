"""Embeddings looked up in parts: any mesh gives the rows of the table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax.kernels import lookup
from mrl_jax.parallel import costs, hlo, sharding
from mrl_jax.parallel import mesh as mesh_lib

MESHES = [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 8), (1, 4, 2)]


def gradient(table, tokens, weights):
  """The oracle: each row's gradient is the sum over where it was used."""
  out = np.zeros(table.shape, np.float64)
  np.add.at(out, np.asarray(tokens), np.asarray(weights, np.float64))
  return out


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("shape", [(8, 5), (8,), (3, 2)], ids=str)
def test_rows_and_gradients(mesh, shape):
  rng = np.random.default_rng(0)
  # A size that tensor axes of 2 and 8 cut, and columns for fsdp axes.
  table = jnp.asarray(rng.normal(size=(24, 16)), jnp.float32)
  tokens = jnp.asarray(rng.integers(0, 24, shape), jnp.int32)
  weights = jnp.asarray(rng.normal(size=(*shape, 16)), jnp.float32)

  def loss(table):
    out = lookup.take(table, tokens, "float32")
    return jnp.sum(out * weights), out

  mesh = mesh_lib.make(*mesh)
  place = sharding.spec(("vocab", "embed"), table.shape, mesh)
  placed = jax.device_put(table, jax.sharding.NamedSharding(mesh, place))
  with jax.set_mesh(mesh):
    grad, out = jax.jit(jax.grad(loss, has_aux=True))(placed)
  np.testing.assert_array_equal(out, np.asarray(table)[np.asarray(tokens)])
  wanted = gradient(table, tokens, weights)
  np.testing.assert_allclose(grad, wanted, rtol=1e-6, atol=1e-6)


def test_a_table_that_no_axis_cuts():
  table = jnp.arange(33.0).reshape(11, 3)
  tokens = jnp.asarray([[1, 10], [0, 1]], jnp.int32)

  def loss(table):
    return lookup.take(table, tokens, "float32").sum()

  with jax.set_mesh(mesh_lib.make(2, 2, 2)):
    out = jax.jit(lambda t: lookup.take(t, tokens, "bfloat16"))(table)
    grad = jax.jit(jax.grad(loss))(table)
  assert out.dtype == jnp.bfloat16
  np.testing.assert_array_equal(out, table[tokens].astype(jnp.bfloat16))
  np.testing.assert_array_equal(
    grad, gradient(table, tokens, np.ones((2, 2, 3)))
  )


def test_no_table_is_moved():
  """What crosses has the size of the looked-up rows."""
  mesh = mesh_lib.make(1, 4, 2)
  place = sharding.spec(("vocab", "embed"), (4096, 64), mesh)
  table = jax.ShapeDtypeStruct(
    (4096, 64), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, place)
  )
  tokens = jax.ShapeDtypeStruct((8, 4), jnp.int32)

  def grad(table, tokens):
    return jax.grad(
      lambda t: jnp.square(lookup.take(t, tokens, "float32")).sum()
    )(table)

  with jax.set_mesh(mesh):
    text = jax.jit(grad).lower(table, tokens).compile().as_text()
  moved = costs.measure(hlo.parse(text), 8).moved
  assert {m.kind for m in moved} >= {"all-to-all", "all-gather"}
  assert max(m.shape.size for m in moved) <= 8 * 4 * 64
