"""Rows that take turns in slots draw what each would draw alone.

The oracle has no cache and no slots: for each token it runs the whole prefix
through the model, and draws with the same keys.
"""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax import collate
from mrl_jax.kernels import logprobs
from mrl_jax.model import cache as cache_lib
from mrl_jax.model import spec as spec_lib
from mrl_jax.model import transformer
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.parallel import sharding
from mrl_jax.sampling import draws, engine
from mrl_jax.types import Distribution

VOCAB, STOPS, SAMPLES, SEED = 29, (1, 5), 2, 3
CONFIG = {
  "model_type": "mistral",
  "hidden_size": 16,
  "intermediate_size": 32,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "vocab_size": VOCAB,
  "rms_norm_eps": 1e-5,
  "max_position_embeddings": 512,
  "tie_word_embeddings": True,
  "rope_theta": 1e4,
  "sliding_window": 6,
}
ALLOWED = np.arange(VOCAB) != 7
WIDE = Distribution()
NARROW = Distribution(0.9, 20, 0.95)


@functools.cache
def policy(window):
  spec = spec_lib.from_config(CONFIG)
  if not window:
    spec = dataclasses.replace(spec, windows=())
  model = transformer.make(spec)
  # Large weights, so that the distributions are far from uniform.
  return model, jax.tree.map(lambda x: 2 * x, model.init(jax.random.key(0)))


def prompts(count=5):
  rng = np.random.default_rng(0)
  lengths = (3, 11, 1, 6, 8, 2, 4)[:count]
  return [rng.integers(6, VOCAB, n).tolist() for n in lengths]


def words(count, samples):
  rows = [(i, s) for i in range(count) for s in range(samples)]
  return np.asarray(rows, np.uint32)


@functools.cache
def plain(window, distribution, limit, samples=SAMPLES, count=5):
  """Every token from its whole prefix; all rows at a time."""
  model, params = policy(window)
  context, lengths = map(jnp.asarray, collate.left_pad(prompts(count)))
  unembedding = model.unembedding(params)
  keys = draws.row_keys(SEED, jnp.asarray(words(count, samples)))

  @jax.jit
  def one(tokens, position):
    states = model.hidden(params, context, lengths, tokens)
    state = jax.lax.dynamic_index_in_dim(states, position, 1, False)
    logits = logprobs.adjust(
      state @ unembedding.T, jnp.asarray(ALLOWED), distribution
    )
    own = jax.vmap(jax.random.fold_in, (0, None))(keys, position)
    return draws.draw(logits, jax.vmap(jax.random.uniform)(own))

  tokens = np.zeros((len(keys), limit), np.int32)
  chances, entropies = (np.zeros(tokens.shape, np.float32) for _ in range(2))
  sizes, live = np.zeros(len(keys), np.int32), np.ones(len(keys), bool)
  for position in range(limit):
    values = one(jnp.asarray(tokens), jnp.int32(position))
    for out, value in zip((tokens, chances, entropies), values, strict=True):
      out[live, position] = np.asarray(value)[live]
    sizes += live
    live &= ~np.isin(tokens[:, position], STOPS)
  width = sizes.max()
  return engine.Samples(
    tokens[:, :width], sizes, chances[:, :width], entropies[:, :width], ~live
  )


def sample(
  rows,
  window=False,
  distribution=WIDE,
  limit=40,
  samples=SAMPLES,
  count=5,
  shape=(1, 1, 1),
):
  model, params = policy(window)
  devices = jax.devices()[: int(np.prod(shape))]
  mesh = mesh_lib.make(*shape, devices=devices)
  shapes = jax.eval_shape(lambda: params)
  placed = jax.device_put(params, sharding.tree(model.axes, shapes, mesh))
  generate = engine.make(
    model,
    mesh,
    samples=samples,
    limit=limit,
    stop_ids=STOPS,
    allowed=ALLOWED,
    distribution=distribution,
    seed=SEED,
    rows=rows,
  )
  return generate(placed, prompts(count), words(count, samples))


def same(got, want):
  np.testing.assert_array_equal(got.lengths, want.lengths)
  np.testing.assert_array_equal(got.tokens, want.tokens)
  np.testing.assert_array_equal(got.finished, want.finished)
  np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-4)
  np.testing.assert_allclose(got.entropies, want.entropies, atol=1e-4)


@pytest.fixture
def small_rings(monkeypatch):
  """Rings that wrap, grow and shrink within a few tokens, in few sizes."""
  monkeypatch.setattr(engine, "FIRST_CAPACITY", 4)
  monkeypatch.setattr(engine, "_GROWTH", 4)
  monkeypatch.setattr(engine, "_ENTER", 2)  # so that more than one can enter


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_the_number_of_slots_changes_nothing(small_rings, rows):
  same(sample(rows), plain(False, WIDE, 40))


@pytest.mark.parametrize("limit", [1, 4, 5])
def test_a_row_ends_at_the_limit(small_rings, limit):
  same(sample(3, limit=limit), plain(False, WIDE, limit))


def test_one_sample_and_more_samples_than_slots(small_rings):
  same(sample(2, samples=1, count=7), plain(False, WIDE, 40, 1, 7))
  same(sample(2, samples=5, count=2, limit=9), plain(False, WIDE, 9, 5, 2))


def test_windows_and_a_narrow_distribution(small_rings):
  same(sample(3, True, NARROW), plain(True, NARROW, 40))
  without = plain(False, NARROW, 40)
  assert (without.lengths != plain(True, NARROW, 40).lengths).any()


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2)])
def test_meshes(shape):
  want = plain(False, WIDE, 40, SAMPLES, 7)
  same(sample(3, count=7, shape=shape), want)


def test_rings_and_slots_follow_the_live_rows(small_rings, monkeypatch):
  changes = []
  refit = cache_lib.refit

  def spy(cache, slots, capacity):
    old = len(cache.entered), cache.capacity
    changes.append((old, (len(slots), capacity)))
    return refit(cache, slots, capacity)

  monkeypatch.setattr(cache_lib, "refit", spy)
  same(sample(1), plain(False, WIDE, 40))
  assert all(new[0] == 1 for _, new in changes)
  assert any(new[1] > old[1] for old, new in changes)
  assert any(new[1] < old[1] for old, new in changes)
  changes.clear()
  same(sample(10), plain(False, WIDE, 40))
  assert any(new[0] < old[0] for old, new in changes)
  assert not any(new[0] > old[0] for old, new in changes)


def test_each_program_is_compiled_once_for_each_size(small_rings, monkeypatch):
  """However many blocks there are, and however long they are."""
  traced = []
  decode = policy(False)[0].decode

  def spy(params, tokens, cache):
    traced.append((len(tokens), cache.capacity))
    return decode(params, tokens, cache)

  spied = policy(False)[0]._replace(decode=spy), policy(False)[1]
  monkeypatch.setattr(sys.modules[__name__], "policy", lambda window: spied)
  same(sample(3), plain(False, WIDE, 40))
  assert len(traced) > 3 and len(traced) == len(set(traced))
