"""Estimators of what a policy can do, from n samples on each problem.

All are unbiased for the quantity they name: pass@k is the chance that one of
k samples is right, avg@k the mean over k, maj@k the chance that the most
common answer among k is right. Uncertainty is a bootstrap over problems,
since problems, and not samples, are what a score must generalise across.
Host side, NumPy float64.
"""

import collections
import math
from collections.abc import Hashable, Sequence

import numpy as np


def pass_at_k(n: int, c: int, k: int) -> float:
  """The chance that k of n samples, c of them correct, hold a correct one.

  1 - C(n-c, k) / C(n, k) = 1 - prod_{i=n-c+1}^{n} (1 - k/i)

  Chen et al. 2021, https://arxiv.org/abs/2107.03374, equation 1.

  Raises:
    ValueError: for k > n, which n samples say nothing about.
  """
  _check(n, k)
  if not 0 <= c <= n:
    raise ValueError(f"c must be in [0, n={n}], got {c}")
  if n - c < k:
    return 1.0
  return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def avg_at_k(rewards: Sequence[float | int] | np.ndarray, k: int) -> float:
  """The expected mean reward of k of a problem's n samples.

  Over all subsets of k that is the mean of all n, whatever k is; k is asked
  for so that a report cannot claim more samples than were drawn.
  """
  _check(len(rewards), k)
  return float(np.mean(np.asarray(rewards, np.float64)))


def maj_at_k(
  answers: Sequence[Hashable],
  correct: Sequence[bool],
  k: int,
  *,
  draws: int = 4096,
  seed: int = 0,
) -> float:
  """The chance that the most common of k answers, drawn from n, is correct.

  Ties are split evenly among the answers that lead; an answer of None (none
  could be read) has no vote. Exact over all subsets where there are at most
  `draws` ways to count votes, else the mean of `draws` random subsets under
  `seed`.

  Wang et al. 2023, https://arxiv.org/abs/2203.11171.

  Args:
    answers: normalised, so that equal answers are equal objects.
    correct: whether each is right; the same for equal answers.
  """
  n = len(answers)
  _check(n, k)
  if len(correct) != n:
    raise ValueError(f"{n} answers but {len(correct)} correctness flags")
  votes = collections.Counter(answers)
  right = dict(zip(answers, correct, strict=True))
  for answer, flag in zip(answers, correct, strict=True):
    if answer is not None and right[answer] != flag:
      raise ValueError(f"answer {answer!r} is both correct and wrong")
  names = list(votes)
  sizes = [votes[name] for name in names]
  if math.prod(min(size, k) + 1 for size in sizes) <= draws:
    ways = sum(
      ways * _share(names, right, taken) for taken, ways in _ways(sizes, k)
    )
    return ways / math.comb(n, k)
  generator = np.random.default_rng(seed)
  taken = generator.multivariate_hypergeometric(sizes, k, size=draws)
  return float(np.mean([_share(names, right, row) for row in taken.tolist()]))


def bootstrap(
  values: Sequence[float | int] | np.ndarray,
  *,
  confidence: float = 0.95,
  draws: int = 10_000,
  seed: int = 0,
) -> tuple[float, float]:
  """The percentile interval of the mean over N problems.

  Efron 1979, https://doi.org/10.1214/aos/1176344552.
  """
  if not 0 < confidence < 1:
    raise ValueError(f"confidence must be in (0, 1), got {confidence}")
  values = np.asarray(values, np.float64)
  if values.size == 0:
    raise ValueError("bootstrap needs at least one value")
  if not np.isfinite(values).all():
    raise ValueError("bootstrap needs finite values: drop unscored problems")
  generator = np.random.default_rng(seed)
  # A resample is how often each problem is drawn: no [draws, N] index array.
  picks = (
    generator.integers(0, values.size, values.size) for _ in range(draws)
  )
  means = np.array([values[pick].mean() for pick in picks])
  tail = (1 - confidence) / 2
  low, high = np.quantile(means, [tail, 1 - tail])
  return float(low), float(high)


def _check(n: int, k: int) -> None:
  if not 1 <= k <= n:
    raise ValueError(f"k must be in [1, n={n}] for n samples, got {k}")


def _share(names: list, right: dict, taken: Sequence[int]) -> float:
  """The share of correct answers among those with the most votes."""
  best = max(
    (t for name, t in zip(names, taken, strict=True) if name is not None),
    default=0,
  )
  if best == 0:
    return 0.0
  leaders = [
    bool(right[name])
    for name, t in zip(names, taken, strict=True)
    if name is not None and t == best
  ]
  return sum(leaders) / len(leaders)


def _ways(sizes: Sequence[int], k: int):
  """Yields each split of k draws over `sizes` and in how many ways it falls."""
  if not sizes:
    if k == 0:
      yield (), 1
    return
  rest = sum(sizes[1:])
  for taken in range(max(0, k - rest), min(sizes[0], k) + 1):
    ways = math.comb(sizes[0], taken)
    for others, more in _ways(sizes[1:], k - taken):
      yield (taken, *others), ways * more


TIED = 1e-6  # a spread of rewards up to this carries no advantage


def spreads(rewards: np.ndarray) -> np.ndarray:
  """Greatest minus least reward of each group; -inf where none was scored.

  Args:
    rewards: [N, G]; NaN could not be scored.
  """
  scored = np.isfinite(rewards)
  most = np.where(scored, rewards, -np.inf).max(1)
  return most - np.where(scored, rewards, np.inf).min(1)
