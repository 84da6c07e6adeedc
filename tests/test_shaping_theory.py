"""What shaping by a potential may change, by exhaustive enumeration.

All in float64, on a tree of 15 responses, through the transforms, reductions
and losses that training uses. Every law has controls: the same with one
condition broken, which must then be seen to fail.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax import compose, losses
from mrl_jax.kernels import potentials
from mrl_jax.transforms import advantages, clipping, shaping, weights
from tests import shaping_tree as tree

SEEDS = range(5)
ALPHA = 0.7
MASK = tree.TREE.mask


def phi_of(found):
  with jax.enable_x64(True):
    values = jnp.asarray(tree.values(found.potential))
    return np.asarray(potentials.telescoping(values, jnp.asarray(MASK)))


def rewards_of(phi, gamma=1.0, terminal=None):
  """F_t = gamma phi(s_t+1) - phi(s_t) along every response [L, T]."""
  after = np.concatenate([phi[:, 1:], np.zeros((len(phi), 1))], axis=1)
  if terminal is not None:
    last = MASK.sum(1) - 1
    after[np.arange(len(phi)), last] = terminal
  return np.where(MASK, gamma * after - phi, 0.0)


def to_go(rewards):
  return np.cumsum(rewards[:, ::-1], axis=1)[:, ::-1]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_added_along_a_response_adds_up_to_nothing(seed):
  phi = phi_of(tree.problem(seed))
  assert not phi[:, 0].any() and not phi[~MASK].any()
  assert np.abs(rewards_of(phi).sum(1)).max() < 1e-14


def test_a_potential_of_the_end_does_not_add_up_to_nothing():
  found = tree.problem(0)
  end = np.random.default_rng(1).normal(size=tree.COUNT)
  total = rewards_of(phi_of(found), terminal=end).sum(1)
  assert np.abs(total).max() > 0.1


@pytest.mark.parametrize("seed", SEEDS)
def test_the_return_to_go_is_lowered_by_the_potential(seed):
  """For rewards of the end and of every step alike."""
  found = tree.problem(seed)
  phi = phi_of(found)
  outcome = np.zeros(MASK.shape)
  outcome[np.arange(tree.COUNT), MASK.sum(1) - 1] = found.rewards
  for earned in (outcome, found.steps, outcome + found.steps):
    shaped = to_go(earned + ALPHA * rewards_of(phi))
    want = to_go(earned) - ALPHA * phi
    assert np.abs((shaped - want)[MASK]).max() < 1e-13


def test_the_transform_writes_that_return_to_go():
  found = tree.problem(0)
  with jax.enable_x64(True):
    values = jnp.asarray(tree.values(found.potential))
    rows = tree.batch(found, jnp.arange(tree.COUNT), 0.5, values)
    credit = np.asarray(shaping.shape_tokens(ALPHA)(rows).credit)
  want = to_go(ALPHA / 0.5 * rewards_of(phi_of(found)))
  assert np.abs((credit - want)[MASK]).max() < 1e-13


# Optima.


def best(returns):
  return set(np.flatnonzero(returns >= returns.max() - 1e-12))


def tilted(reference, returns, beta):
  """argmax_pi E[R] - beta KL(pi || reference): reference exp(R / beta)."""
  found = np.log(reference) + returns / beta
  found = np.exp(found - found.max())
  return found / found.sum()


def soft_value(policy, reference, returns, beta):
  apart = np.where(policy > 0, np.log(policy / reference), 0.0)
  return policy @ (returns - beta * apart)


@pytest.mark.parametrize("seed", SEEDS)
def test_token_shaping_moves_no_optimum(seed):
  found = tree.problem(seed)
  shaped = found.rewards + ALPHA * rewards_of(phi_of(found)).sum(1)
  assert best(shaped) == best(found.rewards)
  reference = tree.probabilities(found.logits)
  for beta in (0.05, 1.0):
    one = tilted(reference, shaped, beta)
    assert np.abs(one - tilted(reference, found.rewards, beta)).max() < 1e-12


def whole(found):
  """Phi(x, y) of every response, by the kernel."""
  with jax.enable_x64(True):
    values = jnp.asarray(tree.values(found.potential))
    return np.asarray(potentials.last(values, jnp.asarray(MASK)))


def loss_of(reference, rewards, phi, alpha, beta):
  """What the KL-soft optimum of the shaped reward loses of the true one."""
  one = tilted(reference, rewards, beta)
  other = tilted(reference, rewards + alpha * phi, beta)
  return soft_value(one, reference, rewards, beta) - soft_value(
    other, reference, rewards, beta
  )


def test_sequence_shaping_loses_at_most_its_bounds():
  """min(2 a d, (a d)^2 / (2 beta)), d half of max - min of Phi."""
  moved = []
  for seed in range(200):
    found = tree.problem(seed)
    reference = tree.probabilities(found.logits)
    phi = whole(found)
    d = (phi.max() - phi.min()) / 2
    rng = np.random.default_rng(seed)
    alpha, beta = 10 ** rng.uniform(-2, 1), 10 ** rng.uniform(-2, 1)
    lost = loss_of(reference, found.rewards, phi, alpha, beta)
    bound = min(2 * alpha * d, (alpha * d) ** 2 / (2 * beta))
    assert -1e-12 <= lost <= bound + 1e-12
    moved.append(lost)
  assert max(moved) > 0.5  # unlike token shaping, it does move the optimum


def test_both_bounds_are_nearly_reached():
  """So neither would hold with a smaller d, nor with a quarter of it."""
  even = np.asarray([0.5, 0.5])
  phi = np.asarray([1.0, -1.0])  # d is 1
  rewards = np.asarray([0.0, 1.99])
  hard = loss_of(even, rewards, phi, alpha=1.0, beta=1e-4)
  assert 0.99 * 2 < hard <= 2
  soft = loss_of(even, np.zeros(2), phi, alpha=0.01, beta=1.0)
  assert 0.99 * 0.01**2 / 2 < soft <= 0.01**2 / 2


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
    assert best(shaped) <= best(found.rewards)
    shrunk += best(shaped) < best(found.rewards)
  assert shrunk > 50  # and it tells equally good ones apart


def test_beyond_its_condition_a_worse_response_overtakes():
  with pytest.raises(ValueError, match="2 alpha bound must be below"):
    shaping.shape_bounded(0.26, 1.0, 0.5)
  overtaken = 0
  for seed in range(100):
    found = tree.problem(seed)
    found = found._replace(potential=np.clip(found.potential, -1, 1))
    shaped = found.rewards + 0.5 * whole(found)
    overtaken += not best(shaped) <= best(found.rewards)
  assert overtaken


# The expected on-policy gradient.


def prepare(reduction, shape=None, shape_first=None):
  """GRPO's transforms in their order."""
  nothing = compose.chain()
  return compose.chain(
    shape_first or nothing,
    advantages.group_advantages(),
    clipping.clip_range(0.2, 0.28),
    reduction,
    shape or nothing,
  )


