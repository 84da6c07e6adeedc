"""What the host passes around: completions, exchanged records and rounds.

Everything here holds strings, numbers and NumPy arrays, never device arrays,
so the host side of the system (text, tasks, exchange) needs no JAX. It is
immutable: a transform of a round returns a new one.

Three kinds of record cross between policies. They are canonical in text, so
a receiver with another tokenizer can use them: what a peer wrote and how
likely each of its tokens was (`Trajectory`), what its completions earned
(`Values`), and what was verified to be right (`Success`). Parameters,
objectives and token ids as such never cross.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

SCHEMA = 1  # of the records; one of another version is refused
KINDS = ("trajectory", "values", "success")


class Rollout(NamedTuple):
  """One completion that this policy sampled, kept as its sampled ids.

  Where it continues a prefix of an earlier answer, `text` is the whole
  answer; what was sampled now, and is learned from, is `tokens`.
  """

  prompt_id: str
  sample: int  # its number among the prompt's G
  prompt: str  # the task's text, before any template
  context: tuple[int, ...]  # the rendered prompt's ids
  tokens: np.ndarray  # [T] i32, EOS included
  logprobs: np.ndarray  # [T] f32, of the exact sampling distribution
  entropies: np.ndarray  # [T] f32, nats
  finished: bool  # stopped by an EOS id, not by the limit
  text: str  # the decoded answer, specials dropped
  answer: str  # what the task expects
  reward: float  # NaN: could not be scored
  outcome: str  # the verifier's verdict, by name
  version: int = 0  # optimiser steps the policy had taken when it sampled
  root: str = ""  # of a continued prefix: the prompt that it belongs to
  prefix: int = 0  # ids at the context's end that begin the answer
  novelty: float | None = None  # distance to the nearest; None: not measured
  # [T] f32, what was earned when each token was written; None: nothing is
  # known of it but the reward. With a prefix it adds up to what came after.
  earned: np.ndarray | None = None


class Header(NamedTuple):
  """Who says what about which prompt."""

  id: str  # unique: the same content is published under it, always
  kind: str  # one of KINDS
  schema: int
  round: int
  policy: str
  version: int  # optimiser steps the policy had taken when it sampled
  prompt_id: str
  prompt_hash: str  # of the task's text
  tokenizer: str  # the identity of the policy's tokenizer
  verifier: str  # the identity of whoever judged


class Trajectory(NamedTuple):
  """A completion with the log-probs of the tokens that were sampled.

  `ends` counts bytes of the UTF-8 text. A finished completion has one token
  more than its text: the last, EOS, whose end is the text's.
  """

  header: Header
  text: str
  tokens: np.ndarray  # [U] i32, the producer's own ids
  ends: np.ndarray  # [U] i32, byte of the text at which each token ends
  logprobs: np.ndarray  # [U] f32, of the exact sampling distribution
  reward: float  # NaN: could not be scored
  success: bool  # verified to be right
  finished: bool
  advantage: float | None = None  # the producer's own, if it says


class Values(NamedTuple):
  """What a policy's completions of one prompt earned: sums, no text."""

  header: Header
  count: int  # completions that could be scored
  total: float
  square: float


class Success(NamedTuple):
  """The text of a completion that was verified to be right; no log-probs."""

  header: Header
  text: str


Record = Trajectory | Values | Success


class Refusal(NamedTuple):
  """Something of a peer's that is not used, and why."""

  peer: str
  reason: str
  record: str = ""  # its id; "" where a whole shipment is meant


class Alignment(NamedTuple):
  """How receiver tokens lie on source tokens; see `types.Trace`, one row."""

  first: np.ndarray  # [T] i32
  first_part: np.ndarray  # [T] f32
  last: np.ndarray  # [T] i32
  last_part: np.ndarray  # [T] f32
  chunk_start: np.ndarray  # [T] i32
  chunk_stop: np.ndarray  # [T] i32
  byte_share: np.ndarray  # [T] f32


class Foreign(NamedTuple):
  """A peer's completion in this policy's own tokens."""

  prompt_id: str
  peer: str
  record: str  # the id of the record it was read from
  tokens: np.ndarray  # [T] i32, EOS included where the rollout finished
  text: str
  rescue: bool  # a verified success to imitate; else a rollout to weigh
  reward: float
  logprobs: np.ndarray | None = None  # [U] f32, of the source tokens
  alignment: Alignment | None = None


class Tally(NamedTuple):
  """What the peers earned on one prompt: float64 sums, which add."""

  count: float
  total: float
  square: float


class Round(NamedTuple):
  """What one policy has to learn from in one round."""

  policy: str
  number: int
  own: Sequence[Rollout]  # rows of one prompt stand together
  inbox: tuple[Record, ...] = ()  # of the peers, on this round's prompts
  extra: tuple[Foreign, ...] = ()
  slots: int = 0  # rows beside the own ones for each prompt; 0 if no extra
  peers: Mapping[str, Tally] = {}  # by prompt id
  refused: tuple[Refusal, ...] = ()


RoundTransform = Callable[[Round], Round]  # host: which experience
