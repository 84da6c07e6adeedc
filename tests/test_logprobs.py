import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from mrl_jax.kernels import logprobs
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.parallel import sharding
from mrl_jax.types import Distribution
from tests import oracle

B, T, V, D = 3, 5, 11, 4
DISTRIBUTIONS = [
  Distribution(),
  Distribution(temperature=0.5),
  Distribution(top_k=3),
  Distribution(top_p=0.6),
  Distribution(1.7, 6, 0.7),
]


def inputs(seed=0, scale=2.0):
  rng = np.random.default_rng(seed)
  hidden = jnp.asarray(rng.normal(size=(B, T, D)) * scale, jnp.float32)
  unembedding = jnp.asarray(rng.normal(size=(V, D)), jnp.float32)
  tokens = jnp.asarray(rng.integers(V, size=(B, T)), jnp.int32)
  allowed = jnp.asarray(np.arange(V) < V - 2)
  return hidden, unembedding, tokens, allowed


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_adjust_is_the_oracles_distribution(distribution):
  logits = np.random.default_rng(1).normal(size=(4, 6, V)) * 3
  allowed = np.arange(V) != 2
  found = logprobs.adjust(
    jnp.asarray(logits, jnp.float32), jnp.asarray(allowed), distribution
  )
  expected = [
    [oracle.adjust(x, allowed, *distribution) for x in row] for row in logits
  ]
  np.testing.assert_allclose(
    jax.nn.log_softmax(found), expected, rtol=1e-4, atol=1e-5
  )


@given(st.integers(0, 2**32 - 1), st.integers(1, V), st.floats(0.05, 0.99))
@settings(deadline=None, max_examples=20)
def test_top_k_and_top_p_keep_no_more_than_asked(seed, top_k, top_p):
  x = np.random.default_rng(seed).normal(size=(V,)).astype(np.float32) * 4
  allowed = jnp.ones((V,), bool)
  few = logprobs.adjust(jnp.asarray(x), allowed, Distribution(1.0, top_k, 1.0))
  assert set(np.flatnonzero(np.isfinite(few))) == set(np.argsort(-x)[:top_k])
  kept = np.isfinite(
    logprobs.adjust(jnp.asarray(x), allowed, Distribution(1.0, 0, top_p))
  )
  p = np.exp(x - x.max(), dtype=np.float64)
  p /= p.sum()
  assert p[kept].sum() >= top_p * (1 - 1e-5)
  assert p[kept].sum() - p[kept].min() < top_p
  assert p[kept].min() >= p[~kept].max(initial=0)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("block_bytes", [1, 2 * B * V * 4, 1 << 20])
def test_score_is_the_oracles_at_any_block_size(distribution, block_bytes):
  args = inputs()
  found = logprobs.score(*args, distribution, block_bytes)
  expected = oracle.score(*map(np.asarray, args), distribution)
  np.testing.assert_allclose(found.logprobs, expected[0], rtol=2e-5, atol=2e-5)
  np.testing.assert_allclose(found.entropies, expected[1], rtol=2e-5, atol=2e-5)


