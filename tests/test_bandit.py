"""What the probes do on small bandits: theorems, checked by enumeration."""

import itertools
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.studies import bandit as study
from experiments.studies import bandit_exact as exact
from mrl_jax.kernels import moments, surrogate
from mrl_jax.types import Peers

ROOT = pathlib.Path(study.__file__).parent.parent
SEEDS = pytest.mark.parametrize("seed", range(8))
LEARNER = np.asarray([0.1, 0.25, 0.65])
PEER = np.asarray([0.5, 0.2, 0.3])
RIGHT = np.asarray([True, False, False])
BOTH = np.asarray([True, True, False])


def slope(function, theta, h=1e-5):
  """The central difference of `function` along each parameter."""
  steps = h * np.eye(len(theta))
  return np.asarray(
    [(function(theta + e) - function(theta - e)) / (2 * h) for e in steps]
  )


def tabular(pi, peer, right):
  """One context whose logits are the parameters."""
  return exact.Bandit(
    np.log(pi), np.eye(len(pi))[None], right[None], peer[None]
  )


# The learner's gradient.


@SEEDS
def test_the_gradient_is_that_of_the_success_rate(seed):
  bandit = exact.random_bandit(seed)

  def success(theta):
    pi = exact.learner(bandit._replace(theta=theta))
    return exact.solved(pi, bandit.right).mean()

  numeric = slope(success, bandit.theta)
  np.testing.assert_allclose(exact.gradient(bandit), numeric, atol=1e-9)
  assert np.abs(numeric).max() > 1e-3


# PRP: the peer's completions.


@SEEDS
def test_prp_second_moment_is_one_plus_chi_square(seed):
  bandit = exact.random_bandit(seed)
  pi = exact.learner(bandit)
  found = exact.prp_second_moment(bandit)
  np.testing.assert_allclose(found, 1 + exact.chi2(pi, bandit.peer))
  assert (found > 1).all()
  twin = exact.prp_second_moment(bandit._replace(peer=pi))
  np.testing.assert_allclose(twin, 1.0)


def test_prp_weights_are_the_surrogates():
  bandit = exact.random_bandit(0)
  gap = np.log(exact.learner(bandit)) - np.log(bandit.peer)
  ratios = np.asarray(surrogate.ratios(jnp.asarray(gap, jnp.float32)))
  found = (bandit.peer * ratios.astype(np.float64) ** 2).sum(-1)
  np.testing.assert_allclose(found, exact.prp_second_moment(bandit), rtol=1e-5)


@SEEDS
def test_prp_is_unbiased_with_exact_weights(seed):
  bandit = exact.random_bandit(seed)
  found = exact.prp_gradient(bandit, np.zeros(bandit.right.shape))
  np.testing.assert_allclose(found, exact.gradient(bandit), atol=1e-15)


@SEEDS
@pytest.mark.parametrize("error", [0.1, 0.7, 2.0])
def test_prp_bias_stays_under_its_bound(seed, error):
  bandit = exact.random_bandit(seed)
  worst = exact.prp_worst_bias(bandit, error)
  assert 0 < worst <= exact.prp_bias_bound(bandit, error) * (1 + 1e-12)
  # No error inside the box does worse than the worst of its corners.
  rng = np.random.default_rng(seed)
  for _ in range(50):
    errors = rng.uniform(-error, error, bandit.right.shape)
    bias = exact.prp_gradient(bandit, errors) - exact.gradient(bandit)
    assert np.linalg.norm(bias) <= worst * (1 + 1e-12)


def test_prp_bias_bound_is_reached():
  """With one right answer, of the largest score, the bound is exact."""
  bandit = tabular(LEARNER, PEER, RIGHT)
  lengths = np.linalg.norm(exact.scores(bandit)[0], axis=-1)
  assert lengths.argmax() == 0
  worst = exact.prp_worst_bias(bandit, 0.7)
  bound = math.expm1(0.7) * lengths[0] * LEARNER[0]
  assert worst == pytest.approx(bound)
  assert worst == pytest.approx(exact.prp_bias_bound(bandit, 0.7))


# XGRPO: the peer's values.


@SEEDS
def test_a_baseline_does_not_change_the_mean(seed):
  bandit = exact.random_bandit(seed)
  for baseline in np.random.default_rng(seed).uniform(-1, 2, (5, 3)):
    found = exact.baseline_mean(bandit, baseline)
    np.testing.assert_allclose(found, exact.gradient(bandit), atol=1e-15)


