"""Meshes, partitions, and the same numbers on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from mrl_jax.model import spec as spec_lib
from mrl_jax.model import transformer
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.parallel import sharding

MESHES = [(8, 1, 1), (1, 8, 1), (2, 2, 2)]


def test_axes_are_auto_and_one_size_may_be_the_rest():
  mesh = mesh_lib.make(2, -1, 2)
  assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}
  assert set(mesh.axis_types) == {AxisType.Auto}
  assert mesh_lib.make(1, 1, 1, devices=jax.devices()[3:4]).size == 1


@pytest.mark.parametrize(
  "sizes",
  [(3, 1, 1), (2, 2, 1), (0, 8, 1), (-1, -1, 1), (-1, 3, 1), (-2, 2, 2)],
)
def test_a_mesh_that_does_not_fit_is_refused(sizes):
  with pytest.raises(ValueError, match="mesh"):
    mesh_lib.make(*sizes)


@pytest.mark.parametrize(
  ("axes", "shape", "want"),
  [
    (("vocab", "embed"), (64, 32), ("tensor", "fsdp")),
    (("vocab", "embed"), (63, 32), (None, "fsdp")),
    (("batch", None, "embed"), (8, 5, 32), (("data", "fsdp"), None, None)),
    (("batch", "vocab"), (6, 64), (None, "tensor")),
    (
      ("layers", "embed", "heads", "head_dim"),
      (3, 8, 4, 7),
      (None, "fsdp", "tensor", None),
    ),
    (("heads", "mlp"), (4, 4), ("tensor", None)),
  ],
)
def test_partitions(axes, shape, want):
  mesh = mesh_lib.make(2, 2, 2)
  assert sharding.spec(axes, shape, mesh) == PartitionSpec(*want)


def test_wrong_axes_are_refused():
  mesh = mesh_lib.make(2, 2, 2)
  with pytest.raises(ValueError, match="'width' is not one of"):
    sharding.spec(("width",), (8,), mesh)
  with pytest.raises(ValueError, match="do not name the dimensions"):
    sharding.spec(("embed",), (8, 8), mesh)


def test_constrain_without_a_mesh_is_the_identity():
  x = jnp.ones((8, 4))
  assert sharding.constrain(x, ("batch", None)) is x


def test_constrain_spreads_the_rows():
  mesh = mesh_lib.make(2, 2, 2)
  with jax.set_mesh(mesh):
    f = jax.jit(lambda x: sharding.constrain(x * 2, ("batch", None)))
    out = f(jnp.ones((8, 4)))
  assert out.sharding.is_equivalent_to(sharding.batch(mesh), 2)


@pytest.fixture(scope="module")
def case():
  config = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
  }
  model = transformer.make(spec_lib.from_config(config))
  params = model.init(jax.random.key(0))
  rng = np.random.default_rng(0)
  inputs = (
    jnp.asarray(rng.integers(0, 64, (8, 5)), jnp.int32),
    jnp.asarray(rng.integers(1, 6, 8), jnp.int32),
    jnp.asarray(rng.integers(0, 64, (16, 4)), jnp.int32),
  )
  return model, params, inputs, np.asarray(model.hidden(params, *inputs))


@pytest.mark.parametrize("sizes", MESHES)
def test_hidden_is_the_same_on_every_mesh(case, sizes):
  model, params, inputs, want = case
  mesh = mesh_lib.make(*sizes)
  placed = jax.device_put(params, sharding.tree(model.axes, params, mesh))
  with jax.set_mesh(mesh):
    rows = jax.device_put(inputs, sharding.batch(mesh))
    got = jax.jit(model.hidden)(placed, *rows)
  np.testing.assert_allclose(np.asarray(got), want, atol=1e-5)
  assert got.sharding.is_equivalent_to(sharding.batch(mesh), got.ndim)


def test_every_parameter_is_spread_where_its_axes_say(case):
  model, params, _, _ = case
  mesh = mesh_lib.make(1, 2, 4)
  placed = jax.device_put(params, sharding.tree(model.axes, params, mesh))
  gate = placed["layers"]["gate"]
  assert gate.addressable_shards[0].data.size == gate.size // 8
  table = placed["embedding"]
  assert table.addressable_shards[0].data.size == table.size // 8
