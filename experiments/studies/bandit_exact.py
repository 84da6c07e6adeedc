"""Exact sums on small softmax bandits: what each probe does to an update.

A contextual bandit is a language model cut down to one token: a prompt is a
context, a completion one of K answers, and some answers are right. Then every
expectation is a finite sum, and what a peer's completions (PRP), its values
(XGRPO) or its successes (SGT) do to the learner's gradient can be computed
instead of estimated. The first half holds the identities and bounds, for any
features; the second the estimators as they are run, over all possible groups
of samples. All in float64 NumPy; pi_n is the learner, pi_m the peer.

Mutual RL 2026, https://arxiv.org/abs/2605.07244.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np

WINDOW = (0.2, 0.28, 3.0)  # the clipped surrogate's low, high, dual clip
EPS = 1e-6  # in the advantages' denominator


class Bandit(NamedTuple):
  """X contexts that share F parameters; contexts are equally likely."""

  theta: np.ndarray  # [F] the learner's parameters
  features: np.ndarray  # [X, K, F]: logits are features @ theta
  right: np.ndarray  # [X, K] bool
  peer: np.ndarray  # [X, K] probabilities of the peer's answers


def random_bandit(seed: int, contexts=3, answers=4, parameters=6) -> Bandit:
  """Gaussian logits; in each context at least one answer is right, not all."""
  rng = np.random.default_rng(seed)
  shape = (contexts, answers)
  right = rng.random(shape) < 0.4
  right[:, 0], right[:, 1] = True, False
  return Bandit(
    theta=rng.normal(size=parameters),
    features=rng.normal(size=(*shape, parameters)) / np.sqrt(2),
    right=rng.permuted(right, axis=1),
    peer=softmax(1.5 * rng.normal(size=shape)),
  )


def softmax(logits: np.ndarray) -> np.ndarray:
  """exp(l_y) / sum_y' exp(l_y'), along the last axis."""
  masses = np.exp(logits - logits.max(-1, keepdims=True))
  return masses / masses.sum(-1, keepdims=True)


def learner(bandit: Bandit) -> np.ndarray:
  """pi_n(y | x), [X, K]."""
  return softmax(bandit.features @ bandit.theta)


def scores(bandit: Bandit) -> np.ndarray:
  """s(x, y) = grad log pi_n(y | x) = f(x, y) - E_pi f(x, .), [X, K, F]."""
  means = np.einsum("xk,xkf->xf", learner(bandit), bandit.features)
  return bandit.features - means[:, None]


def solved(probabilities: np.ndarray, right: np.ndarray) -> np.ndarray:
  """p = sum over right answers of pi(y), per context."""
  return (probabilities * right).sum(-1)


def gradient(bandit: Bandit) -> np.ndarray:
  """grad of mean_x p_n(x) = mean_x sum_y pi_n R s, [F]."""
  weights = learner(bandit) * bandit.right
  return np.einsum("xk,xkf->f", weights, scores(bandit)) / len(weights)


def chi2(p: np.ndarray, q: np.ndarray) -> np.ndarray:
  """chi2(p || q) = sum_y (p - q)^2 / q, per context."""
  return ((p - q) ** 2 / q).sum(-1)


def prp_second_moment(bandit: Bandit) -> np.ndarray:
  """E_{y ~ pi_m}[w^2] with w = pi_n / pi_m: it is 1 + chi2(pi_n || pi_m)."""
  ratios = learner(bandit) / bandit.peer
  return (bandit.peer * ratios**2).sum(-1)


def prp_gradient(bandit: Bandit, errors: np.ndarray) -> np.ndarray:
  """E_{y ~ pi_m}[w exp(e) R s], e(x, y) an error of the log-weight; [F]."""
  weights = learner(bandit) / bandit.peer * np.exp(errors)
  terms = bandit.peer * weights * bandit.right
  return np.einsum("xk,xkf->f", terms, scores(bandit)) / len(terms)


def prp_worst_bias(bandit: Bandit, error: float) -> float:
  """The largest |bias| of PRP's gradient, over all log-weight errors <= E.

  The norm is convex in exp(e), so the worst errors are all +E or -E: every
  choice of signs on the right answers is tried.
  """
  places = np.argwhere(bandit.right)
  worst = 0.0
  for signs in itertools.product((-error, error), repeat=len(places)):
    errors = np.zeros(bandit.right.shape)
    errors[tuple(places.T)] = signs
    bias = prp_gradient(bandit, errors) - gradient(bandit)
    worst = max(worst, float(np.linalg.norm(bias)))
  return worst


def prp_bias_bound(bandit: Bandit, error: float) -> float:
  """(exp(E) - 1) mean_x B(x) p_n(x), with B(x) = max_y |s(x, y)|."""
  largest = np.linalg.norm(scores(bandit), axis=-1).max(-1)
  return math.expm1(error) * float(
    (largest * solved(learner(bandit), bandit.right)).mean()
  )


def baseline_mean(bandit: Bandit, baseline: np.ndarray) -> np.ndarray:
  """E_{y ~ pi_n}[(R - b(x)) s]: what XGRPO's update is on average; [F]."""
  terms = learner(bandit) * (bandit.right - baseline[:, None])
  return np.einsum("xk,xkf->f", terms, scores(bandit)) / len(terms)