@SEEDS
def test_what_a_baseline_costs(seed):
  bandit = exact.random_bandit(seed)
  p = exact.solved(exact.learner(bandit), bandit.right)
  at_p = exact.baseline_variance(bandit, p)
  for baseline in np.random.default_rng(seed).uniform(-1, 2, (5, 3)):
    np.testing.assert_allclose(
      exact.baseline_variance(bandit, baseline) - at_p,
      exact.excess_variance(bandit, baseline),
      atol=1e-13,
    )


@SEEDS
def test_what_a_baseline_costs_over_the_best_is_a_square(seed):
  bandit = exact.random_bandit(seed)
  pi, squares = exact.learner(bandit), (exact.scores(bandit) ** 2).sum(-1)
  mean_square = (pi * squares).sum(-1)
  best = (pi * bandit.right * squares).sum(-1) / mean_square
  for off in (-0.5, 0.2):
    excess = exact.baseline_variance(bandit, best + off)
    excess -= exact.baseline_variance(bandit, best)
    np.testing.assert_allclose(excess, off**2 * mean_square, atol=1e-13)


def test_over_the_success_rate_only_where_score_lengths_are_uncorrelated():
  """(b - p)^2 E|s|^2 is the excess over b = p for alike answers only."""
  baseline = np.asarray([0.9])

  def both(pi, right):
    bandit = tabular(pi, pi, right)
    mean_square = pi @ (exact.scores(bandit)[0] ** 2).sum(-1)
    excess = exact.baseline_variance(bandit, baseline)
    excess -= exact.baseline_variance(bandit, np.asarray([pi @ right]))
    return excess[0], (0.9 - pi @ right) ** 2 * mean_square

  excess, square = both(np.full(4, 0.25), np.asarray([True] + [False] * 3))
  assert excess == pytest.approx(square)
  # A rare right answer has the longest score: raising b above p pays.
  excess, square = both(LEARNER, RIGHT)
  assert excess < 0.8 * square


def test_a_random_baseline_of_the_peers_samples():
  """b is the mean of the peer's rewards: independent of the own sample."""
  bandit = tabular(LEARNER, PEER, RIGHT)
  p, q, size = LEARNER @ RIGHT, PEER @ RIGHT, 4
  chances = [
    math.comb(size, k) * q**k * (1 - q) ** (size - k) for k in range(size + 1)
  ]
  mean, second = np.zeros(3), 0.0
  for chance, b in zip(chances, np.arange(size + 1) / size, strict=True):
    for y in range(3):
      g = (float(RIGHT[y]) - b) * exact.scores(bandit)[0, y]
      mean += chance * LEARNER[y] * g
      second += chance * LEARNER[y] * (g @ g)
  expected = exact.gradient(bandit)
  np.testing.assert_allclose(mean, expected, atol=1e-15)
  # E over b of the excess: its mean square distance and its mean distance.
  mean_square = LEARNER @ (exact.scores(bandit)[0] ** 2).sum(-1)
  here = np.asarray([p])
  linear = exact.excess_variance(bandit, np.asarray([q]))[0]
  spread = q * (1 - q) / size * mean_square
  excess = second - expected @ expected
  excess -= exact.baseline_variance(bandit, here)[0]
  assert excess == pytest.approx(linear + spread)


# SGT: the peer's successes.


@SEEDS
def test_sgt_direction_descends_the_divergence(seed):
  bandit = exact.random_bandit(seed)
  own = exact.solved(exact.learner(bandit), bandit.right)
  peer = exact.solved(bandit.peer, bandit.right)
  chances = exact.rescue_probability(own, peer, 3)

  def divergence(theta):
    found = exact.success_divergence(bandit._replace(theta=theta))
    return (chances * found).mean()  # the gate is not differentiated

  numeric = -slope(divergence, bandit.theta)
  found = exact.sgt_direction(bandit, 3)
  np.testing.assert_allclose(found, numeric, atol=1e-9)


@pytest.mark.parametrize("right", [RIGHT, BOTH], ids=["one", "two"])
@pytest.mark.parametrize("samples", [1, 2, 3])
def test_sgt_direction_from_all_tuples(right, samples):
  """Draw both groups, ask the gate, pick a success, follow its score."""
  bandit = tabular(LEARNER, PEER, right)
  s = exact.scores(bandit)[0]
  total, gate = np.zeros(3), 0.0
  draws = list(itertools.product(range(3), repeat=samples))
  for own, theirs in itertools.product(draws, draws):
    chance = LEARNER[list(own)].prod() * PEER[list(theirs)].prod()
    successes = [y for y in theirs if right[y]]
    if not any(right[y] for y in own) and successes:
      gate += chance
      for y in successes:
        total += chance / len(successes) * s[y]
  found = exact.rescue_probability(LEARNER @ right, PEER @ right, samples)
  assert gate == pytest.approx(found)
  np.testing.assert_allclose(exact.sgt_direction(bandit, samples), total)
  np.testing.assert_allclose(exact.sgt_enumerated(bandit, samples), total)


