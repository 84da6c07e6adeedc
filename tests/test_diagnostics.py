"""Diagnostics of stale rows: the veto's shares, and buckets of age."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax import diagnostics
from mrl_jax.kernels import veto
from mrl_jax.types import Scores
from tests import factories

RULE = veto.Rule(0.5)


def measure(ratios, advantages, source, weights=None, rule=RULE):
  weights = np.ones_like(ratios) if weights is None else weights
  rows = factories.rows(weights, advantages=advantages, source=source)
  logprobs = jnp.log(jnp.asarray(ratios, jnp.float32))
  scores = Scores(logprobs, jnp.zeros_like(logprobs))
  return diagnostics.measure(scores, rows, rule)


def stale():
  """Of three own rows of negative advantage two have a trigger."""
  return measure(
    ratios=[
      [1, 1, 0.1, 1.5, 1],
      [1, 0.4, 1, 1, 1],
      [1, 1, 1, 1, 0.1],
      [0.1, 1, 1, 1, 3],
      [0.1, 0.1, 0.1, 0.1, 9],
    ],
    advantages=[-1, -1, -1, 1, -1],
    source=[0, 0, 0, 0, 1],
    weights=[[1] * 5, [1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1] * 5, [1] * 5],
  )


def test_shares_of_the_veto_are_their_definitions():
  found = diagnostics.summarize([stale()])
  assert found["veto"] == pytest.approx((3 + 1) / 16)
  assert found["veto_rows"] == pytest.approx(2 / 3)
  assert found["veto_position"] == pytest.approx((2 / 5 + 1 / 2) / 2)
  assert found["ratio_max"] == pytest.approx(3.0, rel=1e-6)
  assert found["peer/ratio_max"] == pytest.approx(9.0, rel=1e-6)
  # A veto is for own rows: of the peers' there is nothing to tell.
  assert stale().vetoed.tolist() == [4, 0, 0, 0]
  assert stale().negative_rows.tolist() == [3, 0, 0, 0]
  assert not any(key.startswith("peer/veto") for key in found)


def test_updates_add_and_the_maxima_stay():
  sums = stale()
  double = diagnostics.merge(sums, sums)
  one, two = diagnostics.summarize([sums]), diagnostics.summarize([double])
  assert one == pytest.approx(two)
  same = diagnostics.merge(diagnostics.zeros(sums), sums)
  jax.tree.map(np.testing.assert_array_equal, same, sums)
  assert double.vetoed[0] == 2 * sums.vetoed[0] == 8


def test_without_a_veto_nothing_is_said_of_it():
  sums = measure([[0.1, 1.0]], [-1.0], [0], rule=None)
  assert not any("veto" in key for key in diagnostics.summarize([sums]))


def test_the_measure_of_a_veto_counts_what_its_loss_leaves_out():
  rng = np.random.default_rng(0)
  rows = factories.batch(rows=8, steps=9, advantages=rng.normal(size=8))
  scores = factories.scores(rows, drift=1.0)
  sums = diagnostics.measure(scores, rows, RULE)
  mask = rows.weights != 0
  d = jnp.where(mask, scores.logprobs - rows.behavior_logprobs, 0.0)
  left = veto.veto(d, mask, rows.advantages, RULE)
  assert sums.vetoed.tolist() == [(left == 0).sum(), 0, 0, 0]
  assert sums.negative_rows[0] == (rows.advantages < 0).sum()


def report(staleness, ratio, rule=RULE, source=0):
  sums = measure([[ratio, 1.0]], [-1.0], [source], rule=rule)
  host = jax.tree.map(lambda x: np.asarray(x, np.float64), sums)
  return {"staleness": staleness, "tokens": host}


@pytest.mark.parametrize(
  ("name", "least", "most"),
  [
    ("0", 0, 0),
    ("1-3", 1, 3),
    ("4-15", 4, 15),
    ("16-63", 16, 63),
    ("64-255", 64, 255),
    ("256-1023", 256, 1023),
  ],
)
def test_both_ends_of_a_bucket_of_staleness(name, least, most):
  for age in (least, most):
    found = diagnostics.by_staleness([report(age, 1.0)])
    keys = ("clip_low", "clip_high", "veto", "kl", "ess")
    assert [*found] == [f"stale/{name}/{key}" for key in keys]


def test_updates_equally_stale_are_summed_up_together():
  ages = [(0, 1.0), (1, 1.0), (2, 0.1), (3, 0.1), (5, 0.1)]
  found = diagnostics.by_staleness([report(*age) for age in ages])
  assert found["stale/0/veto"] == 0
  assert found["stale/1-3/veto"] == pytest.approx(4 / 6)
  assert found["stale/1-3/clip_low"] == pytest.approx(2 / 6)
  assert found["stale/4-15/veto"] == 1
  assert found["stale/0/ess"] == 1
  assert diagnostics.by_staleness([]) == {}


def test_staleness_says_nothing_of_what_is_not_there():
  found = diagnostics.by_staleness([report(0, 0.1, rule=None)])
  assert "stale/0/kl" in found and "stale/0/veto" not in found
  assert diagnostics.by_staleness([report(0, 0.1, source=1)]) == {}


def test_the_first_gap_is_of_own_tokens():
  assert diagnostics.first_gap(report(0, 1.0)) == 0
  gap = diagnostics.first_gap(report(0, 0.1))
  assert gap == pytest.approx(math.log(10), rel=1e-6)
  assert diagnostics.first_gap(report(0, 0.1, source=1)) == 0
