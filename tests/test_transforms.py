import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax import compose, losses
from mrl_jax.kernels import correction
from mrl_jax.transforms import advantages, clipping, rewards, weights
from mrl_jax.types import Scores, Source
from tests import factories

NAN = float("nan")


def group(values, **options):
  count = len(values)
  batch = factories.batch(
    rows=count, samples=count, rewards=values, weights=np.ones((count, 6))
  )
  return advantages.group_advantages(**options)(batch)


@pytest.mark.parametrize("size", [3, 6, 7, 8])
@pytest.mark.parametrize("constant", [0.1, 0.3, -0.7, 123.456])
@pytest.mark.parametrize("normalize", [True, False])
def test_equal_rewards_are_degenerate(size, constant, normalize):
  batch = group([constant] * size, normalize=normalize)
  assert batch.advantages.tolist() == [0.0] * size
  assert batch.weights.all()
  assert advantages.group_statistics(batch)["degenerate"] == 1.0


def test_unscored_rows_take_no_part():
  batch = group([NAN, 1, 0, 1])
  alone = group([1, 0, 1])
  assert batch.advantages[0] == 0 and not batch.weights[0].any()
  np.testing.assert_array_equal(batch.advantages[1:], alone.advantages)
  assert batch.weights[1:].all()
  # Two thirds right: (1 - 2/3) / sqrt(1/3), by hand.
  np.testing.assert_allclose(batch.advantages[1], 0.57735, atol=1e-5)


@pytest.mark.parametrize("scored", [[], [1.0]])
def test_a_group_of_one_or_no_scored_row_is_worth_nothing(scored):
  batch = group([NAN] * (4 - len(scored)) + scored)
  assert batch.advantages.tolist() == [0.0] * 4
  assert batch.weights.any(-1).tolist() == [False] * (4 - len(scored)) + [
    True
  ] * len(scored)
  found = advantages.group_statistics(batch)
  assert all(np.isfinite(v) for v in found.values())
  assert found["unscored"] == 4 - len(scored)
  assert found["groups"] == len(scored)
  assert found["reward_max"] == sum(scored)


def test_group_statistics():
  batch = factories.batch(
    rows=8, samples=2, rewards=[1, 0, 1, 1, NAN, NAN, NAN, 0.5]
  )
  found = advantages.group_statistics(batch)
  wanted = {
    "reward": 0.7,
    "reward_min": 0.0,
    "reward_max": 1.0,
    "unscored": 3,
    "groups": 3,
    "degenerate": 2 / 3,
  }
  assert found.keys() == wanted.keys()
  for name, value in wanted.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-6)


def test_only_the_named_sources_form_the_baseline():
  source = [Source.OWN, Source.OWN, Source.PEER, Source.RESCUE]
  batch = factories.batch(
    rows=4, samples=4, rewards=[1, 0, 0, NAN], source=source
  )
  own = advantages.group_advantages(Source.OWN)(batch)
  np.testing.assert_allclose(own.advantages[:2], [0.70711, -0.70711], 1e-4)
  assert np.isnan(own.advantages[2:]).all()
  assert own.weights[3].any()  # another source's row is left alone
  both = advantages.group_advantages((Source.OWN, Source.PEER))(batch)
  np.testing.assert_allclose(both.advantages[0], 1.1547, rtol=1e-4)


def test_a_constant_baseline_serves_single_samples():
  batch = factories.batch(rows=3, samples=1, rewards=[1, 0, NAN])
  found = advantages.constant_baseline(0.25)(batch)
  assert found.advantages.tolist() == [0.75, -0.25, 0.0]
  assert not found.weights[2].any()


def test_clip_ranges_are_written_per_source():
  batch = factories.batch(rows=2, source=[Source.OWN, Source.PEER])
  apply = compose.chain(
    clipping.clip_range(0.1, 0.3), clipping.relaxed(source=Source.PEER)
  )
  found = apply(batch)
  np.testing.assert_allclose(found.clip_low, [0.1, 0.5])
  np.testing.assert_allclose(found.clip_high, [0.3, 1.0])


def test_rewards_are_clipped_and_long_completions_taxed():
  weights_ = np.arange(6)[None, :] < np.asarray([2, 4, 5, 6])[:, None]
  batch = factories.rows(weights_, rewards=[3.0, 1.0, NAN, -2.0])
  clipped = rewards.clip(-1.0, 1.0)(batch).rewards
  np.testing.assert_array_equal(clipped, [1, 1, NAN, -1])
  taxed = rewards.soft_overlong(6, 4, scale=0.5)(batch).rewards
  np.testing.assert_allclose(taxed, [3.0, 0.75, NAN, -2.5])


def loss_of(batch, values):
  """sum(weights * values), through the objective."""
  zeros = jnp.zeros_like(batch.weights)
  value = losses.objective(lambda scores, _: scores.logprobs)
  return float(value(Scores(jnp.asarray(values, jnp.float32), zeros), batch))


LONG = np.asarray([[1] + [0] * 8, [1] * 9], np.float32)


@pytest.mark.parametrize(
  ("mean", "wanted"),
  [
    (weights.token_mean(), 0.1),
    (weights.sequence_mean(), 0.5),
    (weights.constant_mean(10), 0.05),
    (weights.token_mean(scale=0.5), 0.05),
  ],
)
def test_means_of_a_short_wrong_row_and_a_long_right_one(mean, wanted):
  batch = mean(factories.rows(LONG))
  np.testing.assert_allclose(loss_of(batch, LONG * [[1], [0]]), wanted, 1e-6)


