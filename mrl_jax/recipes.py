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
from mrl_jax import config as config_lib
from mrl_jax.exchange import receive as receive_lib
from mrl_jax.kernels import correction as correction_lib
from mrl_jax.kernels import realign, surrogate
from mrl_jax.kernels import veto as veto_lib
from mrl_jax.transforms import advantages, clipping, foreign, rows, weights
from mrl_jax.types import BatchTransform, Source, TokenLoss


class Recipe(NamedTuple):
  """How one policy learns."""

  receive: records.RoundTransform
  prepare: BatchTransform
  loss: TokenLoss
  needs: tuple[str, ...] = ()  # kinds of record that its peers publish
  rescore: bool = False  # needs the trainer's log-probs at stage start
  veto: veto_lib.Rule | None = None  # that its loss applies to own rows


def grpo(
  *,
  loss: TokenLoss,
  reduction: BatchTransform,
  advantage: BatchTransform | None = None,
  clip: tuple[float, float] = (0.2, 0.28),
  correction: weights.Correction | None = None,
  denominator: str = "original",
  rescore: bool = False,
) -> Recipe:
  """GRPO (Shao et al. 2024, https://arxiv.org/abs/2402.03300).

  With `group_advantages(normalize=False)` and a constant reduction it is
  Dr.GRPO (Liu et al. 2025, https://arxiv.org/abs/2503.20783).
  """
  nothing = compose.chain()
  own = rows.OWN_SAMPLES
  correct = weights.correct(correction, own) if correction else nothing
  kept = denominator == "kept"
  before, after = (correct, nothing) if kept else (nothing, correct)
  prepare = compose.chain(
    advantage or advantages.group_advantages(),
    clipping.clip_range(*clip),
    before,
    reduction,
    after,
    foreign.anchor(own) if rescore else nothing,
  )
  needs = rescore or correction is not None
  return Recipe(compose.chain(), prepare, loss, rescore=needs)


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


def from_config(
  config: config_lib.Config,
  policy: int,
  member: receive_lib.Member | None = None,
) -> Recipe:
  """The recipe that the flags of one policy name.

  `member` is the policy's side of the exchange, for recipes that listen.
  """
  names = config.of("recipe", policy).split("+")
  correction, denominator = None, "original"
  if config.correction != "none":
    correction = _corrections(config)[config.correction]
    denominator = config.correction_denominator
  recipe = grpo(
    loss=_loss(config, policy),
    reduction=_reduction(config),
    advantage=_advantage(config, names),
    clip=(config.clip_low, config.clip_high),
    correction=correction,
    denominator=denominator,
    rescore=config.rescore,
  )
  if config.veto != "none":
    recipe = mu_grpo(recipe, _veto(config), compose.chain())
  if "xgrpo" in names:
    recipe = xgrpo(recipe)
  if "prp" in names:
    count = config.peer_samples or config.of("samples", policy)
    recipe = prp(
      recipe,
      member,
      count,
      spread=_SPREADS[config.spread],
      weigh=_weigh(config),
      dual_clip=config.peer_dual_clip,
    )
  if "sgt" in names:
    recipe = sgt(
      recipe,
      member,
      scale=config.rescue_weight,
      per_prompt=config.rescue_samples,
      mean=_RESCUE_MEANS[config.rescue_mean],
    )
  return recipe


_SPREADS = {"bytes": realign.collect, "chunk": realign.collect_chunks}


_RESCUE_MEANS = {"tokens": weights.token_mean, "prompts": weights.group_mean}


def _weigh(config: config_lib.Config) -> BatchTransform | None:
  return {
    "behavior": lambda: None,
    "decoupled": lambda: foreign.decouple(config.peer_cap),
    "recompute": lambda: foreign.anchor(Source.PEER),
  }[config.prp_mode]()


def _veto(config: config_lib.Config) -> veto_lib.Rule:
  tau = config.veto_tau
  if tau == -1:
    tau = 1e-3 if config.veto == "cumulative" else 1 - config.clip_low
  return veto_lib.rule(config.veto, tau)


def _advantage(config: config_lib.Config, names: list[str]) -> BatchTransform:
  normalize = "dr_grpo" not in names
  if "xgrpo" in names:
    mix = None if config.xgrpo_mix < 0 else config.xgrpo_mix
    return advantages.mixed_advantages(mix, normalize=normalize)
  union = rows.SAMPLES if "prp" in names else rows.OWN_SAMPLES
  return advantages.group_advantages(union, normalize=normalize)


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
  }[config.reduction](source=rows.SAMPLES)


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
