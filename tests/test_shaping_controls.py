"""Each condition of shaping's laws, broken: the law must be seen to fail."""

import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax.kernels import potentials
from mrl_jax.transforms import shaping, weights
from tests import shaping_tree as tree

MARGIN = 0.05  # of the gradient's size; where the laws hold, 1e-15 is left
EVERY = pytest.mark.parametrize("seed", range(5))


def later(phi):
  """phi(s_t+1), 0 at the end."""
  return jnp.concatenate([phi[:, 1:], jnp.zeros_like(phi[:, :1])], axis=1)


def as_it_should_be(batch, phi, mask):
  return -phi


def with_a_potential_of_the_end(batch, phi, mask):
  return potentials.last(batch.shaping.potentials, mask)[:, None] - phi


def with_a_discount_that_the_return_does_not_have(batch, phi, mask):
  added = jnp.where(mask, 0.9 * later(phi) - phi, 0.0)
  return jnp.cumsum(added[:, ::-1], axis=1)[:, ::-1]


def having_seen_the_token(batch, phi, mask):
  return -later(phi)


def divided_by_this_batch_s_own_deviation(batch, phi, mask):
  own = jnp.std(batch.rewards, ddof=1)
  return -phi * batch.shaping.scale[0] / (own + 0.1)


def moved(seed, write):
  """What shaping tokens by hand does to the expected gradient."""
  return tree.change(tree.problem(seed), tree.grpo(), tree.by_hand(write))


@EVERY
def test_by_hand_the_law_holds(seed):
  """So that it is what they change that makes the controls fail."""
  assert moved(seed, as_it_should_be) < 1e-12


@EVERY
@pytest.mark.parametrize(
  "write",
  [
    with_a_potential_of_the_end,
    with_a_discount_that_the_return_does_not_have,
    having_seen_the_token,
    divided_by_this_batch_s_own_deviation,
  ],
)
def test_the_gradient_moves(seed, write):
  assert moved(seed, write) > MARGIN


def test_a_potential_of_the_end_moves_the_best_response():
  """What is added no longer cancels: it is the potential of the end."""
  found = tree.problem(0)
  phi = np.pad(tree.phi(found), ((0, 0), (0, 1)))
  rows, lengths = np.arange(tree.COUNT), tree.TREE.mask.sum(1)
  phi[rows, lengths] = tree.whole(found)
  added = np.diff(phi, axis=1) * tree.TREE.mask
  assert np.abs(added.sum(1)).max() > 0.1
  shaped = found.rewards + tree.ALPHA * added.sum(1)
  assert tree.best(shaped) != tree.best(found.rewards)


@EVERY
@pytest.mark.parametrize(
  "reduction", [weights.sequence_mean(), weights.token_mean()]
)
def test_a_reduction_that_divides_by_lengths(seed, reduction):
  plain = tree.grpo(reduction)
  shaped = tree.shaped(plain, tree.RULE)
  assert tree.change(tree.problem(seed), plain, shaped) > MARGIN


@EVERY
def test_shaping_the_sequence_moves_the_gradient(seed):
  shaped = tree.shaped(tree.grpo(), tree.RULE._replace(mode="sequence"))
  assert tree.change(tree.problem(seed), tree.grpo(), shaped) > MARGIN


def test_beyond_its_condition_a_worse_response_overtakes():
  with pytest.raises(ValueError, match="2 alpha bound must be below"):
    shaping.shape_bounded(0.26, 1.0, 0.5)
  overtaken = 0
  for seed in range(100):
    found = tree.problem(seed)
    found = found._replace(potential=np.clip(found.potential, -1, 1))
    shaped = found.rewards + 0.5 * tree.whole(found)
    overtaken += not tree.best(shaped) <= tree.best(found.rewards)
  assert overtaken > 4
