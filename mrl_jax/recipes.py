"""The methods, each a handful of lines over transforms and losses.

A recipe says which experience a policy learns from (`receive`, on the
host), what each of its tokens is worth (`prepare`, on the device), and the
loss per token (`loss`). `prepare` follows one order: rewards, advantages,
clip range, weights. The weights end as the loss measure, so the objective
is `sum(weights * loss)`; whether a token that a rollout correction drops
still counts in the mean is whether the correction stands after the mean
(`original`) or before it (`kept`).
"""

import functools
from typing import NamedTuple

from mrl_jax import compose, losses, records
from mrl_jax import config as config_lib
from mrl_jax.kernels import correction as correction_lib
from mrl_jax.kernels import surrogate
from mrl_jax.transforms import advantages, clipping, weights
from mrl_jax.types import Batch, BatchTransform, TokenLoss


class Recipe(NamedTuple):
  """How one policy learns."""

  receive: records.RoundTransform
  prepare: BatchTransform
  loss: TokenLoss
  rescore: bool = False  # needs the trainer's log-probs at stage start


def grpo(
  *,
  loss: TokenLoss,
  reduction: BatchTransform,
  clip: tuple[float, float] = (0.2, 0.28),
  normalize: bool = True,
  correction: weights.Correction | None = None,
  denominator: str = "original",
  rescore: bool = False,
) -> Recipe:
  """GRPO (Shao et al. 2024, https://arxiv.org/abs/2402.03300).

  With `normalize=False` and a constant reduction it is Dr.GRPO (Liu et al.
  2025, https://arxiv.org/abs/2503.20783).
  """
  nothing = compose.chain()
  correct = weights.correct(correction) if correction else nothing
  kept = denominator == "kept"
  before, after = (correct, nothing) if kept else (nothing, correct)
  prepare = compose.chain(
    advantages.group_advantages(normalize=normalize),
    clipping.clip_range(*clip),
    before,
    reduction,
    after,
    anchor if rescore else nothing,
  )
  needs = rescore or correction is not None
  return Recipe(compose.chain(), prepare, loss, rescore=needs)


def anchor(batch: Batch) -> Batch:
  """Makes the trainer's log-probs at stage start the behaviour's."""
  return batch._replace(behavior_logprobs=batch.old_logprobs)


def from_config(config: config_lib.Config, policy: int) -> Recipe:
  """The recipe that the flags of one policy name."""
  correction, denominator = None, "original"
  if config.correction != "none":
    correction = _corrections(config)[config.correction]
    denominator = config.correction_denominator
  return grpo(
    loss=_loss(config, policy),
    reduction=_reduction(config),
    clip=(config.clip_low, config.clip_high),
    normalize=config.of("recipe", policy) == "grpo",
    correction=correction,
    denominator=denominator,
    rescore=config.rescore,
  )


def _loss(config: config_lib.Config, policy: int) -> TokenLoss:
  token_losses = {
    "policy_gradient": lambda: losses.policy_gradient(config.dual_clip or None),
    "gspo": losses.gspo,
    "cispo": losses.cispo,
    "reinforce": losses.reinforce,
  }
  terms = [(1.0, token_losses[config.of("loss", policy)]())]
  if config.kl_coefficient:
    estimators = {"k1": surrogate.k1, "k2": surrogate.k2, "k3": surrogate.k3}
    terms.append((config.kl_coefficient, losses.kl(estimators[config.kl])))
  if config.entropy_coefficient:
    terms.append((config.entropy_coefficient, losses.entropy()))
  return losses.add(*terms) if len(terms) > 1 else terms[0][1]


def _reduction(config: config_lib.Config) -> BatchTransform:
  return {
    "token_mean": weights.token_mean,
    "sequence_mean": weights.sequence_mean,
    "constant_mean": functools.partial(
      weights.constant_mean, config.completion_limit
    ),
  }[config.reduction]()


def _corrections(config: config_lib.Config) -> dict[str, weights.Correction]:
  low, high = config.correction_low, config.correction_high
  bind = functools.partial
  return {
    "tis_token": bind(correction_lib.tis_token, cap=high),
    "tis_sequence": bind(correction_lib.tis_sequence, cap=high),
    "mis_token": bind(correction_lib.mis_token, low=low, high=high),
    "mis_sequence": bind(correction_lib.mis_sequence, low=low, high=high),
    "icepop": bind(correction_lib.icepop, low=low, high=high, weighted=True),
    "response_veto": correction_lib.response_veto,
    "opsm": bind(correction_lib.opsm, delta=low),
    "m2po": bind(correction_lib.m2po, limit=low),
  }
