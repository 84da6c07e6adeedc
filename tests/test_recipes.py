"""Recipes: every name the flags allow gives a finite, measured objective."""

import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax import compose, config_names, losses, recipe_config, recipes
from mrl_jax import config as config_lib
from mrl_jax.exchange import receive
from mrl_jax.kernels import veto
from mrl_jax.transforms import advantages, clipping, foreign, weights
from mrl_jax.transforms import rows as rows_lib
from mrl_jax.types import Source, Trace
from tests import factories

PAIRS = [
  *itertools.product(config_names.LOSSES, config_names.REDUCTIONS, ["none"]),
  *itertools.product(
    ["policy_gradient"], ["token_mean"], config_names.CORRECTIONS
  ),
]


def made(**flags):
  config = config_lib.Config(workdir="w", policies=("p",), **flags)
  return recipe_config.make(config, 0)


def batch():
  rows = factories.batch(rows=8, steps=6, samples=4, seed=3)
  return rows._replace(
    rewards=jnp.asarray([1, 0, 0, 1, 0, 0, 0, 1], jnp.float32),
    old_logprobs=rows.behavior_logprobs + 0.1 * rows.weights,
    ref_logprobs=rows.behavior_logprobs - 0.1 * rows.weights,
  )


@pytest.mark.parametrize(("loss", "reduction", "correction"), PAIRS)
def test_every_named_combination_is_finite(loss, reduction, correction):
  recipe = made(loss=(loss,), reduction=reduction, correction=correction)
  rows = recipe.prepare(batch())
  scores = factories.scores(rows)
  value, grads = jax.value_and_grad(losses.objective(recipe.loss))(scores, rows)
  assert np.isfinite(value)
  assert np.isfinite(grads.logprobs).all()
  assert recipe.rescore == (correction != "none")
  if correction == "none" and reduction != "constant_mean":
    assert float(rows.weights.sum()) == pytest.approx(1, abs=1e-6)


def test_the_denominator_is_where_the_correction_stands():
  """Dropped tokens count in the mean (`original`) or do not (`kept`)."""
  rows = batch()
  ratios = jnp.where(rows.group[:, None] == 0, 5.0, 0.0) * rows.weights
  rows = rows._replace(old_logprobs=rows.behavior_logprobs + ratios)
  flags = {"correction": "mis_token", "correction_denominator": "kept"}
  kept = made(**flags).prepare(rows).weights.sum()
  original = made(correction="mis_token").prepare(rows).weights.sum()
  share = rows.weights[4:].sum() / rows.weights.sum()
  assert float(kept) == pytest.approx(1, abs=1e-6)
  assert float(original) == pytest.approx(float(share), abs=1e-6)


def test_dr_grpo_does_not_divide_by_the_deviation():
  found = made(recipe=("dr_grpo",)).prepare(batch()).advantages[:4]
  np.testing.assert_allclose(found, [0.5, -0.5, -0.5, 0.5], atol=1e-6)


def test_terms_add_with_their_coefficients():
  plain, rows = made(), batch()
  both = made(kl_coefficient=0.1, kl="k2", entropy_coefficient=0.01)
  rows = plain.prepare(rows)
  scores = factories.scores(rows)
  value = losses.objective(plain.loss)(scores, rows)
  mask = rows.weights != 0
  change = jnp.where(mask, scores.logprobs - rows.ref_logprobs, 0.0)
  extra = 0.1 * change**2 / 2 - 0.01 * scores.entropies
  wanted = value + jnp.where(mask, rows.weights * extra, 0.0).sum()
  found = losses.objective(both.loss)(scores, rows)
  assert float(found) == pytest.approx(float(wanted), abs=1e-5)


def test_rescoring_makes_the_trainers_log_probs_the_behaviors():
  rows = made(rescore=True).prepare(batch())
  np.testing.assert_array_equal(rows.behavior_logprobs, rows.old_logprobs)


def test_the_readmes_recipe_runs():
  text = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
  code = re.search(r"```python\n(.*?)```", text, re.S).group(1)
  names = {
    "Recipe": recipes.Recipe,
    "Source": Source,
    "advantages": advantages,
    "chain": compose.chain,
    "clipping": clipping,
    "losses": losses,
    "member": factories.member(),
    "receive": receive,
    "rows": rows_lib,
    "weights": weights,
  }
  exec(code, names)
  source = [Source.OWN] * 7 + [Source.RESCUE]
  rows = batch()._replace(source=jnp.asarray(source, jnp.int32))
  rows = rows._replace(rewards=rows.rewards.at[7].set(jnp.nan))
  rows = names["sgt"].prepare(rows)
  objective = losses.objective(names["sgt"].loss)
  value, grads = jax.value_and_grad(objective)(factories.scores(rows), rows)
  assert np.isfinite(value)
  used = rows.weights[7] != 0
  np.testing.assert_allclose(
    grads.logprobs[7], jnp.where(used, -0.1 / used.sum(), 0.0), atol=1e-7
  )


def peers_batch():
  """Two groups of three own rows and one of a peer's with a trace."""
  rows = batch()
  source = jnp.asarray([0, 0, 0, 1] * 2, jnp.int32)
  steps = jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32), (8, 6))
  one, nothing = jnp.ones((8, 6)), jnp.zeros((8, 6))
  trace = Trace(
    logprobs=rows.behavior_logprobs - 1.0,
    first=steps,
    first_part=one,
    last=steps,
    last_part=nothing,
    chunk_start=steps,
    chunk_stop=steps + 1,
    byte_share=one,
  )
  return rows._replace(source=source, trace=trace)


