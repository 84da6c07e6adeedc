import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl_jax.kernels import correction
from tests import oracle

ALL = [
  correction.tis_token,
  correction.tis_sequence,
  correction.mis_token,
  correction.mis_sequence,
  correction.icepop,
  correction.response_veto,
  correction.opsm,
  correction.m2po,
]
LOG_RATIOS = jnp.asarray([[0.1, -1.5, 0.8, -10.0, 0.3], [0.2, -0.3, 0, 0, 0]])
MASK = jnp.asarray([[True] * 5, [True, True, False, False, False]])
SIGNS = jnp.asarray([-1.0, -1.0])


def call(f, **options):
  return np.asarray(f(LOG_RATIOS, MASK, SIGNS, **options))


def test_truncated_ratios():
  token = np.minimum(np.exp(LOG_RATIOS), 2.0)
  np.testing.assert_allclose(call(correction.tis_token), token, rtol=1e-6)
  np.testing.assert_allclose(
    call(correction.tis_sequence)[:, 0], np.exp([-10.3, -0.1]), rtol=1e-5
  )


@pytest.mark.parametrize("f", [correction.mis_token, correction.icepop])
def test_kept_tokens(f):
  found = call(f, low=0.5, high=2.0)
  assert found[0].tolist() == [1, 0, 0, 0, 1]
  weighted = call(f, low=0.5, high=2.0, weighted=True)
  np.testing.assert_allclose(weighted, found * np.exp(LOG_RATIOS), rtol=1e-6)


def test_kept_rows():
  assert call(correction.mis_sequence)[:, 0].tolist() == [0, 1]
  assert call(correction.response_veto)[:, 0].tolist() == [0, 1]
  assert call(correction.response_veto, floor=1e-5)[:, 0].tolist() == [1, 1]


@pytest.mark.parametrize(
  ("drift", "advantage", "kept"),
  [(0.2, -1, 0), (0.2, 1, 1), (0.05, -1, 1), (-0.5, -1, 1), (0.2, 0, 1)],
)
def test_opsm_drops_bad_rows_that_drifted(drift, advantage, kept):
  log_ratios = jnp.full((1, 4), -drift).at[0, 3].set(-jnp.inf)
  mask = jnp.asarray([[True, True, True, False]])
  found = correction.opsm(
    log_ratios, mask, jnp.full((1,), float(advantage)), delta=0.1
  )
  assert found[0, :3].tolist() == [kept] * 3


@given(st.integers(0, 2**32 - 1), st.floats(0.001, 2.0))
@settings(deadline=None, max_examples=30)
def test_m2po_is_the_oracles(seed, limit):
  rng = np.random.default_rng(seed)
  log_ratios = rng.normal(size=(3, 7)).astype(np.float32)
  mask = rng.random((3, 7)) < 0.7
  found = correction.m2po(
    jnp.asarray(log_ratios), jnp.asarray(mask), jnp.zeros(3), limit
  )
  wanted = oracle.m2po(log_ratios, mask, limit)
  assert (np.asarray(found) > 0)[mask].tolist() == wanted[mask].tolist()


def test_m2po_keeps_or_drops_ties_together_whatever_their_order():
  mask = jnp.ones((1, 4), bool)
  for row in ([0.1, 1, -1, 0.1], [1, 0.1, 0.1, -1]):
    found = correction.m2po(jnp.asarray([row]), mask, jnp.zeros(1), 0.5)
    assert found[0].tolist() == [float(abs(x) < 1) for x in row]
  tight = correction.m2po(jnp.full((1, 4), 3.0), mask, jnp.zeros(1), 0.5)
  assert not tight.any()


@pytest.mark.parametrize("f", ALL)
@pytest.mark.parametrize("junk", [jnp.nan, -jnp.inf, jnp.inf, 300.0])
def test_what_is_masked_has_no_influence(f, junk):
  clean = jnp.where(MASK, LOG_RATIOS, 0.0)
  dirty = jnp.where(MASK, LOG_RATIOS, junk)
  found, wanted = (f(x, MASK, SIGNS) for x in (dirty, clean))
  assert jnp.isfinite(found).all()
  np.testing.assert_array_equal(found[MASK], wanted[MASK])


@pytest.mark.parametrize("f", ALL)
def test_on_policy_nothing_is_corrected_and_nothing_has_a_gradient(f):
  assert (f(jnp.zeros((2, 5)), MASK, SIGNS) == 1)[MASK].all()
  gradient = jax.grad(lambda x: f(x, MASK, SIGNS).sum())(LOG_RATIOS)
  assert not gradient.any()


def test_options_can_be_bound():
  f = functools.partial(correction.tis_token, cap=1.1)
  assert call(f).max() == np.float32(1.1)
