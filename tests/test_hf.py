"""Checkpoints on disk: exact round trips, shards, errors, memory."""

import dataclasses

import jax
import numpy as np
import pytest

from mrl_jax.model import hf, transformer
from mrl_jax.model import spec as spec_lib
from mrl_jax.parallel import mesh as mesh_lib

CONFIG = {
  "model_type": "qwen3",
  "vocab_size": 24,
  "hidden_size": 16,
  "intermediate_size": 24,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 8,
  "attention_bias": True,
  "tie_word_embeddings": False,
  "eos_token_id": [3, 5],
  "pad_token_id": 0,
}


def random_model(seed=0, **changes):
  """A model none of whose parameters is constant."""
  model = transformer.make(spec_lib.from_config({**CONFIG, **changes}))
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  rng = np.random.default_rng(seed)
  params = jax.tree.map(
    lambda leaf: jax.numpy.asarray(rng.normal(size=leaf.shape), "float32"),
    shapes,
  )
  return model, params


def assert_equal(left, right):
  jax.tree.map(np.testing.assert_array_equal, left, right)


def test_round_trip_is_exact(tmp_path):
  model, params = random_model()
  hf.save(model, params, tmp_path)
  again, loaded = hf.load(tmp_path)
  assert again.spec == model.spec
  assert_equal(params, loaded)
  assert all(leaf.dtype == "float32" for leaf in jax.tree.leaves(loaded))


def test_load_places_shards(tmp_path):
  model, params = random_model()
  hf.save(model, params, tmp_path)
  mesh = mesh_lib.make(2, 2, 2)
  again, loaded = hf.load(tmp_path, mesh, "bfloat16", "full")
  assert again.spec == dataclasses.replace(
    model.spec, compute_dtype="bfloat16", remat="full"
  )
  assert_equal(params, loaded)
  q = loaded["layers"]["q"]
  assert q.addressable_shards[0].data.shape == (3, 8, 2, 8)


if __name__ == "__main__":
  pytest.main([__file__])