def test_sgt_fades_as_the_learner_gets_better():
  p = np.linspace(0.0, 1.0, 50)
  chances = exact.rescue_probability(p, np.full(50, 0.5), 8)
  assert (np.diff(chances) < 0).all()
  assert chances[0] == pytest.approx(1 - 0.5**8)
  assert chances[-1] == 0


@pytest.mark.parametrize("rare", [1e-3, 1e-6, 1e-9])
def test_only_sgt_reaches_what_the_learner_never_samples(rare):
  """As pi_n(rare) -> 0 SGT's push has a limit, the others' vanish with it."""
  pi = np.asarray([rare, 0.05, 0.95 - rare])
  pushes = {
    "grpo": exact.grpo(pi, BOTH, 4),
    "prp": exact.prp(pi, PEER, BOTH, 4, clip=False),
    "prp_clipped": exact.prp(pi, PEER, BOTH, 4),
    "xgrpo": exact.xgrpo(pi, PEER, BOTH, 4),
  }
  for name, update in pushes.items():
    assert 0 < update.mean[0] < 3 * rare, name
  found = exact.sgt(pi, PEER, BOTH, 4, coefficient=0.1)
  chance = exact.rescue_probability(pi @ BOTH, PEER @ BOTH, 4)
  limit = 0.1 * chance * PEER[0] / (PEER @ BOTH)
  assert found.mean[0] == pytest.approx(limit, abs=5 * rare)
  # No ratio: whatever the learner thinks of them, no score is longer.
  direction = exact.sgt_direction(tabular(pi, PEER, BOTH), 4)
  assert np.linalg.norm(direction) <= math.sqrt(2) * chance


# The estimators as they are run, against the project's own kernels.


def rows(samples):
  """All pairs of sample tuples: answers [N, 2G], chance [N]."""
  draws = list(itertools.product(range(3), repeat=2 * samples))
  answers = np.asarray(draws)
  own = LEARNER[answers[:, :samples]].prod(-1)
  return answers, own * PEER[answers[:, samples:]].prod(-1)


def moments_of(coefficients, answers, chance):
  """Mean and trace of the covariance of sum_i c_i s(y_i)."""
  s = np.eye(3) - LEARNER
  g = np.einsum("ni,nik->nk", coefficients, s[answers])
  mean = chance @ g
  return mean, chance @ (g**2).sum(-1) - mean @ mean


@pytest.mark.parametrize("right", [RIGHT, BOTH], ids=["one", "two"])
@pytest.mark.parametrize("probe", ["grpo", "prp", "xgrpo", "sgt"])
def test_updates_are_those_of_the_kernels(probe, right):
  samples = 3
  answers, chance = rows(samples)
  rewards = right[answers].astype(np.float32)
  number, width = rewards.shape

  def standardized(values, *peers):
    kernel = moments.standardize_mixed if peers else moments.standardize
    group = jnp.repeat(jnp.arange(number), values.shape[1])
    flat = jnp.asarray(values.ravel())
    valid = jnp.ones(flat.shape, bool)
    found = kernel(flat, group, valid, *peers)
    return np.asarray(found, np.float64).reshape(values.shape)

  own, theirs = rewards[:, :samples], rewards[:, samples:]
  if probe == "prp":
    worth = standardized(rewards)
    gap = np.log(LEARNER / PEER)[answers]
    gap[:, :samples] = 0.0
    low, high, dual = exact.WINDOW
    slopes = -jax.grad(
      lambda x: surrogate.clipped(
        x,
        jnp.asarray(worth, jnp.float32),
        jnp.full(number, low),
        jnp.full(number, high),
        dual,
      ).sum()
    )(jnp.asarray(gap, jnp.float32))
    coefficients = np.asarray(slopes, np.float64) / width
    expected = exact.prp(LEARNER, PEER, right, samples)
  elif probe == "xgrpo":
    peers = Peers(
      *(
        jnp.repeat(jnp.asarray(x, jnp.float32), samples)
        for x in (np.full(number, samples), theirs.mean(1), theirs.var(1))
      )
    )
    coefficients = standardized(own, peers) / samples
    expected = exact.xgrpo(LEARNER, PEER, right, samples)
  else:
    coefficients = standardized(own) / samples
    expected = exact.grpo(LEARNER, right, samples)
  used = answers[:, : coefficients.shape[1]]
  if probe == "sgt":  # one peer row for each pick: split the chance over them
    successes = theirs.sum(1)
    rescue = (own.sum(1) == 0) & (successes > 0)
    keep = ~rescue
    picks = [(n, i) for n in np.flatnonzero(rescue) for i in range(samples)]
    picks = [(n, i) for n, i in picks if theirs[n, i]]
    pulled = np.asarray([answers[n, samples + i] for n, i in picks])
    shares = np.asarray([chance[n] / successes[n] for n, _ in picks])
    extra = np.zeros((len(picks), coefficients.shape[1]))
    extra[:, 0] = 0.1
    filler = np.repeat(pulled[:, None], coefficients.shape[1], 1)
    coefficients = np.concatenate([coefficients[keep], extra])
    used = np.concatenate([used[keep], filler])
    chance = np.concatenate([chance[keep], shares])
    expected = exact.sgt(LEARNER, PEER, right, samples, coefficient=0.1)
  assert chance.sum() == pytest.approx(1)
  mean, variance = moments_of(coefficients, used, chance)
  np.testing.assert_allclose(expected.mean, mean, atol=1e-5)
  assert expected.variance == pytest.approx(variance, rel=1e-5)


