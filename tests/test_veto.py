"""The veto: known answers, an oracle, and laws of the loss that has one."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl_jax import config_names, losses, recipes
from mrl_jax.kernels import veto
from mrl_jax.transforms import rows as rows_lib
from mrl_jax.transforms import weights
from mrl_jax.types import Scores, Source
from tests import factories

RATIOS = np.asarray([[1, 1, 0.1, 1.5, 1]], np.float32)
HALF = veto.Rule(0.5)


def drop(rule, ratios=RATIOS, advantage=-1.0, mask=None):
  """What is left of each row of `ratios`."""
  ratios = jnp.asarray(ratios, jnp.float32)
  mask = np.ones(ratios.shape, bool) if mask is None else np.asarray(mask, bool)
  signs = jnp.full(ratios.shape[:1], advantage, jnp.float32)
  found = veto.veto(jnp.log(ratios), jnp.asarray(mask), signs, rule)
  return found.astype(int).tolist()


def test_the_trigger_goes_with_all_that_follows():
  assert drop(HALF) == [[1, 1, 0, 0, 0]]


@pytest.mark.parametrize("advantage", [1.0, 0.0, math.nan])
def test_a_response_that_is_not_bad_loses_nothing(advantage):
  assert drop(HALF, advantage=advantage) == [[1] * 5]


@pytest.mark.parametrize(
  ("name", "left"),
  [
    ("suffix", [1, 1, 0, 0, 0, 0]),
    ("cumulative", [1, 1, 1, 0, 0, 0]),
    ("two_sided", [1, 0, 0, 0, 0, 0]),
    ("high_ratio", [1, 0, 0, 0, 0, 0]),
    ("response", [0, 0, 0, 0, 0, 0]),
    ("both_signs", [1, 1, 0, 0, 0, 0]),
    ("token", [1, 1, 0, 0, 1, 1]),
  ],
)
def test_every_named_rule(name, left):
  ratios = [[1, 2.5, 0.4, 0.45, 1, 1]]  # prefixes: 1, 2.5, 1, .45, .45, .45
  assert drop(veto.rule(name, 0.5), ratios) == [left]
  good = drop(veto.rule(name, 0.5), ratios, advantage=1.0)
  assert good == [left if name == "both_signs" else [1] * 6]


def test_the_two_sides_are_told_apart():
  ratios = [[1, 0.4, 1], [1, 2.1, 1], [1, 1.9, 0.6]]
  low, high = [1, 0, 0], [1, 1, 1]
  assert drop(HALF, ratios) == [low, high, high]
  assert drop(veto.rule("high_ratio", 0.5), ratios) == [high, low, high]
  assert drop(veto.rule("two_sided", 0.5), ratios) == [low, low, high]
  assert drop(veto.rule("two_sided", 0.5, high=1.8), ratios) == [low] * 3


def test_a_ratio_at_the_threshold_does_not_trigger():
  assert drop(HALF, [[0.5, 1]]) == [[1, 1]]
  assert drop(veto.Rule(0.0, 2.0), [[2.0, 1]]) == [[1, 1]]


@pytest.mark.parametrize("name", veto.NAMED)
def test_a_threshold_of_0_never_triggers(name):
  extreme = jnp.asarray([[-math.inf, 300.0, -300.0]])
  found = veto.veto(
    extreme, jnp.ones((1, 3), bool), -jnp.ones(1), veto.rule(name, 0.0)
  )
  assert found.tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("name", veto.NAMED)
def test_on_policy_nothing_is_left_out(name):
  assert drop(veto.rule(name, 0.999), np.ones((2, 4))) == [[1] * 4] * 2


def test_masked_tokens_neither_trigger_nor_add_up():
  mask = [[1, 1, 0, 1, 1]]
  assert drop(HALF, mask=mask) == [[1] * 5]
  assert drop(veto.rule("cumulative", 0.5), mask=mask) == [[1] * 5]


@pytest.mark.parametrize(
  ("changes", "match"),
  [
    ({"name": "suffx"}, "name='suffx' must be one of suffix, cumulative"),
    ({"tau": 1.0}, r"tau=1.0 must be in \[0, 1\)"),
    ({"tau": -0.1}, r"tau=-0.1 must be in \[0, 1\)"),
    ({"tau": math.nan}, "tau=nan"),
    ({"high": 0.9}, "high=0.9 must be above 1"),
  ],
)
def test_a_bad_rule_is_refused(changes, match):
  with pytest.raises(ValueError, match=match):
    veto.rule(**{"name": "suffix", "tau": 0.5, **changes})


def test_an_unknown_reach_is_refused():
  with pytest.raises(ValueError, match="reach='row' must be one of suffix"):
    drop(veto.Rule(0.5, reach="row"))


def test_the_flags_know_every_name():
  assert ("none", *veto.NAMED) == config_names.VETOES


RULES = st.builds(
  veto.Rule,
  st.sampled_from([0.0, 0.3, 0.7]),
  st.sampled_from([1.5, math.inf]),
  st.booleans(),
  st.sampled_from(veto.REACHES),
  st.booleans(),
)


def draw(seed, rows=5, steps=6):
  rng = np.random.default_rng(seed)
  log_ratios = rng.normal(size=(rows, steps)).astype(np.float32)
  mask = rng.random((rows, steps)) < 0.8
  mask[-1] = False  # a row of no tokens
  advantages = rng.choice([-1.0, 0.0, 1.0], rows).astype(np.float32)
  advantages[-1] = -1.0
  return tuple(map(jnp.asarray, (log_ratios, mask, advantages)))


def oracle(log_ratios, mask, advantages, rule):
  """1 for what is left, and four counts of each row; token by token."""
  left = np.ones(mask.shape)
  counts = np.zeros((4, len(mask)))
  for b in range(len(mask)):
    steps, total, hits = np.flatnonzero(mask[b]), 0.0, []
    for t in steps:
      d = np.float64(log_ratios[b, t])
      total += d
      r = np.exp(total if rule.cumulative else d)
      hits.append(bool(r < rule.low or r > rule.high))
    bad = advantages[b] < 0
    counts[1, b] = bad and len(steps) > 0
    if not any(hits) or not (bad or rule.both_signs):
      continue
    first = hits.index(True)
    gone = {"suffix": steps[first:], "response": steps, "token": steps[hits]}
    left[b, gone[rule.reach]] = 0
    counts[0, b] = len(gone[rule.reach])
    counts[2, b], counts[3, b] = bad, bad * first / len(steps)
  return left, counts


@given(st.integers(0, 2**32 - 1), RULES)
@settings(deadline=None, max_examples=60)
def test_the_veto_and_its_counts_are_the_oracles(seed, rule):
  arguments = draw(seed)
  left, counts = oracle(*map(np.asarray, arguments), rule)
  np.testing.assert_array_equal(veto.veto(*arguments, rule), left)
  found = veto.measure(*arguments, rule)
  np.testing.assert_allclose(np.stack(found), counts, rtol=1e-6)


@given(st.integers(0, 2**32 - 1), RULES)
@settings(deadline=None, max_examples=20)
def test_rows_are_alone_and_padding_is_nothing(seed, rule):
  log_ratios, mask, advantages = draw(seed)
  whole = veto.veto(log_ratios, mask, advantages, rule)
  order = np.random.default_rng(seed).permutation(len(advantages))
  found = veto.veto(log_ratios[order], mask[order], advantages[order], rule)
  np.testing.assert_array_equal(found, whole[order])
  wide = jnp.pad(log_ratios, ((0, 0), (0, 3)), constant_values=-9.0)
  found = veto.veto(wide, jnp.pad(mask, ((0, 0), (0, 3))), advantages, rule)
  np.testing.assert_array_equal(found[:, :6], whole)


# The loss under a veto.


def batch(rows=6, steps=6, seed=0, **fields):
  rng = np.random.default_rng(seed)
  made = factories.batch(
    rows=rows, steps=steps, advantages=rng.normal(size=rows), **fields
  )
  window = {"clip_low": jnp.full(rows, 0.5), "clip_high": jnp.full(rows, 1.0)}
  return weights.token_mean()(made._replace(**window))


def vetoed(rule, loss=None, source=rows_lib.OWN_SAMPLES):
  plain = loss or losses.policy_gradient(3.0)
  return losses.corrected(
    plain, functools.partial(veto.veto, rule=rule), source
  )


def step(loss, scores, rows):
  """Value and gradient with respect to the log-probs."""
  objective = losses.objective(loss)
  value, grads = jax.value_and_grad(objective)(scores, rows)
  return value, grads.logprobs


def test_at_the_first_update_the_gradient_is_reinforces():
  rows = batch()
  scores = Scores(rows.behavior_logprobs, jnp.zeros_like(rows.weights))
  _, found = step(vetoed(veto.Rule(0.999)), scores, rows)
  _, wanted = step(losses.reinforce(), scores, rows)
  np.testing.assert_allclose(found, wanted, rtol=1e-6)
  assert (wanted != 0).any()


def test_a_veto_that_never_triggers_is_the_loss_to_the_bit():
  rows = batch()
  scores = factories.scores(rows, drift=2.0)
  plain = jax.jit(functools.partial(step, losses.policy_gradient(3.0)))
  never = jax.jit(functools.partial(step, vetoed(veto.Rule(0.0))))
  jax.tree.map(
    np.testing.assert_array_equal, never(scores, rows), plain(scores, rows)
  )
  half = jax.jit(functools.partial(step, vetoed(HALF)))
  assert half(scores, rows)[0] != plain(scores, rows)[0]


def test_survivors_keep_their_weight():
  rows = factories.rows(
    np.ones((2, 5)), advantages=[-1.0, 1.0], clip_low=[1, 1], clip_high=[9, 9]
  )
  rows = weights.token_mean()(rows)
  logprobs = jnp.log(jnp.asarray([RATIOS[0], RATIOS[0]]))
  scores = Scores(logprobs, jnp.zeros_like(logprobs))
  value, found = step(vetoed(HALF), scores, rows)
  good = -RATIOS[0] / 10
  wanted = [[0.1, 0.1, 0, 0, 0], good]
  np.testing.assert_allclose(found, wanted, rtol=1e-6)
  np.testing.assert_allclose(value, np.sum(wanted), rtol=1e-5)


def test_the_responses_sign_decides_and_never_a_tokens():
  logprobs = jnp.log(jnp.asarray([[1.0, 0.1, 1.0]]))
  scores = Scores(logprobs, jnp.zeros_like(logprobs))
  for advantage, left in ((-0.5, [1, 0, 0]), (0.5, [1, 1, 1])):
    tokens = np.asarray([[-0.5, 0.25, -0.25]]) * -2 * advantage
    rows = factories.rows(
      np.ones((1, 3)), advantages=[advantage], credit=tokens - advantage
    )
    loss = vetoed(HALF, losses.reinforce())
    _, found = step(loss, scores, rows)
    np.testing.assert_allclose(found, -tokens * left, rtol=1e-6)


def test_rows_of_other_sources_stay_as_they_are():
  source = [int(s) for s in (*Source, Source.OWN, Source.PEER)]
  rows = batch(source=source)._replace(advantages=-jnp.ones(6))
  scores = factories.scores(rows, drift=3.0)
  rule = veto.Rule(0.9, both_signs=True)
  _, plain = step(losses.reinforce(), scores, rows)
  _, found = step(vetoed(rule, losses.reinforce()), scores, rows)
  same = np.asarray((found == plain).all(-1))
  own = np.isin(source, [int(s) for s in rows_lib.OWN_SAMPLES])
  assert same[~own].all()
  assert not same[own].all()


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, -300.0, 300.0])
def test_what_is_left_out_sends_nothing_through_the_gradient(junk):
  """Neither from behind a trigger nor from under the mask."""
  rows = factories.rows(
    [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], advantages=[-1.0, 1.0]
  )
  logprobs = jnp.log(jnp.asarray([[1, 1, 0.1, 1, 1], [1.0] * 5]))
  clean = Scores(logprobs, jnp.zeros_like(logprobs))
  dirty = clean._replace(logprobs=logprobs.at[0, 3:].set(junk))
  for plain in (losses.policy_gradient(), losses.cispo(), losses.reinforce()):
    loss = vetoed(HALF, plain)
    found, wanted = step(loss, dirty, rows), step(loss, clean, rows)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert np.isfinite(found[1]).all()
    assert found[1][0].tolist()[2:] == [0, 0, 0]


@pytest.mark.parametrize("d", [-math.inf, -300.0, 300.0])
@pytest.mark.parametrize("name", veto.NAMED)
def test_the_gradient_is_finite_at_an_extreme_trigger(name, d):
  rows = factories.rows(np.ones((2, 4)), advantages=[-1.0, 1.0])
  logprobs = jnp.zeros((2, 4)).at[:, 1].set(d)
  scores = Scores(logprobs, jnp.zeros_like(logprobs))
  loss = vetoed(veto.rule(name, 0.5), losses.policy_gradient(3.0))
  value, found = step(loss, scores, rows)
  assert np.isfinite(value) and np.isfinite(found).all()


@given(st.integers(0, 2**32 - 1), RULES)
@settings(deadline=None, max_examples=15)
def test_microbatches_add_up_and_the_order_of_rows_is_nothing(seed, rule):
  rows = batch(seed=seed)
  scores = factories.scores(rows, seed=seed, drift=1.0)
  loss = vetoed(rule)
  value, gradient = step(loss, scores, rows)
  total, parts = 0.0, np.zeros_like(gradient)
  for part in (slice(0, 2), slice(2, 6)):
    one, found = step(
      loss, *jax.tree.map(lambda x, p=part: x[p], (scores, rows))
    )
    total, parts[part] = total + one, found
  np.testing.assert_allclose(total, value, rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(parts, gradient, rtol=1e-5, atol=1e-7)
  order = np.random.default_rng(seed).permutation(6)
  _, moved = step(loss, *jax.tree.map(lambda x: x[order], (scores, rows)))
  np.testing.assert_allclose(moved, gradient[order], rtol=1e-5, atol=1e-7)


def test_a_recipe_says_what_its_loss_leaves_out():
  base = recipes.grpo(
    loss=losses.policy_gradient(3.0), reduction=weights.token_mean()
  )
  relaxed = recipes.mu_grpo(base, None)
  assert relaxed.veto is None and relaxed.loss is base.loss
  recipe = recipes.mu_grpo(base, HALF)
  assert recipe.veto == HALF
  source = [int(Source.OWN), int(Source.PEER)] * 2
  rows = recipe.prepare(factories.batch(rows=4, source=source))
  assert rows.clip_low.tolist() == pytest.approx([0.5, 0.2] * 2)
  assert rows.clip_high.tolist() == pytest.approx([1.0, 0.28] * 2)
