"""Where to cut a failed answer, so that the policy continues from there.

A prompt that the policy hardly ever solves gives it next to nothing to learn
from. ExTra takes the rollout that the policy was surest of, cuts it where
the part before was written with the least uncertainty, and lets the policy
continue from there in a later round. The uncertainty of a prefix is smoothed
over prefixes that mean the same, this round's and earlier ones'.

ExTra 2026, https://arxiv.org/abs/2606.24994.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CHOICES = ("lowest", "highest", "random", "restart")
BOUNDARIES = ("lines", "tokens")


class Rule(NamedTuple):
  """Which prompts are tried again, and from where."""

  choice: str = "lowest"  # smoothed entropy; or a control, one of CHOICES
  slots: int = 16  # groups of a round that continue a prefix, at most
  warmup: int = 30  # rounds before the first of them
  boundary: str = "lines"  # after what an answer may be cut: BOUNDARIES
  gap: int = 32  # least tokens between two cuts, and before the first
  cuts: int = 15  # most candidates of an answer
  cap: float = 0.75  # most of an answer that is kept; our choice
  temperature: float = 0.1  # of the smoothing
  queue: int = 512  # items that wait
  depth: int = 3  # times that an answer is cut again while it stays hard
  size: int = 128  # prefixes that a prompt remembers
  prompts: int = 1024  # with such a memory

  @property
  def embeds(self) -> bool:
    """Whether the choice looks at what prefixes mean."""
    return self.choice in ("lowest", "highest")


def hard(correct: np.ndarray, scored: np.ndarray) -> np.ndarray:
  """Whether each group's pass rate is at most 1 / G. [N] bool.

  Args:
    correct: [N, G] bool.
    scored: [N, G] bool; a row that could not be scored counts for nothing,
      and a group without any other is not known to be hard.
  """
  count = scored.sum(1)
  passed = (correct & scored).sum(1)
  return (count > 0) & (passed * correct.shape[1] <= count)


def boundaries(
  pieces: Sequence[str],
  finished: bool,
  rule: Rule,
  start: int = 0,
) -> list[int]:
  """After how many tokens an answer may be cut, in order.

  By "lines" that is after a token that ends one; by "tokens", for tasks
  whose answers have no lines, after any token. Two cuts are `gap` tokens
  apart, there are `cuts` at most, of which the last is dropped, and none
  keeps more than `cap` of the answer.

  Args:
    pieces: the decoded text of each token.
    finished: whether the last token is EOS, which no prefix holds.
    rule: says which.
    start: tokens that stand already: cuts lie behind them.
  """
  stop = len(pieces) - bool(finished)
  found, last = [], start
  for place in range(start + 1, stop + 1):
    ends = rule.boundary == "tokens" or "\n" in pieces[place - 1]
    if ends and place - last >= rule.gap and len(found) < rule.cuts:
      found.append(place)
      last = place
  return [place for place in found[:-1] if place <= rule.cap * len(pieces)]


def prefix_entropies(
  entropies: np.ndarray, places: Sequence[int]
) -> np.ndarray:
  """h_j = mean entropy of the tokens before cut j, in nats. [J] float64."""
  sums = np.cumsum(np.asarray(entropies, np.float64))
  return np.asarray([sums[place - 1] / place for place in places])


def smooth(
  embeddings: np.ndarray, values: np.ndarray, temperature: float
) -> np.ndarray:
  """Means of values over what is near in meaning. [M] float64.

  W h with W = softmax(E E^T / temperature), a row for each prefix.

  ExTra 2026, https://arxiv.org/abs/2606.24994.

  Args:
    embeddings: [M, E], of unit norm.
    values: [M].
    temperature: 0 would be no smoothing.
  """
  rows = np.asarray(embeddings, np.float64)
  logits = rows @ rows.T / temperature
  weights = np.exp(logits - logits.max(1, keepdims=True))
  weights /= weights.sum(1, keepdims=True)
  return weights @ np.asarray(values, np.float64)


def choose(
  embeddings: np.ndarray,
  entropies: np.ndarray,
  earlier: np.ndarray,
  rule: Rule,
) -> int:
  """Which of an answer's J cuts has the least smoothed entropy, or most.

  The first of equals. Candidates are this answer's cuts alone; what the
  prompt remembers takes part in the smoothing.

  Args:
    embeddings: [J, E] of the candidate prefixes, of unit norm.
    entropies: [J], their h.
    earlier: [M, E + 1] rows of the memory: embeddings with h behind them.
    rule: the temperature, and whether it is the least or the greatest.
  """
  count = len(entropies)
  known = np.asarray(earlier, np.float64).reshape(-1, embeddings.shape[1] + 1)
  rows = np.concatenate([known[:, :-1], embeddings])
  values = np.concatenate([known[:, -1], entropies])
  smoothed = smooth(rows, values, rule.temperature)[-count:]
  best = np.argmax if rule.choice == "highest" else np.argmin
  return int(best(smoothed))
