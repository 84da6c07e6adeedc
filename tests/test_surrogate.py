import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl_jax.kernels import surrogate
from tests import oracle


def draw(seed, shape=(3, 5)):
  rng = np.random.default_rng(seed)
  rows = shape[:1]
  arrays = (
    rng.normal(size=shape),
    rng.normal(size=shape),
    rng.uniform(0, 0.5, rows),
    rng.uniform(0, 1, rows),
  )
  return [jnp.asarray(x, jnp.float32) for x in arrays]


@given(st.integers(0, 2**32 - 1), st.sampled_from([None, 1.5, 3.0]))
@settings(deadline=None, max_examples=30)
def test_clipped_is_the_oracles(seed, dual_clip):
  args = draw(seed)
  found = surrogate.clipped(*args, dual_clip)
  wanted = oracle.clipped(*map(np.asarray, args), dual_clip)
  np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [0.0, 0.2])
@pytest.mark.parametrize("advantage", [-2.0, 1.0])
def test_at_ratio_one_the_gradient_is_reinforces(window, advantage):
  one = jnp.full((1,), window)
  a = jnp.full((1, 1), advantage)
  found = jax.grad(lambda d: surrogate.clipped(d, a, one, one).sum())(
    jnp.zeros((1, 1))
  )
  assert found.item() == -advantage


@pytest.mark.parametrize(
  ("log_ratio", "advantage", "moves"),
  [(0.5, 1, False), (0.5, -1, True), (-0.5, 1, True), (-0.5, -1, False)],
)
def test_only_moves_that_go_further_are_clipped(log_ratio, advantage, moves):
  low, high = jnp.full((1,), 0.2), jnp.full((1,), 0.28)
  a = jnp.full((1, 1), float(advantage))
  found = jax.grad(lambda d: surrogate.clipped(d, a, low, high).sum())(
    jnp.full((1, 1), log_ratio)
  )
  assert (found.item() != 0) == moves


def test_dual_clip_bounds_negative_rows_only():
  low = jnp.full((1,), 0.2)
  d = jnp.full((1, 2), 4.0)
  a = jnp.asarray([[-1.0, -0.5]])
  found = surrogate.clipped(d, a, low, low, 3.0)
  np.testing.assert_allclose(found, [[3.0, 1.5]])
  gradient = jax.grad(lambda d: surrogate.clipped(d, a, low, low, 3.0).sum())
  assert not gradient(d).any()
  np.testing.assert_allclose(
    surrogate.clipped(d, -a, low, low, 3.0),
    surrogate.clipped(d, -a, low, low),
  )


def test_an_unset_window_is_loud():
  unset = jnp.full((1,), jnp.nan)
  one = jnp.ones((1, 1))
  assert jnp.isnan(surrogate.clipped(one, one, unset, unset)).all()
  assert jnp.isnan(surrogate.clipped(one, -one, unset, unset, 3.0)).all()


def test_sequence_ratio_is_the_geometric_mean_with_token_gradients():
  d = jnp.asarray([[0.3, -0.9, 5.0], [1.0, 2.0, 3.0]])
  mask = jnp.asarray([[True, True, False], [True, True, True]])
  found = surrogate.sequence_log_ratios(d, mask)
  np.testing.assert_allclose(found[0, :2], [-0.3, -0.3], rtol=1e-6)
  np.testing.assert_allclose(found[1], [2.0, 2.0, 2.0], rtol=1e-6)
  weights = jnp.asarray([[2.0, 3.0, 7.0], [1.0, 1.0, 1.0]])
  gradient = jax.grad(
    lambda d: (weights * surrogate.sequence_log_ratios(d, mask)).sum()
  )(d)
  np.testing.assert_allclose(gradient, weights * mask)


def test_summed_token_gradients_are_the_sequences():
  """GSPO-token with equal advantages has GSPO's gradient."""
  d = jnp.asarray([[0.2, -0.1, 0.05]])
  mask = jnp.ones((1, 3), bool)

  def tokens(d):
    return jnp.exp(surrogate.sequence_log_ratios(d, mask)).mean()

  np.testing.assert_allclose(
    jax.grad(tokens)(d), jax.grad(lambda d: jnp.exp(d.mean()))(d), rtol=1e-6
  )


def test_cispo_keeps_the_gradient_of_clipped_tokens():
  logp = jnp.asarray([[-1.0, -2.0]])
  d, a = jnp.asarray([[3.0, -3.0]]), jnp.asarray([[2.0, -1.0]])
  low = jnp.full((1,), 0.2)
  gradient = jax.grad(
    lambda x: surrogate.cispo(x, d + x - logp, a, low, low).sum()
  )(logp)
  np.testing.assert_allclose(gradient, [[-1.2 * 2, 0.8]], rtol=1e-6)


@pytest.mark.parametrize(
  ("estimator", "wanted"),
  [
    (surrogate.k1, lambda d: d),
    (surrogate.k2, lambda d: d**2 / 2),
    (surrogate.k3, lambda d: np.exp(-d) - 1 + d),
  ],
)
def test_divergences_are_their_equations(estimator, wanted):
  a, b = np.random.default_rng(0).normal(size=(2, 2, 3)).astype(np.float32)
  found = estimator(jnp.asarray(a), jnp.asarray(b))
  np.testing.assert_allclose(
    found, wanted(a.astype(np.float64) - b), rtol=1e-5, atol=1e-6
  )


@pytest.mark.parametrize(
  "estimator", [surrogate.k1, surrogate.k2, surrogate.k3]
)
@pytest.mark.parametrize("logp", [-200.0, -1e30, 0.0])
@pytest.mark.parametrize("ref", [0.0, -200.0])
def test_divergences_stay_finite_far_out(estimator, logp, ref):
  f = lambda x: estimator(x, jnp.full((1, 1), ref)).sum()  # noqa: E731
  value, gradient = jax.value_and_grad(f)(jnp.full((1, 1), logp))
  assert np.isfinite(value) and np.isfinite(gradient).all()


def test_gradients_of_k1_and_k2_average_to_that_of_the_kl():
  """Enumerated over a small softmax policy; k1 is not the score function."""
  logits = jnp.asarray([0.3, -0.8, 1.1])
  ref = jax.nn.log_softmax(jnp.asarray([-0.2, 0.4, 0.1]))

  def true(x):
    logp = jax.nn.log_softmax(x)
    return (jnp.exp(logp) * (logp - ref)).sum()

  p = jax.lax.stop_gradient(jax.nn.softmax(logits))
  for estimator in (surrogate.k1, surrogate.k2):

    def sampled(x, estimator=estimator):
      logp = jax.nn.log_softmax(x)
      return (p * estimator(logp[None], ref[None])[0]).sum()

    np.testing.assert_allclose(
      jax.grad(sampled)(logits), jax.grad(true)(logits), atol=1e-6
    )
