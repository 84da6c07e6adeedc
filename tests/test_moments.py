import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl_jax.kernels import moments
from tests import oracle


def draw(seed, rows=12, groups=4):
  rng = np.random.default_rng(seed)
  return (
    rng.normal(size=rows).astype(np.float32),
    rng.integers(groups, size=rows).astype(np.int32),
    rng.random(rows) < 0.8,
  )


@given(
  st.integers(0, 2**32 - 1), st.integers(0, 1), st.booleans(), st.floats(0, 2)
)
@settings(deadline=None, max_examples=30)
def test_standardize_is_the_oracles(seed, ddof, normalize, degenerate):
  values, group, valid = draw(seed)
  found = moments.standardize(
    *map(jnp.asarray, (values, group, valid)),
    ddof=ddof,
    normalize=normalize,
    degenerate_range=degenerate,
  )
  wanted = oracle.advantages(
    values, group, valid, ddof, 1e-6, normalize, degenerate
  )
  np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("constant", [0.1, 0.7, -3.3, 1e6 + 0.1, 0.0])
@pytest.mark.parametrize("size", [1, 2, 3, 6, 7, 8])
def test_equal_rewards_are_worth_exactly_nothing(size, constant):
  values = jnp.full((size,), constant, jnp.float32)
  group = jnp.zeros((size,), jnp.int32)
  found = moments.standardize(values, group, jnp.ones((size,), bool))
  assert found.tolist() == [0.0] * size


def test_a_spread_just_above_the_range_counts():
  values = jnp.asarray([0.0, 2e-6, 0.0], jnp.float32)
  group = jnp.zeros((3,), jnp.int32)
  found = moments.standardize(values, group, jnp.ones((3,), bool))
  assert found[1] > 0 > found[0]


@given(st.integers(0, 2**32 - 1), st.integers(0, 1))
@settings(deadline=None, max_examples=20)
def test_merged_moments_are_those_of_the_union(seed, ddof):
  values, group, valid = draw(seed)
  first = np.arange(12) < 5
  parts = [
    moments.grouped(*map(jnp.asarray, (values, group, valid & half)))
    for half in (first, ~first)
  ]
  merged = moments.merge(*parts)
  for g in range(12):
    x = values[valid & (group == g)].astype(np.float64)
    assert merged.count[g] == len(x)
    mean = x.mean() if len(x) else 0
    std = x.std(ddof=ddof) if len(x) > ddof else 0
    np.testing.assert_allclose(moments.mean(merged)[g], mean, atol=1e-5)
    np.testing.assert_allclose(
      moments.deviation(merged, ddof)[g], std, atol=2e-3
    )


def test_columns_are_centred_on_the_valid_rows_of_their_group():
  values = jnp.asarray([[1.0, 0.0], [5.0, 2.0], [jnp.nan, 9.0], [4.0, 4.0]])
  group = jnp.asarray([0, 0, 0, 1])
  found = moments.center(values, group, jnp.asarray([True, True, False, False]))
  assert found[:2].tolist() == [[-2.0, -1.0], [2.0, 1.0]]
  assert found[3].tolist() == [4.0, 4.0]  # nobody to compare with


def test_the_spread_of_no_row_is_minus_infinity_and_never_nan():
  values = jnp.asarray([jnp.nan, 1.0, 3.0])
  group = jnp.asarray([0, 1, 1])
  found = moments.spread(values, group, jnp.isfinite(values))
  assert found.tolist() == [-np.inf, 2.0, -np.inf]
