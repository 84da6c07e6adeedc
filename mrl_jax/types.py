"""The dimension letters and the data that every layer shares.

Dimension letters, in every signature of the project:

  B rows        T completion tokens   P prompt tokens      S = P + T
  G samples per prompt                N prompts (B = N G)  V vocabulary
  U tokens of a row's source, where a peer wrote it with another tokenizer
  D model width                       L layers             H/K query/key-value
  F feed-forward width                C cache slots             heads

A row is one completion. Its prompt stands left-padded in `context` and its
completion right-padded in `tokens`, so the completion positions of a batch
are one static slice: losses, log-probs and entropies exist for those only.
Entry t of a [B, T] array describes completion token t given everything
before it; padding has weight 0.

Every leaf of a `Batch` leads with B, so one prefix sharding covers it and a
microbatch is a reshape. `Batch` is a NamedTuple and not a dataclass because
jaxtyping's hook re-runs a dataclass's `__init__` on unflatten.
"""

import enum
from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float, Int


class Source(enum.IntEnum):
  """Where a row comes from; the values of `Batch.source`."""

  OWN = 0  # sampled by this policy
  PEER = 1  # sampled by a peer, re-tokenised
  RESCUE = 2  # a peer's verified success
  REGEN = 3  # this policy's continuation of a stored prefix


class Moments(NamedTuple):
  """Sufficient statistics of a set of numbers; adds elementwise."""

  count: Float[Array, "..."]
  total: Float[Array, "..."]
  square: Float[Array, "..."]


class Peers(NamedTuple):
  """What the peers earned on a row's prompt; from the host, in full digits.

  Moments of rewards that lie close together cancel in float32, so their sums
  are merged on the host and arrive as mean and variance.
  """

  count: Float[Array, "B"]  # 0: no peer has told
  mean: Float[Array, "B"]
  variance: Float[Array, "B"]  # of the population: ddof 0


class Trace(NamedTuple):
  """How a row's tokens lie on those of the peer that wrote it.

  Receiver token t covers the share `first_part` of source token `first`, all
  source tokens between, and the share `last_part` of source token `last`.
  Receiver tokens chunk_start <= s < chunk_stop form its chunk: the smallest
  span whose ends are token ends on both sides.
  """

  logprobs: Float[Array, "B U"]  # of the source tokens, of the sampler
  first: Int[Array, "B T"]
  first_part: Float[Array, "B T"]
  last: Int[Array, "B T"]
  last_part: Float[Array, "B T"]
  chunk_start: Int[Array, "B T"]
  chunk_stop: Int[Array, "B T"]
  byte_share: Float[Array, "B T"]  # the token's bytes / its chunk's


class Shaping(NamedTuple):
  """What a frozen potential says about the rows."""

  potentials: Float[Array, "B T"]  # g(s_t) after t tokens; 0 on padding
  scale: Float[Array, "B"]  # of advantages: an average of past deviations


class Distribution(NamedTuple):
  """The exact sampling distribution; static under jit.

  Sampler and scorer take the same value, so a policy's ratio with itself is
  1 at any temperature, top-k or top-p. `top_k` 0 and `top_p` 1 mean off.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0


class Scores(NamedTuple):
  """What the policy being trained says about the rows of a batch."""

  logprobs: Float[Array, "B T"]
  entropies: Float[Array, "B T"]


class Batch(NamedTuple):
  """Rows on the device, and what each of their tokens is worth.

  `weights` starts as the loss mask and ends as the loss measure: the
  objective is `sum(weights * token_loss)`. `advantages` is NaN until a
  transform sets it, so a recipe that forgets is loud. `credit` is a
  per-token addition to the advantage, `bonus` a per-row one: from the host
  it comes as the row's novelty, which a transform gives a weight. `trace` is
  there when some row was written by a peer with another tokenizer.
  """

  context: Int[Array, "B P"]  # prompt ids, left-padded
  context_lengths: Int[Array, "B"]
  tokens: Int[Array, "B T"]  # completion ids, EOS included, right-padded
  weights: Float[Array, "B T"]
  behavior_logprobs: Float[Array, "B T"]  # of whoever sampled the token
  rewards: Float[Array, "B"]  # NaN: could not be scored
  advantages: Float[Array, "B"]
  credit: Float[Array, "B T"]
  bonus: Float[Array, "B"]
  clip_low: Float[Array, "B"]
  clip_high: Float[Array, "B"]
  group: Int[Array, "B"]  # rows of one prompt share a number in [0, B)
  source: Int[Array, "B"]
  version: Int[Array, "B"]  # updates the policy had made when it sampled
  peers: Peers
  old_logprobs: Float[Array, "B T"] | None = None  # trainer's, at stage start
  ref_logprobs: Float[Array, "B T"] | None = None  # frozen reference policy's
  trace: Trace | None = None
  shaping: Shaping | None = None


BatchTransform = Callable[[Batch], Batch]  # device: what each token is worth
TokenLoss = Callable[[Scores, Batch], Float[Array, "B T"]]  # unweighted
