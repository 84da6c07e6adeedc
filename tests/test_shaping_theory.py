"""What shaping by a potential may change, by exhaustive enumeration.

All in float64, on a tree of 15 responses, through the recipes, transforms
and losses that training uses. Beside the laws, `test_shaping_controls` breaks
one condition of each.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax import losses
from mrl_jax.transforms import advantages, shaping
from tests import shaping_tree as tree

SEEDS = range(5)
MASK = tree.TREE.mask


def rewards_of(phi):
  """F_t = phi(s_t+1) - phi(s_t) along every response [L, T]."""
  after = np.concatenate([phi[:, 1:], np.zeros((len(phi), 1))], axis=1)
  return np.where(MASK, after - phi, 0.0)


def to_go(rewards):
  return np.cumsum(rewards[:, ::-1], axis=1)[:, ::-1]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_added_along_a_response_adds_up_to_nothing(seed):
  phi = tree.phi(tree.problem(seed))
  assert not phi[:, 0].any() and not phi[~MASK].any()
  assert np.abs(rewards_of(phi).sum(1)).max() < 1e-14


@pytest.mark.parametrize("seed", SEEDS)
def test_the_return_to_go_is_lowered_by_the_potential(seed):
  """For rewards of the end and of every step alike."""
  found = tree.problem(seed)
  phi = tree.phi(found)
  outcome = np.zeros(MASK.shape)
  outcome[np.arange(tree.COUNT), MASK.sum(1) - 1] = found.rewards
  for earned in (outcome, found.steps, outcome + found.steps):
    shaped = to_go(earned + tree.ALPHA * rewards_of(phi))
    want = to_go(earned) - tree.ALPHA * phi
    assert np.abs((shaped - want)[MASK]).max() < 1e-13


def test_the_transform_writes_that_return_to_go():
  found = tree.problem(0)
  with jax.enable_x64(True):
    values = jnp.asarray(tree.values(found.potential))
    rows = tree.batch(found, jnp.arange(tree.COUNT), 0.5, values)
    credit = np.asarray(shaping.shape_tokens(tree.ALPHA)(rows).credit)
  want = to_go(tree.ALPHA / 0.5 * rewards_of(tree.phi(found)))
  assert np.abs((credit - want)[MASK]).max() < 1e-13
  assert np.abs(want).max() > 0.1


# Optima.


def tilted(reference, returns, beta):
  """argmax_pi E[R] - beta KL(pi || reference), and the maximum.

  It is reference exp(R / beta) / Z, and beta log Z.
  """
  logs = np.log(reference) + returns / beta
  top = logs.max()
  log_total = top + np.log(np.exp(logs - top).sum())
  return np.exp(logs - log_total), beta * log_total


@pytest.mark.parametrize("seed", SEEDS)
def test_token_shaping_moves_no_optimum(seed):
  found = tree.problem(seed)
  added = tree.ALPHA * rewards_of(tree.phi(found)).sum(1)
  shaped = found.rewards + added
  assert tree.best(shaped) == tree.best(found.rewards)
  reference = tree.probabilities(found.logits)
  for beta in (0.05, 1.0):
    one, _ = tilted(reference, shaped, beta)
    other, _ = tilted(reference, found.rewards, beta)
    assert np.abs(one - other).max() < 1e-12


def loss_of(reference, rewards, phi, alpha, beta):
  """What the KL-soft optimum of the shaped reward loses of the true one.

  pi' is worth its shaped value less alpha E_pi' Phi.
  """
  _, most = tilted(reference, rewards, beta)
  policy, value = tilted(reference, rewards + alpha * phi, beta)
  return most - (value - alpha * policy @ phi)


def bounds(phi, alpha, beta):
  """2 a d and (a d)^2 / (2 beta), d half of max - min of Phi."""
  reach = alpha * (phi.max() - phi.min()) / 2
  return 2 * reach, reach**2 / (2 * beta)


def test_what_is_lost_is_value():
  """The closed form above against the objective's own definition."""
  found = tree.problem(0)
  reference, phi = tree.probabilities(found.logits), tree.whole(found)

  def value(policy):
    return policy @ (found.rewards - 0.3 * np.log(policy / reference))

  one, _ = tilted(reference, found.rewards, 0.3)
  other, _ = tilted(reference, found.rewards + 0.5 * phi, 0.3)
  lost = loss_of(reference, found.rewards, phi, 0.5, 0.3)
  assert lost == pytest.approx(value(one) - value(other), rel=1e-12)
  rng = np.random.default_rng(0)
  near = one * np.exp(0.1 * rng.normal(size=(100, tree.COUNT)))
  for policy in near / near.sum(1, keepdims=True):
    assert value(policy) < value(one)


