"""Leaves out of bad responses what follows a token that became unlikely.

In a stale response of negative advantage, a token that the policy has
unlearned marks the place from which the policy would have written something
else: pushing down what follows teaches it nothing about its own answers. A
rule says which token triggers and how much of the response goes with it. It
is asked anew at every update, of the current policy, and has no gradient.
Tokens left out still count in the mean: the others do not gain weight.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

REACHES = ("suffix", "response", "token")


class Rule(NamedTuple):
  """Which tokens are left out; static under jit."""

  low: float  # a ratio below it triggers; 0: none does
  high: float = math.inf  # and one above it
  cumulative: bool = False  # the ratio of all tokens so far, not of one
  reach: str = "suffix"  # what goes: one of REACHES
  both_signs: bool = False  # responses of any advantage, not the negative


class Counts(NamedTuple):
  """What a rule leaves out of each row, as numbers that can be added."""

  tokens: Float[Array, "B"]  # left out, whatever the advantage
  negative: Float[Array, "B"]  # 1: has tokens, and a negative advantage
  rows: Float[Array, "B"]  # 1: and lost some of them
  position: Float[Array, "B"]  # and the share of tokens before the trigger


NAMED = (
  "suffix",
  "cumulative",
  "two_sided",
  "high_ratio",
  "response",
  "both_signs",
  "token",
)


def rule(name: str, tau: int | float, high: int | float | None = None) -> Rule:
  """One of the paper's rules by name; what the paper leaves open is ours.

  suffix: the first token with r < tau, and all after it. cumulative: the
  same for the ratio of the whole prefix. two_sided: r > high triggers too.
  high_ratio: that alone. response: all of a response that has such a token.
  both_signs: responses of positive advantage too. token: such tokens alone.

  Mu-GRPO 2026, https://arxiv.org/abs/2605.17570.

  Args:
    name: one of `NAMED`.
    tau: the threshold, in [0, 1); 0 never triggers. Our choice is the lower
      end of the clip range, and 1e-3 for a whole prefix.
    high: the upper threshold; our choice is 1 / tau, as far in log-ratio.

  Raises:
    ValueError: an argument is not one of these.
  """
  if name not in NAMED:
    raise ValueError(f"name={name!r} must be one of {', '.join(NAMED)}")
  if not 0 <= tau < 1:
    raise ValueError(f"tau={tau} must be in [0, 1)")
  if high is not None and not high > 1:
    raise ValueError(f"high={high} must be above 1, or None")
  if high is None:
    high = 1 / tau if tau > 0 else math.inf
  return {
    "suffix": Rule(tau),
    "cumulative": Rule(tau, cumulative=True),
    "two_sided": Rule(tau, high),
    "high_ratio": Rule(0.0, high),
    "response": Rule(tau, reach="response"),
    "both_signs": Rule(tau, both_signs=True),
    "token": Rule(tau, reach="token"),
  }[name]


def veto(
  log_ratios: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
  advantages: Float[Array, "B"],
  rule: Rule,
) -> Float[Array, "B T"]:
  """The negative-advantage veto: 0 for a token that is left out, else 1.

  trigger_t = r_t < low or r_t > high, with prod_{s<=t} r_s for r_t if
  `cumulative`;  veto_t = A < 0 and any_{s<=t} trigger_s. A is the
  response's: a token's may have the other sign. The trigger goes too.

  Mu-GRPO 2026, https://arxiv.org/abs/2605.17570.
  """
  gone = _gone(_triggers(log_ratios, mask, rule), mask, advantages, rule)
  return jax.lax.stop_gradient(jnp.where(gone, 0.0, 1.0))


def measure(
  log_ratios: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
  advantages: Float[Array, "B"],
  rule: Rule,
) -> Counts:
  """What `veto` leaves out of each row, and where it begins.

  `position` is that of the first trigger: how many of the row's tokens stand
  before it, over how many the row has.
  """
  triggers = _triggers(log_ratios, mask, rule)
  gone = _gone(triggers, mask, advantages, rule)
  negative = (advantages < 0) & mask.any(-1)
  rows = negative & gone.any(-1)
  before = (mask & ~_so_far(triggers)).sum(-1)
  position = before / jnp.maximum(mask.sum(-1), 1)
  counts = (gone.sum(-1), negative, rows, jnp.where(rows, position, 0.0))
  return Counts(*(jax.lax.stop_gradient(x.astype(jnp.float32)) for x in counts))


def _triggers(log_ratios, mask, rule):
  # Where a log-ratio is nan no comparison holds: that is not for a veto.
  found = jax.lax.stop_gradient(jnp.where(mask, log_ratios, 0.0))
  if rule.cumulative:
    found = jnp.cumsum(found, -1)
  return mask & ((found < _log(rule.low)) | (found > _log(rule.high)))


def _gone(triggers, mask, advantages, rule):
  if rule.reach not in REACHES:
    raise ValueError(
      f"reach={rule.reach!r} must be one of {', '.join(REACHES)}"
    )
  hit = {
    "suffix": lambda: _so_far(triggers),
    "response": lambda: triggers.any(-1, keepdims=True),
    "token": lambda: triggers,
  }[rule.reach]()
  rows = jnp.ones_like(mask[:, 0]) if rule.both_signs else advantages < 0
  return mask & hit & rows[:, None]


def _so_far(triggers):
  """Whether this token or one before it triggers."""
  return jax.lax.cummax(triggers.astype(jnp.int32), axis=1) > 0


def _log(ratio):
  return math.log(ratio) if ratio > 0 else -math.inf
