"""How a potential is used, and the average deviation that it is divided by.

Advantages are in units of their group's deviation. A potential that is to
leave the expected gradient alone must be divided by a constant in its place:
S, an average over *past* groups, which says nothing about this round.
"""

from typing import NamedTuple

import numpy as np

from mrl_jax import measure


class Rule(NamedTuple):
  """Which mode, how strongly."""

  mode: str = "token"  # or "sequence", "bounded"
  alpha: float | int = 0.3
  bound: float | int = 1.0  # on the potential's absolute value
  gap: float | int = 1.0  # from the best reward to others
  decay: float | int = 0.9  # of the average of deviations
  start: float | int = 0.5  # the average before any group
  normalize: bool = True  # whether advantages are divided by deviations


def first(rule: Rule) -> float:
  """S of the first round; 1 where advantages are not divided."""
  return float(rule.start) if rule.normalize else 1.0


def after(rule: Rule, scale: float, rewards: np.ndarray) -> float:
  """S of the next round, from this round's rewards [N, G].

  S <- decay S + (1 - decay) mean_g std_g (ddof 1), over groups whose rewards
  are not all alike; a round without any leaves S as it is.
  """
  if not rule.normalize:
    return scale
  live = rewards[measure.spreads(rewards) > measure.TIED]
  if not len(live):
    return scale
  found = np.nanstd(live.astype(np.float64), axis=1, ddof=1)
  return float(rule.decay * scale + (1 - rule.decay) * found.mean())
