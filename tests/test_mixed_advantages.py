"""XGRPO: the peers' rewards in the baseline, against an oracle and by laws."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl_jax.transforms import advantages
from mrl_jax.types import Peers, Source
from tests import factories, oracle

rewards_ = st.floats(-3, 3, width=32)


def peers(*groups, samples):
  """What the peers earned on each group, once for each of its rows."""
  stats = [
    (len(g), np.mean(g), np.var(g)) if len(g) else (0, 0, 0) for g in groups
  ]
  rows = np.repeat(np.asarray(stats, np.float32), samples, axis=0)
  return Peers(*(jnp.asarray(column) for column in rows.T))


def batch(own, theirs):
  return factories.batch(
    rows=len(own), samples=len(own), rewards=own, group=[0] * len(own)
  )._replace(peers=peers(theirs, samples=len(own)))


def found(own, theirs, mix=None, **options):
  rows = batch(own, theirs)
  return np.asarray(
    advantages.mixed_advantages(mix, **options)(rows).advantages
  )


@settings(max_examples=60, deadline=None)
@given(
  st.lists(rewards_, min_size=2, max_size=6),
  st.lists(rewards_, max_size=6),
  st.sampled_from([None, 0.0, 0.25, 0.5, 0.9, 1.0]),
)
def test_it_is_the_weighted_union(own, theirs, mix):
  every = np.asarray(own + theirs)
  wanted = oracle.mixed_advantages(own, theirs, mix)
  if np.abs(wanted).max() > 50 or 0 < np.ptp(every) < 1e-2:
    return  # digits of float32 that are not there
  np.testing.assert_allclose(
    found(own, theirs, mix), wanted, rtol=2e-3, atol=2e-4
  )


@pytest.mark.parametrize("theirs", [[], [1.0], [0.0, 1.0, 1.0]])
@pytest.mark.parametrize("normalize", [True, False])
def test_without_a_share_for_the_peers_it_is_grpo_to_the_bit(theirs, normalize):
  rows = batch([0.0, 1.0, 0.3, 0.7, 0.1], theirs)
  grpo = advantages.group_advantages(normalize=normalize)(rows)
  mixed = advantages.mixed_advantages(0.0, normalize=normalize)(rows)
  np.testing.assert_array_equal(grpo.advantages, mixed.advantages)
  if not theirs:
    mixed = advantages.mixed_advantages(normalize=normalize)(rows)
    np.testing.assert_array_equal(grpo.advantages, mixed.advantages)


def test_by_default_it_is_the_union_on_own_rows():
  own, theirs = [0.0, 1.0, 0.0, 0.25], [1.0, 1.0, 0.5]
  source = [Source.OWN] * 4 + [Source.PEER] * 3
  union = factories.batch(
    rows=7, samples=7, rewards=own + theirs, source=source, group=[0] * 7
  )
  both = advantages.group_advantages((Source.OWN, Source.PEER))(union)
  np.testing.assert_allclose(found(own, theirs), both.advantages[:4], rtol=1e-5)


def test_equal_inexact_rewards_have_no_advantage_whoever_earned_them():
  for size in (3, 5, 6, 7, 8):
    np.testing.assert_array_equal(found([0.1] * size, [0.1] * 8), 0.0)


def test_an_all_wrong_group_learns_that_peers_can():
  values = found([0.0] * 4, [1.0] * 4)
  assert (values < -0.5).all()
  np.testing.assert_allclose(
    values, oracle.mixed_advantages([0.0] * 4, [1.0] * 4), rtol=1e-5
  )


def test_rewards_far_from_zero_keep_their_digits():
  own, theirs = [100.0, 100.125, 100.25], [100.5, 100.0]
  np.testing.assert_allclose(
    found(own, theirs), oracle.mixed_advantages(own, theirs), rtol=1e-4
  )


def test_unscored_rows_take_no_part():
  rows = batch([np.nan, 1.0, 0.0, 1.0], [1.0, 0.0])
  values = advantages.mixed_advantages()(rows)
  wanted = oracle.mixed_advantages([1.0, 0.0, 1.0], [1.0, 0.0])
  np.testing.assert_allclose(values.advantages[1:], wanted, rtol=1e-5)
  assert values.advantages[0] == 0
  assert not values.weights[0].any()


@pytest.mark.parametrize("mix", [-0.1, 1.5])
def test_a_share_outside_0_to_1_is_refused(mix):
  with pytest.raises(ValueError, match=f"mix={mix}"):
    advantages.mixed_advantages(mix)