def baseline_variance(bandit: Bandit, baseline: np.ndarray) -> np.ndarray:
  """Trace of Cov[(R - b) s] of one own sample, per context."""
  pi, s = learner(bandit), scores(bandit)
  g = (bandit.right - baseline[:, None])[..., None] * s
  mean = np.einsum("xk,xkf->xf", pi, g)
  return (pi * (g**2).sum(-1)).sum(-1) - (mean**2).sum(-1)


def excess_variance(bandit: Bandit, baseline: np.ndarray) -> np.ndarray:
  """What a baseline b costs over b = p_n, per context.

  (b - p_n)^2 E|s|^2 - 2 (b - p_n) Cov(R, |s|^2)

  The first term alone is the excess where R and |s|^2 are uncorrelated, and
  in general over the best baseline, E[R |s|^2] / E|s|^2, in place of p_n.
  """
  pi, squares = learner(bandit), (scores(bandit) ** 2).sum(-1)
  p, mean_square = solved(pi, bandit.right), (pi * squares).sum(-1)
  covariance = (pi * bandit.right * squares).sum(-1) - p * mean_square
  off = baseline - p
  return off**2 * mean_square - 2 * off * covariance


def rescue_probability(
  own: np.ndarray, peer: np.ndarray, samples: int
) -> np.ndarray:
  """(1 - p_n)^G (1 - (1 - p_m)^G): the learner fails and the peer does not."""
  return (1 - own) ** samples * (1 - (1 - peer) ** samples)


def success_divergence(bandit: Bandit) -> np.ndarray:
  """KL(pi_m(. | success) || pi_n), per context."""
  target = bandit.peer * bandit.right
  target = target / target.sum(-1, keepdims=True)
  safe = np.where(bandit.right, target, 1.0)
  return (target * (np.log(safe) - np.log(learner(bandit)))).sum(-1)


def sgt_direction(bandit: Bandit, samples: int) -> np.ndarray:
  """-mean_x P_rescue(x) grad KL(pi_m(. | success) || pi_n), [F].

  = mean_x P_rescue(x) sum_y pi_m(y | success) s(x, y): no ratio anywhere.
  """
  own = solved(learner(bandit), bandit.right)
  peer = solved(bandit.peer, bandit.right)
  target = bandit.peer * bandit.right / peer[:, None]
  weights = rescue_probability(own, peer, samples)[:, None] * target
  return np.einsum("xk,xkf->f", weights, scores(bandit)) / len(weights)


def sgt_enumerated(bandit: Bandit, samples: int) -> np.ndarray:
  """The same by drawing: all groups of both, a uniform pick of a success."""
  total = np.zeros_like(bandit.theta)
  for pi, peer, right, s in zip(
    learner(bandit), bandit.peer, bandit.right, scores(bandit), strict=True
  ):
    own, theirs, chance = _pairs(pi, peer, samples)
    successes = theirs @ right
    rescue = (own @ right == 0) & (successes > 0)
    pick = theirs * right / np.maximum(successes, 1)[..., None]
    total += np.einsum("ab,abk,kf->f", chance * rescue, pick + 0 * own, s)
  return total / len(bandit.right)