def test_groups_are_all_draws():
  counts, chance = exact.groups(LEARNER, 4)
  tally = dict.fromkeys(map(tuple, counts.tolist()), 0.0)
  for draw in itertools.product(range(3), repeat=4):
    key = tuple(np.bincount(draw, minlength=3).tolist())
    tally[key] += LEARNER[list(draw)].prod()
  np.testing.assert_allclose(chance, list(tally.values()))


def test_a_twins_completions_are_more_samples():
  twin = exact.prp(LEARNER, LEARNER, RIGHT, 3)
  more = exact.grpo(LEARNER, RIGHT, 6)
  np.testing.assert_allclose(twin.mean, more.mean)
  assert twin.variance == pytest.approx(more.variance)


def test_sgt_without_weight_is_grpo():
  plain = exact.grpo(LEARNER, RIGHT, 3)
  found = exact.sgt(LEARNER, PEER, RIGHT, 3, coefficient=0.0)
  np.testing.assert_allclose(found.mean, plain.mean)
  assert found.variance == pytest.approx(plain.variance)


# The study.


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  out = tmp_path_factory.mktemp("bandit")
  study.main([f"--out={out}"])
  return out


def same(a, b, where=""):
  if isinstance(a, dict):
    assert a.keys() == b.keys(), where
    for key in a:
      same(a[key], b[key], f"{where}/{key}")
  elif isinstance(a, list):
    assert len(a) == len(b), where
    for i, pair in enumerate(zip(a, b, strict=True)):
      same(*pair, f"{where}/{i}")
  else:
    assert a == pytest.approx(b, rel=1e-6, abs=1e-12), where


def test_the_packaged_numbers_are_what_comes_out(written):
  packaged = ROOT / "studies" / "results" / "bandit.json"
  fresh = json.loads((written / "bandit.json").read_text())
  same(fresh, json.loads(packaged.read_text()))


def test_the_packaged_figure_is_one_of_this_kind(written):
  for path in (written / "bandit.png", ROOT / "assets" / "bandit.png"):
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 20_000
    # Width and height, as in the file's header.
    assert [int.from_bytes(data[i : i + 4], "big") for i in (16, 20)] == [
      1575,
      690,
    ]


def test_what_the_numbers_say(written):
  """The sentences about the figure, as inequalities."""
  found = json.loads((written / "bandit.json").read_text())
  for key, values in found["statements"].items():
    if key.endswith("_error"):
      assert values["largest"] < 1e-12, key
  assert found["statements"]["prp_bias_over_bound"]["largest"] <= 1
  hard, _, easy = found["panels"]
  for panel in found["panels"]:
    far, plain = panel["peers"][-1], panel["grpo"]
    assert far["chi2"] > 30
    assert far["prp"]["variance"] > 5 * plain["variance"]
    assert far["prp"]["growth"] <= plain["growth"]
    assert abs(far["xgrpo"]["growth"] - plain["growth"]) < 0.02
    assert far["sgt"]["variance"] < 1.05 * plain["variance"]
  assert hard["peers"][-1]["sgt"]["growth"] > 4 * hard["grpo"]["growth"]
  gain = easy["peers"][-1]["sgt"]["growth"] - easy["grpo"]["growth"]
  assert 0 < gain < 1e-3