CONSTANT = weights.constant_mean(tree.LIMIT)


def change(found, shape, reduction=CONSTANT, loss=None):
  """How far the expected gradient moves, relative to its size."""
  cost = losses.objective(loss or losses.policy_gradient())
  plain = tree.expected_gradient(found, prepare(reduction), cost)
  shaped = tree.expected_gradient(found, prepare(reduction, shape), cost)
  return np.abs(shaped - plain).max() / np.abs(plain).max()


def own_credit(write):
  """A shaping of tokens by any [B, T] function of phi, over S."""

  def apply(batch):
    mask = batch.weights != 0
    phi = potentials.telescoping(batch.shaping.potentials, mask)
    credit = ALPHA / batch.shaping.scale[:, None] * write(batch, phi, mask)
    return batch._replace(credit=jnp.where(mask, credit, 0.0))

  return apply


@pytest.mark.parametrize("seed", SEEDS)
def test_token_shaping_leaves_the_expected_gradient_alone(seed):
  assert change(tree.problem(seed), shaping.shape_tokens(ALPHA)) < 1e-12


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
  found = tree.problem(1)
  assert change(found, shaping.shape_tokens(ALPHA), loss=loss) < 1e-12


def test_it_does_change_the_gradient_of_a_sample():
  """Else the law above would say nothing."""
  found = tree.problem(0)
  with jax.enable_x64(True):
    values = jnp.asarray(tree.values(found.potential))
    rows = tree.batch(found, jnp.asarray([3, 8]), 0.5, values)
    credit = shaping.shape_tokens(ALPHA)(rows).credit
  assert np.abs(np.asarray(credit)).max() > 0.1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
  "reduction", [weights.sequence_mean(), weights.token_mean()]
)
def test_control_a_reduction_that_divides_by_lengths(seed, reduction):
  found = tree.problem(seed)
  shape = shaping.shape_tokens(ALPHA)
  assert change(found, shape, reduction=reduction) > 1e-3


@pytest.mark.parametrize("seed", SEEDS)
def test_control_a_potential_of_the_end(seed):
  def write(batch, phi, mask):
    ended = potentials.last(batch.shaping.potentials, mask)
    return ended[:, None] - phi

  assert change(tree.problem(seed), own_credit(write)) > 1e-2


@pytest.mark.parametrize("seed", SEEDS)
def test_control_a_discount_that_the_return_does_not_have(seed):
  def write(batch, phi, mask):
    after = jnp.concatenate([phi[:, 1:], jnp.zeros_like(phi[:, :1])], axis=1)
    added = jnp.where(mask, 0.9 * after - phi, 0.0)
    return jnp.cumsum(added[:, ::-1], axis=1)[:, ::-1]

  assert change(tree.problem(seed), own_credit(write)) > 1e-3


@pytest.mark.parametrize("seed", SEEDS)
def test_control_a_potential_that_has_seen_the_token(seed):
  def write(batch, phi, mask):
    ahead = jnp.concatenate([phi[:, 1:], jnp.zeros_like(phi[:, :1])], axis=1)
    return -jnp.where(mask, ahead, 0.0)

  assert change(tree.problem(seed), own_credit(write)) > 1e-2


@pytest.mark.parametrize("seed", SEEDS)
def test_control_dividing_by_this_batch_s_own_deviation(seed):
  def write(batch, phi, mask):
    own = jnp.std(batch.rewards, ddof=1)
    return -phi * batch.shaping.scale[0] / (own + 0.1)

  assert change(tree.problem(seed), own_credit(write)) > 1e-3


@pytest.mark.parametrize("seed", SEEDS)
def test_control_shaping_the_sequence_moves_the_gradient(seed):
  found = tree.problem(seed)
  cost = losses.objective(losses.policy_gradient())
  plain = tree.expected_gradient(found, prepare(CONSTANT), cost)
  first = shaping.shape_sequence(ALPHA)
  shaped = tree.expected_gradient(
    found, prepare(CONSTANT, shape_first=first), cost
  )
  assert np.abs(shaped - plain).max() / np.abs(plain).max() > 1e-2


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
    transform = compose.chain(
      advantages.group_advantages(normalize=False),
      clipping.clip_range(0.2, 0.28),
      CONSTANT,
      shaping.shape_tokens(alpha),
    )
    cost = losses.objective(losses.policy_gradient())
    return tree.second_moment(found, transform, cost, scale=1.0)

  assert spread(1.0) < 0.97 * spread(0.0)