class Update(NamedTuple):
  """An estimator of the learner's update on one prompt; tabular logits."""

  mean: np.ndarray  # [K]
  variance: float  # trace of the covariance


def groups(
  probabilities: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray]:
  """Every way to draw `size` answers: counts [M, K], probability [M]."""
  answers = len(probabilities)
  counts = []
  for bars in itertools.combinations(range(size + answers - 1), answers - 1):
    ends = np.asarray((-1, *bars, size + answers - 1))
    counts.append(np.diff(ends) - 1)
  table = np.asarray(counts)
  ways = [
    math.factorial(size) / math.prod(map(math.factorial, row))
    for row in table.tolist()
  ]
  return table, np.asarray(ways) * (probabilities**table).prod(-1)


def advantages(
  successes: np.ndarray, size: int, right: np.ndarray
) -> np.ndarray:
  """A = (R - mean) / (std + eps) of each answer, in groups of 0/1 rewards."""
  mean = (successes / size)[..., None]
  deviation = np.sqrt(mean * (1 - mean) * size / (size - 1))
  return (right - mean) / (deviation + EPS) * (deviation > 0)


def slopes(
  ratios: np.ndarray, worth: np.ndarray, clip: bool = True
) -> np.ndarray:
  """Minus the clipped surrogate's derivative by the log-ratio: r A or 0."""
  low, high, dual = WINDOW
  out = (worth > 0) & (ratios > 1 + high)
  out |= (worth < 0) & ((ratios < 1 - low) | (ratios > dual))
  return np.where(out & clip, 0.0, ratios * worth)


def grpo(pi: np.ndarray, right: np.ndarray, samples: int) -> Update:
  """The group's own samples and statistics."""
  own, chance = groups(pi, samples)
  worth = advantages(own @ right, samples, right)
  return _update(own * worth / samples, chance, pi)


def xgrpo(
  pi: np.ndarray, peer: np.ndarray, right: np.ndarray, samples: int
) -> Update:
  """Own samples against the statistics of the union with the peer's."""
  own, theirs, chance = _pairs(pi, peer, samples)
  worth = advantages((own + theirs) @ right, 2 * samples, right)
  return _update(own * worth / samples, chance, pi)


def prp(
  pi: np.ndarray,
  peer: np.ndarray,
  right: np.ndarray,
  samples: int,
  clip: bool = True,
) -> Update:
  """Own and peer samples, the peer's weighted by pi_n / pi_m."""
  own, theirs, chance = _pairs(pi, peer, samples)
  worth = advantages((own + theirs) @ right, 2 * samples, right)
  terms = own * worth + theirs * slopes(pi / peer, worth, clip)
  return _update(terms / (2 * samples), chance, pi)


def sgt(
  pi: np.ndarray,
  peer: np.ndarray,
  right: np.ndarray,
  samples: int,
  coefficient: float = 0.1,
) -> Update:
  """GRPO, and imitation of a peer's success where all own samples fail.

  Such a group has no advantage, so the two terms never meet: their second
  moments add.
  """
  plain = grpo(pi, right, samples)
  p, q = solved(pi, right), solved(peer, right)
  chances = rescue_probability(p, q, samples) * peer * right / q
  pulls = coefficient * (np.eye(len(pi)) - pi)
  mean = plain.mean + chances @ pulls
  second = plain.variance + (plain.mean**2).sum()
  second += chances @ (pulls**2).sum(-1)
  return Update(mean, float(second - (mean**2).sum()))


def _pairs(pi, peer, samples):
  """All pairs of groups: counts [M, 1, K] and [1, M, K], chances [M, M]."""
  own, chance = groups(pi, samples)
  theirs, chance_peer = groups(peer, samples)
  return own[:, None], theirs[None], chance[:, None] * chance_peer


def _update(coefficients, chance, pi):
  """Mean and variance of sum_y c_y s(y), s(y) = e_y - pi."""
  total = coefficients.sum(-1, keepdims=True)
  g = (coefficients - total * pi).reshape(-1, len(pi))
  mean = chance.ravel() @ g
  second = chance.ravel() @ (g**2).sum(-1)
  return Update(mean, float(second - (mean**2).sum()))