def probe(weigh=None):
  base = recipes.grpo(
    loss=losses.policy_gradient(),
    reduction=weights.token_mean(rows_lib.SAMPLES),
    advantage=advantages.group_advantages(rows_lib.SAMPLES),
  )
  return recipes.prp(base, factories.member(), 1, weigh=weigh)


def test_prp_weighs_a_peer_by_its_own_log_probs():
  rows = probe().prepare(peers_batch())
  used = np.asarray(rows.weights) != 0
  found = np.asarray(rows.behavior_logprobs)
  wanted = np.asarray(rows.trace.logprobs)
  np.testing.assert_array_equal(found[3][used[3]], wanted[3][used[3]])
  own = batch().behavior_logprobs
  np.testing.assert_array_equal(found[:3], own[:3])
  assert float(rows.weights.sum()) == pytest.approx(1, abs=1e-6)


def test_decoupled_prp_moves_the_ratio_into_the_weight():
  plain = probe().prepare(peers_batch())
  rows = probe(foreign.decouple(cap=2.0)).prepare(peers_batch())
  used = np.asarray(rows.weights) != 0
  # The learner is exp(1.1) times as likely as the peer, over the cap of 2.
  np.testing.assert_allclose(
    rows.weights[3][used[3]], 2 * plain.weights[3][used[3]], rtol=1e-5
  )
  np.testing.assert_array_equal(rows.weights[:3], plain.weights[:3])
  np.testing.assert_array_equal(rows.behavior_logprobs[3], rows.old_logprobs[3])


def test_recompute_prp_forgets_who_sampled():
  plain = probe().prepare(peers_batch())
  rows = probe(foreign.anchor(Source.PEER)).prepare(peers_batch())
  np.testing.assert_array_equal(rows.weights, plain.weights)
  np.testing.assert_array_equal(rows.behavior_logprobs[3], rows.old_logprobs[3])
  np.testing.assert_array_equal(
    rows.behavior_logprobs[:3], plain.behavior_logprobs[:3]
  )


@pytest.mark.parametrize("weigh", [None, foreign.decouple()])
def test_a_peers_ratio_is_bounded_and_its_negative_rows_doubly_clipped(weigh):
  recipe = probe(weigh)
  rows = peers_batch()
  far = rows.trace._replace(logprobs=rows.trace.logprobs - 200.0)
  rows = recipe.prepare(rows._replace(trace=far))
  value, grads = jax.value_and_grad(losses.objective(recipe.loss))(
    factories.scores(rows), rows
  )
  assert np.isfinite(value)
  assert np.isfinite(grads.logprobs).all()
  most = 3.0 * np.abs(np.asarray(rows.weights * rows.advantages[:, None]))
  if weigh is None:
    assert abs(float(value)) <= most.sum() + 1e-6


def test_flags_name_the_probes_and_what_they_need():
  two = {"policies": ("a", "b")}
  made_ = {
    name: recipe_config.make(
      config_lib.Config(workdir="w", recipe=(name,), **two),
      0,
      factories.member(),
    )
    for name in ("grpo", "prp", "xgrpo", "sgt", "xgrpo+sgt", "dr_grpo+prp+sgt")
  }
  assert made_["grpo"].needs == ()
  assert made_["xgrpo+sgt"].needs == ("values", "success")
  assert made_["dr_grpo+prp+sgt"].needs == ("trajectory", "success")


@pytest.mark.parametrize("name", veto.NAMED)
def test_flags_name_the_veto_and_its_threshold(name):
  assert made().veto is None
  rule = veto.rule(name, 1e-3 if name == "cumulative" else 0.2)
  assert made(veto=name, clip_low=0.8).veto == pytest.approx(rule)
  assert made(veto=name, veto_tau=0.3).veto == veto.rule(name, 0.3)
  assert made(veto=name, veto_tau=0.0).veto == veto.rule(name, 0.0)


def test_a_veto_leaves_the_window_and_the_measure_to_the_flags():
  flags = {"clip_low": 0.4, "clip_high": 3.0}
  found = made(veto="suffix", **flags).prepare(batch())
  wanted = made(**flags).prepare(batch())
  jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("order", ["inside", "outside"])
def test_probes_and_the_veto_combine(order):
  """Only own rows are vetoed, whichever stands outside."""
  rule = veto.Rule(0.999, both_signs=True)
  base = recipes.grpo(
    loss=losses.policy_gradient(3.0),
    reduction=weights.token_mean(rows_lib.SAMPLES),
    advantage=advantages.group_advantages(rows_lib.SAMPLES),
  )
  if order == "inside":
    base = recipes.mu_grpo(base, rule)
  recipe = recipes.prp(base, factories.member(), 1)
  recipe = recipes.sgt(recipe, factories.member())
  if order == "outside":
    recipe = recipes.mu_grpo(recipe, rule)
  assert recipe.veto == rule
  rows = peers_batch()
  rows = rows._replace(
    source=rows.source.at[7].set(int(Source.RESCUE)),
    rewards=rows.rewards.at[7].set(jnp.nan).at[4:7].set(0.0),
  )
  rows = recipe.prepare(rows)
  low = Source.OWN, Source.PEER, Source.RESCUE
  scores = factories.scores(rows)
  scores = scores._replace(logprobs=rows.behavior_logprobs - 1.0)
  objective = losses.objective(recipe.loss)
  value, grads = jax.value_and_grad(objective)(scores, rows)
  assert np.isfinite(value)
  moved = (grads.logprobs != 0).any(-1)
  for source, learns in zip(low, (False, True, True), strict=True):
    assert bool(moved[rows.source == int(source)].any()) == learns, source