def test_sequence_shaping_loses_at_most_its_bounds():
  shares = []
  for seed in range(200):
    found = tree.problem(seed)
    reference = tree.probabilities(found.logits)
    phi = tree.whole(found)
    rng = np.random.default_rng(seed)
    alpha, beta = 10 ** rng.uniform(-2, 1), 10 ** rng.uniform(-2, 1)
    lost = loss_of(reference, found.rewards, phi, alpha, beta)
    most = min(bounds(phi, alpha, beta))
    assert -1e-12 <= lost <= most + 1e-12
    shares.append(lost / most)
  assert max(shares) > 0.5  # unlike token shaping, it does move the optimum


def test_both_bounds_are_nearly_reached():
  """So neither would hold with a smaller d, nor with a quarter of it."""
  even, phi = np.asarray([0.5, 0.5]), np.asarray([1.0, -1.0])
  hard, _ = bounds(phi, 1.0, 1e-4)
  lost = loss_of(even, np.asarray([0.0, 1.99]), phi, alpha=1.0, beta=1e-4)
  assert 0.99 * hard < lost <= hard
  _, soft = bounds(phi, 0.01, 1.0)
  lost = loss_of(even, np.zeros(2), phi, alpha=0.01, beta=1.0)
  assert 0.99 * soft < lost <= soft


def test_bounded_shaping_can_only_drop_best_responses():
  gap, bound = 0.5, 1.0  # rewards are 0, 1/2 and 1
  shape = functools.partial(shaping.shape_bounded, bound=bound, gap=gap)
  shrunk = 0
  for seed in range(100):
    found = tree.problem(seed)
    potential = np.clip(found.potential, -bound, bound)
    found = found._replace(potential=potential)
    with jax.enable_x64(True):
      values = jnp.asarray(tree.values(potential))
      rows = tree.batch(found, jnp.arange(tree.COUNT), 1.0, values)
      shaped = np.asarray(shape(0.24)(rows).rewards)
    assert tree.best(shaped) <= tree.best(found.rewards)
    shrunk += tree.best(shaped) < tree.best(found.rewards)
  assert shrunk > 50  # and it tells equally good ones apart


def test_responses_that_are_equally_good_teach_where_the_reward_is_shaped():
  found = tree.problem(0)._replace(rewards=np.ones(tree.COUNT))
  bounded = tree.RULE._replace(mode="bounded", alpha=0.4)
  plain = tree.expected_gradient(found, tree.grpo())
  assert not plain.any()
  for rule, teaches in ((tree.RULE, False), (bounded, True)):
    shaped = tree.shaped(tree.grpo(), rule)
    got = tree.expected_gradient(found, shaped)
    assert (np.abs(got).max() > 1e-2) == teaches
    assert teaches or np.abs(got).max() < 1e-13


# The expected on-policy gradient.


def unchanged(found, plain):
  return tree.change(found, plain, tree.shaped(plain, tree.RULE)) < 1e-12


@pytest.mark.parametrize("seed", SEEDS)
def test_token_shaping_leaves_the_expected_gradient_alone(seed):
  assert unchanged(tree.problem(seed), tree.grpo())


@pytest.mark.parametrize(
  "loss",
  [
    losses.cispo(),
    losses.reinforce(),
    losses.policy_gradient(3.0),
    losses.gspo(),
  ],
)
def test_under_every_loss_per_token(loss):
  assert unchanged(tree.problem(1), tree.grpo(loss=loss))


def test_under_advantages_that_are_not_divided():
  assert unchanged(tree.problem(1), tree.grpo(normalize=False))


@pytest.mark.parametrize("against", ["return", "to_go"])
def test_beside_what_every_step_earned(against):
  found = tree.problem(2)
  found = found._replace(rewards=found.steps.sum(1), earned=found.steps)
  process = advantages.return_to_go(against=against)
  plain = tree.grpo(process=process)
  assert unchanged(found, plain)
  assert tree.change(found, tree.grpo(), plain) > 1e-3  # the steps are seen


def test_it_does_change_the_gradient_of_a_sample():
  """Else the laws above would say nothing."""
  found, plain = tree.problem(0), tree.grpo()
  shaped = tree.shaped(plain, tree.RULE)
  before = tree.second_moment(found, plain)
  assert abs(tree.second_moment(found, shaped) / before - 1) > 0.01


def test_a_good_potential_lowers_the_variance_of_the_gradient():
  """The value of each prefix as potential: a baseline like a critic's."""
  found = tree.problem(2)
  chances = tree.probabilities(found.logits)
  value = np.zeros(tree.TREE.nodes)
  for node in range(tree.TREE.nodes):
    through = ((tree.TREE.node == node) & MASK).any(1)
    value[node] = (chances * found.rewards)[through].sum()
    value[node] /= chances[through].sum()
  found = found._replace(potential=value)

  def spread(alpha):
    """E |grad|^2 of Dr.GRPO over pairs; its mean does not depend on alpha."""
    rule = tree.RULE._replace(alpha=alpha)
    recipe = tree.shaped(tree.grpo(normalize=False), rule)
    return tree.second_moment(found, recipe, scale=1.0)

  assert spread(1.0) < 0.97 * spread(0.0)
