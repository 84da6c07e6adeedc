"""From the flags of one policy to its recipe.

The only place where names on the command line meet the functions that they
stand for.
"""

import functools

from mrl_jax import compose, losses, recipes
from mrl_jax import config as config_lib
from mrl_jax.exchange import receive as receive_lib
from mrl_jax.explore import novelty as novelty_lib
from mrl_jax.explore import prefixes as prefixes_lib
from mrl_jax.kernels import correction as correction_lib
from mrl_jax.kernels import realign, surrogate
from mrl_jax.kernels import veto as veto_lib
from mrl_jax.shaping import scale as shaping_lib
from mrl_jax.transforms import advantages, foreign, rows, weights
from mrl_jax.types import BatchTransform, Source, TokenLoss


def embeds(config: config_lib.Config, policy: int) -> bool:
  """Whether the recipe of one policy compares answers by their meaning."""
  names = set(config.of("recipe", policy).split("+"))
  if names & {"novelty", "extra"}:
    return True
  return "regenerate" in names and _prefixes(config).embeds


def make(
  config: config_lib.Config,
  policy: int,
  member: receive_lib.Member | None = None,
  bound: float | int = 1.0,
) -> recipes.Recipe:
  """The recipe that the flags of one policy name.

  `member` is the policy's side of the exchange, for recipes that listen, and
  `bound` that of its potential, for one that is shaped.
  """
  names = config.of("recipe", policy).split("+")
  correction, denominator = None, "original"
  if config.correction != "none":
    correction = _corrections(config)[config.correction]
    denominator = config.correction_denominator
  recipe = recipes.grpo(
    loss=_loss(config, policy),
    reduction=_reduction(config),
    advantage=_advantage(config, names),
    process=_process(config, "dr_grpo" not in names),
    clip=(config.clip_low, config.clip_high),
    correction=correction,
    denominator=denominator,
    rescore=config.rescore,
  )
  if config.veto != "none":
    recipe = recipes.mu_grpo(recipe, _veto(config), compose.chain())
  if "xgrpo" in names:
    recipe = recipes.xgrpo(recipe)
  if "prp" in names:
    count = config.peer_samples or config.of("samples", policy)
    recipe = recipes.prp(
      recipe,
      member,
      count,
      spread=_SPREADS[config.spread],
      weigh=_weigh(config),
      dual_clip=config.peer_dual_clip,
    )
  if "sgt" in names:
    recipe = recipes.sgt(
      recipe,
      member,
      scale=config.rescue_weight,
      per_prompt=config.rescue_samples,
      mean=_RESCUE_MEANS[config.rescue_mean],
    )
  if {"novelty", "extra"} & set(names):
    recipe = recipes.novelty(recipe, _novelty(config))
  if {"regenerate", "extra"} & set(names):
    recipe = recipes.regenerate(recipe, _prefixes(config))
  if "merla" in names:
    recipe = _shaped(config, recipe, bound, "dr_grpo" not in names)
  return recipe


_SPREADS = {"bytes": realign.collect, "chunk": realign.collect_chunks}


_RESCUE_MEANS = {"tokens": weights.token_mean, "prompts": weights.group_mean}


def _weigh(config: config_lib.Config) -> BatchTransform | None:
  return {
    "behavior": lambda: None,
    "decoupled": lambda: foreign.decouple(config.peer_cap),
    "recompute": lambda: foreign.anchor(Source.PEER),
  }[config.prp_mode]()


def _novelty(config: config_lib.Config) -> novelty_lib.Rule:
  return novelty_lib.Rule(
    weight=config.novelty_weight,
    size=config.novelty_memory,
    correct=config.novelty_pool == "correct",
    before=config.novelty_place == "before",
    prompts=config.novelty_prompts,
  )


def _prefixes(config: config_lib.Config) -> prefixes_lib.Rule:
  return prefixes_lib.Rule(
    choice=config.regenerate,
    slots=config.regenerate_slots,
    warmup=config.regenerate_warmup,
    boundary=config.regenerate_boundary,
    gap=config.regenerate_gap,
    cuts=config.regenerate_cuts,
    cap=config.regenerate_cap,
    temperature=config.regenerate_temperature,
    queue=config.regenerate_queue,
    depth=config.regenerate_depth,
  )


def _shaped(
  config: config_lib.Config,
  recipe: recipes.Recipe,
  bound: float | int,
  normalize: bool,
) -> recipes.Recipe:
  rule = shaping_lib.Rule(
    mode=config.shaping,
    alpha=config.shaping_alpha,
    bound=bound,
    gap=config.shaping_gap,
    decay=config.shaping_decay,
    start=config.shaping_scale,
    normalize=normalize,
  )
  try:
    return recipes.merla(recipe, rule)
  except ValueError as error:
    raise config_lib.ConfigError(
      "shaping_alpha", config.shaping_alpha, str(error)
    ) from None


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


def _process(
  config: config_lib.Config, normalize: bool
) -> BatchTransform | None:
  if config.process == "none":
    return None
  return advantages.return_to_go(normalize=normalize, against=config.process)


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
