"""Estimators against brute-force enumeration of every subset."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl_jax import measure


def subsets(n, k):
  return list(itertools.combinations(range(n), k))


@st.composite
def samples(draw):
  n = draw(st.integers(1, 8))
  k = draw(st.integers(1, n))
  names = draw(st.lists(st.sampled_from("abcd?"), min_size=n, max_size=n))
  right = draw(st.sets(st.sampled_from("abcd")))
  answers = [None if name == "?" else name for name in names]
  return answers, [answer in right for answer in answers], k


def test_pass_at_k_by_hand():
  assert measure.pass_at_k(4, 1, 4) == 1.0
  assert measure.pass_at_k(4, 0, 4) == 0.0
  assert measure.pass_at_k(4, 1, 1) == 0.25
  assert measure.pass_at_k(4, 2, 2) == pytest.approx(5 / 6, abs=1e-15)


@given(samples())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(sample):
  _, correct, k = sample
  n = len(correct)
  want = np.mean([any(correct[i] for i in s) for s in subsets(n, k)])
  got = measure.pass_at_k(n, sum(correct), k)
  assert got == pytest.approx(want, abs=1e-14)


@given(st.integers(1, 3000), st.data())
def test_pass_at_k_is_stable_for_large_n(n, data):
  c = data.draw(st.integers(0, n))
  k = data.draw(st.integers(1, n))
  want = 1 - math.comb(n - c, k) / math.comb(n, k)
  assert measure.pass_at_k(n, c, k) == pytest.approx(want, abs=1e-10)


@given(samples())
def test_avg_at_k_is_the_mean_over_subsets(sample):
  _, correct, k = sample
  chosen = subsets(len(correct), k)
  want = np.mean([np.mean([correct[i] for i in s]) for s in chosen])
  assert measure.avg_at_k(correct, k) == pytest.approx(want, abs=1e-14)


def majority(answers, correct, subset):
  votes = {}
  for i in subset:
    if answers[i] is not None:
      votes.setdefault(answers[i], []).append(correct[i])
  most = max(map(len, votes.values()), default=0)
  leaders = [flags[0] for flags in votes.values() if len(flags) == most]
  return np.mean(leaders) if leaders else 0.0


@given(samples())
def test_maj_at_k_is_the_mean_over_subsets(sample):
  answers, correct, k = sample
  chosen = subsets(len(answers), k)
  want = np.mean([majority(answers, correct, s) for s in chosen])
  got = measure.maj_at_k(answers, correct, k)
  assert got == pytest.approx(want, abs=1e-14)


@settings(max_examples=10, deadline=None)
@given(samples())
def test_maj_at_k_by_draws_is_near_the_exact_one(sample):
  answers, correct, k = sample
  exact = measure.maj_at_k(answers, correct, k, draws=10**9)
  # At most n + 1 ways of counting votes are enumerated with draws this few,
  # so force the random branch and average many small estimates.
  got = [
    measure.maj_at_k(answers, correct, k, draws=1, seed=seed)
    for seed in range(400)
  ]
  assert np.mean(got) == pytest.approx(exact, abs=0.12)


def test_maj_at_k_splits_ties_and_ignores_the_unread():
  assert measure.maj_at_k(["a", "b"], [True, False], 2) == 0.5
  assert measure.maj_at_k(["a", None, None], [True, False, False], 3) == 1.0
  assert measure.maj_at_k([None, None], [False, False], 2) == 0.0


def test_maj_at_k_of_many_different_answers_is_seeded():
  answers = [*range(40), *["x"] * 24]
  correct = [answer == "x" for answer in answers]
  first = measure.maj_at_k(answers, correct, 16, seed=1)
  assert first == measure.maj_at_k(answers, correct, 16, seed=1)
  assert first > 0.95


@given(st.integers(1, 9), st.integers(1, 9))
def test_more_samples_than_drawn_are_refused(n, extra):
  k = n + extra
  for call in [
    lambda: measure.pass_at_k(n, 0, k),
    lambda: measure.avg_at_k([0.0] * n, k),
    lambda: measure.maj_at_k(["a"] * n, [True] * n, k),
  ]:
    with pytest.raises(ValueError, match=rf"\[1, n={n}\].*got {k}"):
      call()


def test_what_cannot_be_is_refused():
  with pytest.raises(ValueError, match="got 0"):
    measure.pass_at_k(3, 0, 0)
  with pytest.raises(ValueError, match="got 4"):
    measure.pass_at_k(3, 4, 1)
  with pytest.raises(ValueError, match="both correct and wrong"):
    measure.maj_at_k(["a", "a"], [True, False], 1)
  with pytest.raises(ValueError, match="2 answers but 1"):
    measure.maj_at_k(["a", "a"], [True], 1)
  with pytest.raises(ValueError, match="at least one"):
    measure.bootstrap([])
  with pytest.raises(ValueError, match="finite"):
    measure.bootstrap([1.0, math.nan])
  with pytest.raises(ValueError, match=r"95\.0"):
    measure.bootstrap([1.0], confidence=95.0)


def test_bootstrap_covers_the_true_mean_about_as_often_as_it_says():
  generator = np.random.default_rng(0)
  hits = 0
  for trial in range(200):
    values = generator.random(60) < 0.4
    low, high = measure.bootstrap(
      values.astype(float), confidence=0.9, draws=300, seed=trial
    )
    hits += low <= 0.4 <= high
  assert 0.82 <= hits / 200 <= 0.96


def test_bootstrap_is_seeded_and_exact_for_a_constant():
  values = np.linspace(0, 1, 30)
  assert measure.bootstrap(values, seed=3) == measure.bootstrap(values, seed=3)
  assert measure.bootstrap(values, seed=3) != measure.bootstrap(values, seed=4)
  assert measure.bootstrap([0.25] * 9) == (0.25, 0.25)
  low, high = measure.bootstrap(values)
  half = 1.96 * values.std() / math.sqrt(30)
  assert low == pytest.approx(0.5 - half, abs=0.01)
  assert high == pytest.approx(0.5 + half, abs=0.01)


@pytest.mark.parametrize("wide", [0.5, 0.9, 0.99])
def test_more_confidence_is_a_wider_interval(wide):
  values = np.arange(20.0)
  low, high = measure.bootstrap(values, confidence=wide)
  lower, higher = measure.bootstrap(values, confidence=wide + 0.009)
  assert lower <= low < high <= higher
