"""The methods, each a handful of lines over transforms and losses.

A recipe says what the peers must tell (`needs`), which experience a policy
learns from (`receive`, on the host), what each of its tokens is worth
(`prepare`, on the device), and the loss per token (`loss`). `prepare`
follows one order: rewards, advantages, clip range, weights. The weights end
as the loss measure, so the objective is `sum(weights * loss)`; whether a
token that a rollout correction drops still counts in the mean is whether the
correction stands after the mean (`original`) or before it (`kept`).

The three probes of Mutual RL (https://arxiv.org/abs/2605.07244) take a
recipe and return one, so they combine: `sgt(xgrpo(grpo(...)))`.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

from mrl_jax import compose, losses, records
from mrl_jax.exchange import receive as receive_lib
from mrl_jax.explore import novelty as novelty_lib
from mrl_jax.explore import prefixes as prefixes_lib
from mrl_jax.kernels import realign
from mrl_jax.kernels import veto as veto_lib
from mrl_jax.shaping import scale as shaping_lib
from mrl_jax.transforms import (
  advantages,
  clipping,
  foreign,
  rewards,
  rows,
  shaping,
  weights,
)
from mrl_jax.types import BatchTransform, Source, TokenLoss


class Recipe(NamedTuple):
  """How one policy learns."""

  receive: records.RoundTransform
  prepare: BatchTransform
  loss: TokenLoss
  needs: tuple[str, ...] = ()  # kinds of record that its peers publish
  rescore: bool = False  # needs the trainer's log-probs at stage start
  veto: veto_lib.Rule | None = None  # that its loss applies to own rows
  novelty: novelty_lib.Rule | None = None  # that its bonus follows
  prefixes: prefixes_lib.Rule | None = None  # that it tries again
  shaping: shaping_lib.Rule | None = None  # how it uses a potential
  earned: bool = False  # needs what each token earned


def grpo(
  *,
  loss: TokenLoss,
  reduction: BatchTransform,
  advantage: BatchTransform | None = None,
  process: BatchTransform | None = None,
  clip: tuple[float, float] = (0.2, 0.28),
  correction: weights.Correction | None = None,
  denominator: str = "original",
  rescore: bool = False,
) -> Recipe:
  """GRPO (Shao et al. 2024, https://arxiv.org/abs/2402.03300).

  With `group_advantages(normalize=False)` and a constant reduction it is
  Dr.GRPO (Liu et al. 2025, https://arxiv.org/abs/2503.20783). `process` is
  `advantages.return_to_go`, for verifiers that judge steps.
  """
  nothing = compose.chain()
  own = rows.OWN_SAMPLES
  correct = weights.correct(correction, own) if correction else nothing
  kept = denominator == "kept"
  before, after = (correct, nothing) if kept else (nothing, correct)
  prepare = compose.chain(
    advantage or advantages.group_advantages(),
    process or nothing,
    clipping.clip_range(*clip),
    before,
    reduction,
    after,
    foreign.anchor(own) if rescore else nothing,
  )
  needs = rescore or correction is not None
  earned = process is not None
  return Recipe(nothing, prepare, loss, rescore=needs, earned=earned)


def mu_grpo(
  base: Recipe,
  veto: veto_lib.Rule | None,
  window: BatchTransform | None = None,
) -> Recipe:
  """Mu-GRPO: many updates on samples that grow stale; own rows only.

  The base's loss should be `losses.policy_gradient(dual_clip=3.0)` and its
  `rescore` true, so that at the stage's start every ratio is 1; the double
  clip and the window's width are our choice. A token under the veto loses
  all terms of the loss, and still counts in its mean.

  Mu-GRPO 2026, https://arxiv.org/abs/2605.17570.

  Args:
    base: how the policy learns from fresh samples.
    veto: which tokens of bad responses are left out; None: none.
    window: of the ratio; None is `clipping.relaxed()` on own rows.
  """
  own = rows.OWN_SAMPLES
  base = base._replace(
    prepare=compose.chain(base.prepare, window or clipping.relaxed(source=own)),
    veto=veto,
  )
  if veto is None:
    return base
  leave_out = functools.partial(veto_lib.veto, rule=veto)
  return base._replace(loss=losses.corrected(base.loss, leave_out, own))


def prp(
  base: Recipe,
  member: receive_lib.Member,
  count: int,
  *,
  spread=realign.collect,
  weigh: BatchTransform | None = None,
  dual_clip: float = 3.0,
  bound: float = 10.0,
) -> Recipe:
  """PRP: `count` of the peers' rollouts join each group.

  The base's advantages should be over `rows.SAMPLES`. A peer's token has the
  ratio exp(clip(lp - lb~, -bound, bound)), where lb~ are the peer's log-probs
  on this policy's tokens; the double clip is our choice.

  Args:
    base: how the policy learns from its own samples.
    member: reads what the peers wrote.
    count: rows per prompt.
    spread: how a source token's log-prob is shared among receiver tokens.
    weigh: None compares with the peer; `foreign.decouple()` and
      `foreign.anchor(Source.PEER)` with this policy at the stage's start.
    dual_clip: bound on the loss of the peers' negative rows.
    bound: of the log-ratios.
  """
  return base._replace(
    receive=compose.chain(base.receive, receive_lib.rollouts(member, count)),
    prepare=compose.chain(
      foreign.collect(spread), base.prepare, weigh or compose.chain()
    ),
    loss=losses.switch(
      base.loss, {Source.PEER: losses.policy_gradient(dual_clip, bound)}
    ),
    needs=(*base.needs, "trajectory"),
    rescore=base.rescore or weigh is not None,
  )


def xgrpo(base: Recipe) -> Recipe:
  """XGRPO: the peers' rewards share in the baseline; own rows only.

  The base's advantages should be `advantages.mixed_advantages`.
  """
  return base._replace(
    receive=compose.chain(base.receive, receive_lib.values()),
    needs=(*base.needs, "values"),
  )


def sgt(
  base: Recipe,
  member: receive_lib.Member,
  *,
  scale: float = 0.1,
  per_prompt: int = 1,
  mean: Callable[..., BatchTransform] = weights.token_mean,
) -> Recipe:
  """SGT: imitates a peer's verified success where every own sample failed.

  loss = base + scale * mean over rescue tokens of -log p. Gate, scale, mean
  and the uniform draw follow a later reproduction of the paper. A mean over
  rescue tokens weighs one rescued prompt as much as a hundred; with
  `weights.group_mean` the step is in proportion to the rescue set, which is
  what the paper's analysis of its direction says.
  """
  return base._replace(
    receive=compose.chain(base.receive, receive_lib.rescue(member, per_prompt)),
    prepare=compose.chain(base.prepare, mean(Source.RESCUE, scale)),
    loss=losses.switch(base.loss, {Source.RESCUE: losses.score()}),
    needs=(*base.needs, "success"),
  )


def novelty(base: Recipe, rule: novelty_lib.Rule | None = None) -> Recipe:
  """ExTra's bonus: right answers unlike earlier ones are worth more.

  ExTra 2026, https://arxiv.org/abs/2606.24994.
  """
  rule = rule or novelty_lib.Rule()
  if rule.before:
    parts = (rewards.add_novelty(rule.weight), base.prepare)
  else:
    parts = (base.prepare, advantages.add_novelty(rule.weight))
  return base._replace(prepare=compose.chain(*parts), novelty=rule)


def regenerate(base: Recipe, rule: prefixes_lib.Rule | None = None) -> Recipe:
  """ExTra's second chance: hard prompts again, from within an answer.

  A continued prefix is prompt: it has no loss and no ratio, and its group
  is one of its own.

  ExTra 2026, https://arxiv.org/abs/2606.24994.
  """
  return base._replace(prefixes=rule or prefixes_lib.Rule())


def extra(base: Recipe) -> Recipe:
  """ExTra as published: both."""
  return regenerate(novelty(base))


def merla(base: Recipe, rule: shaping_lib.Rule | None = None) -> Recipe:
  """MeRLa: a frozen, meta-trained potential shapes what is learned.

  As a baseline of each token (`token`), which needs a reduction that divides
  by constants, or added to the reward (`sequence`, `bounded`). It is for own
  samples; the reward that is reported stays the task's.

  MeRLa 2026, https://arxiv.org/abs/2607.26094.

  Raises:
    ValueError: a bounded rule's alpha and bound are too large for its gap.
  """
  rule = rule or shaping_lib.Rule()
  shape = {
    "token": lambda: shaping.shape_tokens(rule.alpha),
    "sequence": lambda: shaping.shape_sequence(rule.alpha),
    "bounded": lambda: shaping.shape_bounded(rule.alpha, rule.bound, rule.gap),
  }[rule.mode]()
  if rule.mode == "token":
    parts = (base.prepare, shape)
  else:
    parts = (shape, base.prepare)
  return base._replace(prepare=compose.chain(*parts), shaping=rule)