@pytest.mark.parametrize(
  "mean",
  [weights.token_mean(), weights.sequence_mean(), weights.constant_mean(9)],
)
def test_with_every_token_masked_the_loss_is_zero(mean):
  batch = mean(factories.rows(np.zeros((3, 4)), advantages=[NAN] * 3))
  assert not batch.weights.any()
  objective = losses.objective(losses.policy_gradient())
  nan = jnp.full((3, 4), NAN)
  value, gradient = jax.value_and_grad(
    lambda x: objective(Scores(x, x), batch)
  )(nan)
  assert value == 0 and not gradient.any()


@pytest.mark.parametrize("mean", [weights.token_mean, weights.sequence_mean])
@pytest.mark.parametrize("sources", [[0, 0, 2, 2], [0, 0, 0, 0], [2, 2, 2, 0]])
def test_weights_add_up_to_the_scales_of_the_sources_present(mean, sources):
  batch = factories.batch(rows=4, source=sources)
  apply = compose.chain(mean(Source.OWN), mean(Source.RESCUE, scale=0.1))
  total = float(apply(batch).weights.sum())
  wanted = 1.0 * (0 in sources) + 0.1 * (2 in sources)
  np.testing.assert_allclose(total, wanted, rtol=1e-6)


REJECT = functools.partial(correction.mis_token, low=0.5, high=2.0)
DRIFT = np.asarray([[0.1, -1.5, 0.8, -10, 0.3]], np.float32)


@pytest.mark.parametrize("behavior", [0.0, -2.0])
def test_the_place_of_a_correction_names_its_denominator(behavior):
  batch = factories.rows(
    np.ones((1, 5)),
    behavior_logprobs=np.full((1, 5), behavior),
    old_logprobs=DRIFT + behavior,
  )
  correct, mean = weights.correct(REJECT), weights.token_mean()
  kept = compose.chain(correct, mean)(batch)
  original = compose.chain(mean, correct)(batch)
  ones = np.ones((1, 5))
  np.testing.assert_allclose(loss_of(kept, ones), 1.0, rtol=1e-6)
  np.testing.assert_allclose(loss_of(original, ones), 0.4, rtol=1e-6)


def test_a_correction_that_drops_everything_leaves_a_loss_of_zero():
  batch = factories.rows(np.ones((1, 5)), old_logprobs=np.full((1, 5), 9.0))
  correct, mean = weights.correct(REJECT), weights.token_mean()
  for order in ((correct, mean), (mean, correct)):
    assert not compose.chain(*order)(batch).weights.any()


def test_a_correction_without_old_log_probs_is_refused():
  with pytest.raises(ValueError, match="old_logprobs=None"):
    jax.jit(weights.correct(REJECT))(factories.batch())


def test_a_correction_leaves_other_sources_alone():
  old = np.full((2, 3), 9.0)
  batch = factories.rows(np.ones((2, 3)), source=[0, 1], old_logprobs=old)
  found = weights.correct(REJECT, Source.OWN)(batch).weights
  assert found.tolist() == [[0] * 3, [1] * 3]


@pytest.mark.parametrize(
  ("make", "field"),
  [
    (lambda: clipping.clip_range(1.5, 0.2), "low=1.5"),
    (lambda: clipping.clip_range(0.2, -1.0), "high=-1"),
    (lambda: weights.constant_mean(0), "length=0"),
    (lambda: rewards.clip(1.0, 0.0), "low=1"),
    (lambda: rewards.soft_overlong(4, 5), "cushion=5"),
    (lambda: advantages.group_advantages(ddof=-1), "ddof=-1"),
    (lambda: losses.policy_gradient(dual_clip=0.5), "dual_clip=0.5"),
    (lambda: losses.add(), "at least one"),
  ],
)
def test_bad_arguments_are_refused_by_name(make, field):
  with pytest.raises(ValueError, match=field):
    make()


def test_a_group_mean_counts_the_prompts_without_a_row():
  """Two of four prompts have a rescue; one of them has two rows."""
  source = [Source.OWN, Source.RESCUE, Source.RESCUE] + [Source.OWN] * 3
  source += [Source.OWN, Source.RESCUE]
  rows = factories.rows(
    [[1, 1, 0]] * 2 + [[1, 0, 0]] + [[1, 1, 1]] * 5,
    source=source,
    group=[0, 0, 0, 1, 1, 2, 3, 3],
  )
  found = np.asarray(weights.group_mean(Source.RESCUE, 0.4)(rows).weights)
  np.testing.assert_allclose(found[1], [0.1 / 3, 0.1 / 3, 0], rtol=1e-6)
  np.testing.assert_allclose(found[2], [0.1 / 3, 0, 0], rtol=1e-6)
  np.testing.assert_allclose(found[7], [0.1 / 3] * 3, rtol=1e-6)
  own = np.asarray(source) == Source.OWN
  np.testing.assert_array_equal(found[own], np.asarray(rows.weights)[own])
  assert found[~own].sum() == pytest.approx(0.4 * 2 / 4)


def test_a_group_mean_of_nothing_is_nothing():
  rows = factories.rows([[1, 1], [1, 0]])
  found = weights.group_mean(Source.RESCUE)(rows)
  np.testing.assert_array_equal(found.weights, rows.weights)
