"""A token tree small enough to enumerate: every response, every prefix.

Token 0 ends a response; one of the limit's length without it is truncated,
which also ends it. A policy is a table of logits, one row for each prefix, so
expectations and their gradients are sums over all responses.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mrl_jax import compose, losses, recipes
from mrl_jax.kernels import potentials
from mrl_jax.shaping import scale as scale_lib
from mrl_jax.transforms import advantages, rows, weights
from mrl_jax.types import Batch, BatchTransform, Scores, Shaping
from tests import factories

VOCAB, LIMIT = 3, 3


class Tree(NamedTuple):
  """All L responses, at most T tokens each, over N prefixes."""

  tokens: np.ndarray  # [L, T]
  mask: np.ndarray  # [L, T] bool
  node: np.ndarray  # [L, T] the prefix before each token; 0 on padding
  nodes: int


def make() -> Tree:
  found, prefixes = [], {}
  for length in range(1, LIMIT + 1):
    for head in itertools.product(range(1, VOCAB), repeat=length - 1):
      ends = range(VOCAB) if length == LIMIT else (0,)
      found += [(*head, end) for end in ends]
  tokens = np.zeros((len(found), LIMIT), np.int32)
  node = np.zeros_like(tokens)
  for row, response in enumerate(found):
    tokens[row, : len(response)] = response
    for step in range(len(response)):
      node[row, step] = prefixes.setdefault(response[:step], len(prefixes))
  lengths = np.asarray([len(response) for response in found])
  mask = np.arange(LIMIT)[None] < lengths[:, None]
  return Tree(tokens, mask, node, len(prefixes))


TREE = make()
COUNT = len(TREE.tokens)


class Problem(NamedTuple):
  """Random rewards, potential and policy on the tree; float64."""

  rewards: np.ndarray  # [L]
  steps: np.ndarray  # [L, T] what each token might earn
  earned: np.ndarray  # [L, T] what the host says it earned: nothing
  potential: np.ndarray  # [N] g of each prefix
  logits: np.ndarray  # [N, V]


def problem(seed: int) -> Problem:
  rng = np.random.default_rng(seed)
  return Problem(
    rewards=rng.integers(0, 3, COUNT) / 2.0,
    steps=rng.normal(size=(COUNT, LIMIT)) * TREE.mask,
    earned=np.zeros((COUNT, LIMIT)),
    potential=rng.normal(size=TREE.nodes),
    logits=rng.normal(size=(TREE.nodes, VOCAB)),
  )


def logprobs(logits: jax.Array) -> jax.Array:
  """Of every token of every response [L, T]; 0 on padding."""
  table = jax.nn.log_softmax(logits, axis=-1)
  return jnp.where(TREE.mask, table[TREE.node, TREE.tokens], 0.0)


def probabilities(logits: np.ndarray) -> np.ndarray:
  """Of every response [L]."""
  with jax.enable_x64(True):
    return np.exp(np.asarray(logprobs(jnp.asarray(logits))).sum(1))


def values(potential: np.ndarray) -> np.ndarray:
  """g(s_t) along every response [L, T], as the product stores it."""
  return np.where(TREE.mask, potential[TREE.node], 0.0)


def batch(
  found: Problem,
  chosen: jax.Array,
  scale: float | jax.Array,
  read: jax.Array,
) -> Batch:
  """The group of the chosen responses, as the trainer would see it."""
  count = chosen.shape[0]
  blank = factories.batch(count, LIMIT, count)
  blank = jax.tree.map(
    lambda x: x.astype(float) if jnp.issubdtype(x.dtype, jnp.floating) else x,
    blank,
  )
  behavior = jax.lax.stop_gradient(logprobs(jnp.asarray(found.logits)))
  return blank._replace(
    tokens=jnp.asarray(TREE.tokens)[chosen],
    weights=jnp.asarray(TREE.mask, float)[chosen],
    behavior_logprobs=behavior[chosen],
    rewards=jnp.asarray(found.rewards)[chosen],
    credit=jnp.asarray(found.earned)[chosen],
    group=jnp.zeros((count,), jnp.int32),
    source=jnp.full((count,), int(rows.OWN_SAMPLES[0]), jnp.int32),
    shaping=Shaping(read[chosen], jnp.full((count,), scale)),
  )


def phi(found: Problem) -> np.ndarray:
  """phi(s_t) along every response [L, T], by the kernel."""
  with jax.enable_x64(True):
    read = jnp.asarray(values(found.potential))
    return np.asarray(potentials.telescoping(read, jnp.asarray(TREE.mask)))


def whole(found: Problem) -> np.ndarray:
  """Phi(x, y) of every response [L], by the kernel."""
  with jax.enable_x64(True):
    read = jnp.asarray(values(found.potential))
    return np.asarray(potentials.last(read, jnp.asarray(TREE.mask)))


def best(returns: np.ndarray) -> set[int]:
  """The responses of which none is better."""
  return set(np.flatnonzero(returns >= returns.max() - 1e-12).tolist())


# Recipes, and the gradients that they expect.

ALPHA = 0.7
RULE = scale_lib.Rule("token", ALPHA)
CONSTANT = weights.constant_mean(LIMIT)


# What is made once is compiled once, for all problems.
@functools.cache
def grpo(
  reduction: BatchTransform = CONSTANT, loss=None, normalize=True, process=None
) -> recipes.Recipe:
  """GRPO, or Dr.GRPO, as a run would make it."""
  return recipes.grpo(
    loss=loss or losses.policy_gradient(),
    reduction=reduction,
    advantage=advantages.group_advantages(normalize=normalize),
    process=process,
  )


@functools.cache
def shaped(base: recipes.Recipe, rule: scale_lib.Rule = RULE) -> recipes.Recipe:
  """MeRLa on a base."""
  return recipes.merla(base, rule)


@functools.cache
def by_hand(write) -> recipes.Recipe:
  """GRPO whose tokens are shaped by `write`: (batch, phi, mask) -> [B, T]."""

  def shape(rows_: Batch) -> Batch:
    mask = rows_.weights != 0
    along = potentials.telescoping(rows_.shaping.potentials, mask)
    credit = ALPHA / rows_.shaping.scale[:, None] * write(rows_, along, mask)
    return rows_._replace(credit=jnp.where(mask, credit, 0.0))

  plain = grpo()
  return plain._replace(prepare=compose.chain(plain.prepare, shape))


@functools.cache
def _compiled(recipe: recipes.Recipe):
  """(logits, problem, scale, chosen [K, 2]) -> a gradient for each pair."""

  def cost(logits, found, scale, chosen):
    scores = logprobs(logits)[chosen]
    read = jnp.where(TREE.mask, found.potential[TREE.node], 0.0)
    rows_ = recipe.prepare(batch(found, chosen, scale, read))
    return losses.objective(recipe.loss)(
      Scores(scores, jnp.zeros_like(scores)), rows_
    )

  return jax.jit(jax.vmap(jax.grad(cost), (None, None, None, 0)))


def _gradients(
  found: Problem, recipe: recipes.Recipe, scale: float
) -> tuple[np.ndarray, np.ndarray]:
  """Of every pair of responses, and the chance of drawing it."""
  pairs = np.asarray(list(itertools.product(range(COUNT), repeat=2)))
  with jax.enable_x64(True):
    moved = jax.tree.map(jnp.asarray, found)
    each = _compiled(recipe)(moved.logits, moved, scale, jnp.asarray(pairs))
  chances = probabilities(found.logits)
  return np.asarray(each), chances[pairs[:, 0]] * chances[pairs[:, 1]]


def expected_gradient(
  found: Problem, recipe: recipes.Recipe, scale: float = 0.5
) -> np.ndarray:
  """E of the loss's gradient over all groups of two samples [N, V].

  Exact: every pair of responses, weighted by the chance of drawing it from
  the policy itself.
  """
  each, chances = _gradients(found, recipe, scale)
  return (chances[:, None, None] * each).sum(0)


def change(
  found: Problem, plain: recipes.Recipe, shaped: recipes.Recipe
) -> float:
  """How far the expected gradients lie apart, relative to their size."""
  one, other = (expected_gradient(found, r) for r in (plain, shaped))
  return float(np.abs(other - one).max() / np.abs(one).max())


def second_moment(
  found: Problem, recipe: recipes.Recipe, scale: float = 0.5
) -> float:
  """E |gradient|^2 over all groups of two samples."""
  each, chances = _gradients(found, recipe, scale)
  return float(chances @ (each**2).sum((1, 2)))
