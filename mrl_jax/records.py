"""What the host passes around: completions and rounds, in plain Python.

Records hold strings, numbers and NumPy arrays, never device arrays, so the
host side of the system (text, tasks, exchange) needs no JAX. They are
immutable: a transform of a round returns a new one.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Rollout(NamedTuple):
  """One completion that this policy sampled, kept as its sampled ids."""

  prompt_id: str
  sample: int  # its number among the prompt's G
  prompt: str  # the task's text, before any template
  context: tuple[int, ...]  # the rendered prompt's ids
  tokens: np.ndarray  # [T] i32, EOS included
  logprobs: np.ndarray  # [T] f32, of the exact sampling distribution
  entropies: np.ndarray  # [T] f32, nats
  finished: bool  # stopped by an EOS id, not by the limit
  text: str  # the decoded completion, specials dropped
  answer: str  # what the task expects
  reward: float  # NaN: could not be scored
  outcome: str  # the verifier's verdict, by name


class Round(NamedTuple):
  """What one policy has to learn from in one round."""

  policy: str
  number: int
  own: tuple[Rollout, ...]  # rows of one prompt stand together


RoundTransform = Callable[[Round], Round]  # host: which experience
