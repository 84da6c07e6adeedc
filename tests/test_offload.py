"""Offloading a training state: bit for bit, same layout, memory freed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mrl_jax.parallel import mesh, offload, sharding
from mrl_jax.train import state as state_lib

SHAPES = [(8, 1, 1), (2, 2, 2)]
WAYS = pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "numpy"])
MESHES = pytest.mark.parametrize("shape", SHAPES, ids=str)


def make_state(shape):
  """A small training state, its shardings and a donating step."""
  on = mesh.make(*shape)
  rng = np.random.default_rng(0)
  axes = {"w": ("embed", "mlp"), "b": ("mlp",), "odd": (None,)}
  params = {
    "w": jnp.asarray(rng.normal(size=(16, 8)), jnp.float32),
    "b": jnp.asarray(rng.normal(size=8), jnp.bfloat16),
    "odd": jnp.asarray([np.nan, -0.0, np.inf, 1e-45, 3.0], jnp.float32),
  }
  params = jax.device_put(params, sharding.tree(axes, params, on))
  optimizer = optax.adam(1e-2)
  state = state_lib.init(optimizer, params, on)
  shardings = state_lib.of(optimizer, params, on)

  def step(state):
    grads = jax.tree.map(jnp.cos, state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return state._replace(
      params=params, opt_state=opt_state, step=state.step + 1
    )

  step = jax.jit(step, donate_argnums=0, out_shardings=shardings)
  return state, shardings, step


def bits(tree):
  """The bytes of every leaf, on every device."""
  return [
    [np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards]
    for leaf in jax.tree.leaves(tree)
  ]


def layout(tree):
  return [(x.sharding, x.dtype, x.shape) for x in jax.tree.leaves(tree)]


@WAYS
@MESHES
def test_there_and_back_is_the_identity(shape, pinned):
  state, shardings, step = make_state(shape)
  state = step(state)  # moments that are not zero
  before, lies = bits(state), layout(state)
  back = offload.to_device(offload.to_host(state, pinned), shardings)
  assert bits(back) == before
  assert layout(back) == lies
  assert int(back.step) == 1


@WAYS
@MESHES
def test_the_devices_memory_is_freed(shape, pinned):
  state, shardings, _ = make_state(shape)
  leaves = jax.tree.leaves(state)
  full = offload.device_bytes(state)
  assert full >= sum(x.nbytes for x in leaves)
  hosted = offload.to_host(state, pinned)
  assert all(leaf.is_deleted() for leaf in leaves)
  assert offload.device_bytes(hosted) == 0
  kinds = [
    leaf.sharding.memory_kind if pinned else type(leaf)
    for leaf in jax.tree.leaves(hosted)
  ]
  assert set(kinds) == {"pinned_host" if pinned else offload.Shards}
  back = offload.to_device(hosted, shardings)
  assert offload.device_bytes(back) == full
  if pinned:
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(hosted))


@WAYS
def test_training_goes_on_as_if_nothing_had_been(pinned):
  state, shardings, step = make_state((2, 2, 2))
  for _ in range(3):
    state = step(state)
  expected = bits(state)
  state, shardings, step = make_state((2, 2, 2))
  for _ in range(3):
    state = step(offload.to_device(offload.to_host(state, pinned), shardings))
  assert bits(state) == expected
  assert step._cache_size() == 1  # the layout is the one it was compiled for


@WAYS
def test_doing_it_twice_changes_nothing(pinned):
  state, shardings, _ = make_state((2, 2, 2))
  expected = bits(state)
  once = offload.to_host(state, pinned)
  twice = offload.to_host(once, pinned)
  pairs = zip(jax.tree.leaves(once), jax.tree.leaves(twice), strict=True)
  assert all(a is b for a, b in pairs)
  back = offload.to_device(twice, shardings)
  again = offload.to_device(back, shardings)
  assert bits(again) == expected
  pairs = zip(jax.tree.leaves(back), jax.tree.leaves(again), strict=True)
  assert all(a is b for a, b in pairs)


@WAYS
def test_two_leaves_may_be_one_array(pinned):
  state, shardings, _ = make_state((2, 2, 2))
  array, lies = state.params["w"], shardings.params["w"]
  expected = np.asarray(array)
  tree = offload.to_device(
    offload.to_host([array, array], pinned), [lies, lies]
  )
  for leaf in tree:
    np.testing.assert_array_equal(leaf, expected)


def test_copies_of_a_part_are_kept_once():
  state, _, _ = make_state((8, 1, 1))  # parameters are replicated
  hosted = offload.to_host(state.params["w"], pinned=False)
  assert [piece.shape for piece in hosted.pieces.values()] == [(16, 8)]
  state, _, _ = make_state((2, 2, 2))
  hosted = offload.to_host(state.params["w"], pinned=False)
  assert [piece.shape for piece in hosted.pieces.values()] == [(8, 4)] * 4


def test_leaves_that_are_no_device_arrays():
  everywhere = sharding.replicated(mesh.make(8, 1, 1))
  tree = {"count": 3, "array": np.arange(4)}
  assert offload.to_host(tree) is not tree
  assert offload.to_host(tree)["array"] is tree["array"]
  placed = offload.to_device(tree, {"count": everywhere, "array": everywhere})
  assert int(placed["count"]) == 3
  np.testing.assert_array_equal(placed["array"], tree["array"])


def test_coming_back_elsewhere():
  state, _, _ = make_state((2, 2, 2))
  elsewhere = sharding.replicated(mesh.make(8, 1, 1))
  expected = np.asarray(state.params["w"])
  pinned = offload.to_host(state.params["w"])
  moved = offload.to_device(pinned, elsewhere)
  assert moved.sharding == elsewhere
  np.testing.assert_array_equal(moved, expected)
  pieces = offload.to_host(make_state((2, 2, 2))[0].params["w"], pinned=False)
  with pytest.raises(ValueError, match="cannot come back"):
    offload.to_device(pieces, elsewhere)