def naive(hidden, unembedding, tokens, allowed, distribution):
  """Autodiff through a [B, T, V] array."""
  raw = jnp.einsum("btd,vd->btv", hidden, unembedding)
  x = logprobs.adjust(raw, allowed, distribution)
  own = jnp.arange(x.shape[-1])[None, None, :] == tokens[..., None]
  x = jnp.where(own, raw / distribution.temperature, x)
  logp = jax.nn.log_softmax(x)
  safe = jnp.where(jnp.isfinite(logp), logp, 0.0)
  entropy = -(jnp.exp(logp) * safe).sum(-1)
  return (jnp.where(own, safe, 0.0)).sum(-1), entropy


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("block_bytes", [2 * B * V * 4, 1 << 20])
def test_gradients_are_autodiffs(distribution, block_bytes):
  hidden, unembedding, tokens, allowed = inputs(2)
  a, b = np.random.default_rng(3).normal(size=(2, B, T)).astype(np.float32)

  def loss(score, *args):
    logp, entropy = score(*args, tokens, allowed, distribution)
    return (a * logp + b * entropy).sum()

  def fused(*args):
    return logprobs.score(*args, block_bytes)

  found = jax.grad(lambda *x: loss(fused, *x), (0, 1))(hidden, unembedding)
  wanted = jax.grad(lambda *x: loss(naive, *x), (0, 1))(hidden, unembedding)
  for x, y in zip(found, wanted, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_gradients_are_finite_differences():
  hidden, unembedding, tokens, allowed = inputs(4, scale=0.5)

  def score(h, w):
    h, w = jnp.asarray(h), jnp.asarray(w)
    return tuple(logprobs.score(h, w, tokens, allowed, Distribution(0.8), 300))

  check_grads(
    score, (hidden, unembedding), 1, modes=["rev"], rtol=2e-2, atol=2e-2
  )


@pytest.mark.parametrize(
  ("steps", "block_bytes", "width"),
  [(16, 1 << 20, 16), (16, 4 * 8 * 4 * 6, 6), (7, 1, 1), (10, 1100, 5)],
)
def test_blocks_are_even_and_as_large_as_allowed(steps, block_bytes, width):
  assert logprobs._width(4, steps, 8, "tpu", block_bytes) == width
  assert logprobs._width(4, steps, 8, "cpu", block_bytes) == width


def test_blocks_suit_the_platform():
  large = (1, 4096, 151936)
  assert logprobs._width(*large, "cpu") < 128
  assert logprobs._width(*large, "tpu") > 500


MESHES = [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 8), (1, 4, 2)]


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize(
  "distribution",
  [Distribution(0.7), Distribution(1.3, 5, 0.8)],
  ids=["plain", "cut"],
)
def test_any_mesh_gives_the_same(shape, distribution):
  rng = np.random.default_rng(3)
  hidden = jnp.asarray(rng.normal(size=(8, 6, 16)), jnp.float32)
  unembedding = jnp.asarray(rng.normal(size=(32, 16)), jnp.float32)
  tokens = jnp.asarray(rng.integers(0, 32, (8, 6)), jnp.int32)
  allowed = jnp.arange(32) % 7 != 3

  def loss(h, w):
    out = logprobs.score(h, w, tokens, allowed, distribution, 2000)
    weights = jnp.cos(jnp.arange(48.0)).reshape(8, 6)
    return jnp.sum(weights * (out.logprobs + 0.3 * out.entropies)), out

  both = jax.value_and_grad(loss, (0, 1), has_aux=True)
  wanted = jax.jit(both)(hidden, unembedding)
  mesh = mesh_lib.make(*shape)
  axes = (("batch", None, None), ("vocab", "embed"))
  placed = [
    jax.device_put(
      x, jax.sharding.NamedSharding(mesh, sharding.spec(a, x.shape, mesh))
    )
    for x, a in zip((hidden, unembedding), axes, strict=True)
  ]
  with jax.set_mesh(mesh):
    found = jax.jit(both)(*placed)
  for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def test_what_a_mesh_cannot_cut_is_whole_on_every_device():
  """Three rows, a vocabulary of 11: neither is a multiple of 2."""
  hidden, unembedding, tokens, allowed = inputs(7)
  arguments = (hidden, unembedding, tokens, allowed)

  def grad(h, w):
    return jax.grad(
      lambda *x: logprobs.score(
        *x, *arguments[2:], Distribution()
      ).logprobs.sum(),
      (0, 1),
    )(h, w)

  wanted = jax.jit(grad)(*arguments[:2])
  with jax.set_mesh(mesh_lib.make(2, 2, 2)):
    found = jax.jit(grad)(*arguments[:2])
  for x, y in zip(found, wanted, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def scored(logits, token, allowed, distribution):
  """The scorer's log-prob of one token, its logits given as they are."""
  x = jnp.asarray(logits, jnp.float32)[None, None, :]
  one = jnp.eye(x.shape[-1])
  out = logprobs.score(x, one, jnp.full((1, 1), token), allowed, distribution)
  return float(out.logprobs[0, 0])


def sampled(logits, token, allowed, distribution):
  """The sampler's: softmax over what `adjust` leaves."""
  x = logprobs.adjust(jnp.asarray(logits, jnp.float32), allowed, distribution)
  return float(jax.nn.log_softmax(x)[token])


def test_a_policys_ratio_with_itself_is_one():
  both = jnp.ones((2,), bool)
  half = Distribution(temperature=0.5)
  behavior = sampled([2.0, 0.0], 0, both, half)
  assert np.exp(scored([2.0, 0.0], 0, both, half) - behavior) == 1.0
  mixed = scored([2.0, 0.0], 0, both, Distribution())
  np.testing.assert_allclose(np.exp(behavior - mixed), 1.115, atol=1e-3)
  logits, three = np.log([0.5, 0.3, 0.2]), jnp.ones((3,), bool)
  nucleus = Distribution(top_p=0.8)
  for token, p in ((0, 0.625), (1, 0.375)):
    behavior = sampled(logits, token, three, nucleus)
    np.testing.assert_allclose(np.exp(behavior), p, rtol=1e-5)
    ratio = np.exp(scored(logits, token, three, nucleus) - behavior)
    np.testing.assert_allclose(ratio, 1.0, atol=1e-6)
  assert sampled(logits, 2, three, nucleus) == -np.inf


def test_barred_ids_have_no_mass_at_the_scale_of_a_real_vocabulary():
  size, decodable = 151_936, 151_669
  allowed = jnp.arange(size) < decodable
  x = jnp.zeros((size,)).at[decodable:].set(50.0)
  adjusted = logprobs.adjust(x, allowed, Distribution())
  assert int(jnp.isfinite(adjusted).sum()) == decodable
  out = logprobs.score(
    x[None, None, :1],  # width 1: every logit is 0 times its row
    jnp.ones((size, 1)),
    jnp.zeros((1, 1), jnp.int32),
    allowed,
    Distribution(),
  )
  np.testing.assert_allclose(out.logprobs, -np.log(decodable), rtol=1e-6)
  np.testing.assert_allclose(out.entropies, np.log(decodable), rtol=1e-6)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_token_outside_the_support_stays_finite(distribution):
  hidden, unembedding, tokens, allowed = inputs(6)
  barred = jnp.full_like(tokens, V - 1)

  def loss(h, w):
    out = logprobs.score(h, w, barred, allowed, distribution)
    return (out.logprobs + out.entropies).sum()

  value, gradients = jax.value_and_grad(loss, (0, 1))(hidden, unembedding)
  assert np.isfinite(value)
  assert all(np.isfinite(g).all() for g in gradients)
