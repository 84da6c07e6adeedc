"""Laws that hold between kernels, transforms and losses, whatever the data."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax import compose, diagnostics, losses
from mrl_jax.kernels import correction, logprobs
from mrl_jax.transforms import advantages, clipping, weights
from mrl_jax.types import Batch, Distribution, Scores
from tests import factories

MEANS = {
  "token": weights.token_mean(),
  "sequence": weights.sequence_mean(),
  "constant": weights.constant_mean(6),
}
LOSSES = {
  "policy_gradient": losses.policy_gradient(3.0),
  "gspo": losses.gspo(),
  "cispo": losses.cispo(),
  "reinforce": losses.reinforce(),
  "kl": losses.add((1.0, losses.reinforce()), (0.1, losses.kl())),
}
# Every loss and every mean, not every pair.
PAIRS = pytest.mark.parametrize(
  ("loss", "mean"),
  [
    ("policy_gradient", "token"),
    ("gspo", "sequence"),
    ("cispo", "constant"),
    ("kl", "token"),
  ],
)


def grpo(mean):
  return compose.chain(
    advantages.group_advantages(),
    clipping.clip_range(0.2, 0.28),
    weights.correct(correction.m2po),
    mean,
    weights.correct(correction.tis_token),
  )


def draw(seed=0, rows=16) -> tuple[Scores, Batch]:
  """Groups of 4, one unscored row, old and reference log-probs."""
  rng = np.random.default_rng(seed)
  rewards = rng.integers(2, size=rows).astype(np.float32)
  rewards[rng.integers(rows)] = np.nan
  batch = factories.batch(
    rows=rows,
    samples=4,
    seed=seed,
    rewards=rewards,
    ref_logprobs=-rng.exponential(size=(rows, 6)),
  )
  said = factories.scores(batch, seed)
  old = factories.scores(batch, seed + 1).logprobs
  return said, batch._replace(old_logprobs=old)


@functools.cache
def compiled(loss, mean):
  def f(logprobs, entropies, batch):
    value = losses.objective(LOSSES[loss])
    return value(Scores(logprobs, entropies), grpo(MEANS[mean])(batch))

  return jax.jit(jax.value_and_grad(f))


def step(loss, mean, scores, batch):
  """Value and gradient of one whole update, advantages included."""
  return compiled(loss, mean)(*scores, batch)


def close(found, wanted, atol=1e-6):
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=atol),
    found,
    wanted,
  )


def test_the_empty_chain_is_the_identity_and_chains_associate():
  _, batch = draw()
  assert compose.chain()(batch) is batch
  a, b, c = (
    advantages.group_advantages(),
    clipping.clip_range(0.1, 0.2),
    weights.token_mean(),
  )
  left = compose.chain(compose.chain(a, b), c)(batch)
  right = compose.chain(a, compose.chain(b, c), compose.chain())(batch)
  jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.parametrize("loss", ["policy_gradient", "gspo", "cispo"])
def test_on_policy_every_ratio_loss_has_reinforces_gradient(loss):
  for seed in range(5):
    _, batch = draw(seed)
    batch = batch._replace(old_logprobs=batch.behavior_logprobs)
    said = Scores(batch.behavior_logprobs, jnp.zeros_like(batch.weights))
    wanted = step("reinforce", "token", said, batch)[1]
    close(step(loss, "token", said, batch)[1], wanted)
    assert np.isfinite(wanted).all() and wanted.any()


@PAIRS
def test_microbatch_sums_are_the_whole(loss, mean):
  scores, batch = draw(1)
  wanted = step(loss, mean, scores, batch)
  prepared = jax.jit(grpo(MEANS[mean]))(batch)
  one = jax.jit(jax.value_and_grad(losses.objective(LOSSES[loss])))
  for count in (2, 16):
    value, gradient = 0.0, np.zeros((16, 6), np.float32)
    for i in range(count):
      part = jax.tree.map(lambda x, i=i, c=count: x[i::c], (scores, prepared))
      v, g = one(*part)
      value += v
      gradient[i::count] = g.logprobs
    close((value, gradient), wanted)


@PAIRS
def test_rows_and_groups_may_come_in_any_order(loss, mean):
  scores, batch = draw(2)
  value, gradient = step(loss, mean, scores, batch)
  order = np.random.default_rng(0).permutation(16)
  names = jnp.asarray([9, 3, 15, 0])
  mixed = jax.tree.map(lambda x: x[order], batch)
  mixed = mixed._replace(group=names[mixed.group])
  said = jax.tree.map(lambda x: x[order], scores)
  found = step(loss, mean, said, mixed)
  close(found, (value, gradient[order]))


@PAIRS
def test_padding_changes_nothing(loss, mean):
  """Neither more padding at the end of rows nor rows that are padding."""
  scores, batch = draw(3)
  value, gradient = step(loss, mean, scores, batch)

  def pad(x):
    if x.ndim == 1:
      return jnp.pad(x, (0, 4))
    return jnp.pad(x, ((0, 4), (0, 3 if x.shape[1] == 6 else 0)))

  padded = jax.tree.map(pad, batch)
  padded = padded._replace(
    group=padded.group.at[16:].set(19),
    rewards=padded.rewards.at[16:].set(jnp.nan),
  )
  said = jax.tree.map(pad, scores)
  found, moved = step(loss, mean, said, padded)
  close((found, moved[:16, :6]), (value, gradient))
  assert not moved[16:].any() and not moved[:, 6:].any()


def mesh(shape=(8,), names=("data",)):
  kinds = (jax.sharding.AxisType.Auto,) * len(shape)
  return jax.make_mesh(shape, names, axis_types=kinds)


@pytest.mark.parametrize(
  ("loss", "mean"), [("policy_gradient", "token"), ("gspo", "sequence")]
)
def test_eight_devices_give_what_one_gives(loss, mean):
  """With every group spread over devices that it does not divide."""
  scores, batch = draw(4, rows=24)
  order = np.random.default_rng(1).permutation(24)
  scores, batch = jax.tree.map(lambda x: x[order], (scores, batch))

  def run(scores, batch):
    prepared = grpo(MEANS[mean])(batch)
    return (
      step(loss, mean, scores, batch),
      prepared.advantages,
      prepared.weights,
      diagnostics.measure(scores, prepared),
      advantages.group_statistics(batch),
    )

  wanted = jax.jit(run)(scores, batch)
  spread = jax.sharding.NamedSharding(
    mesh(), jax.sharding.PartitionSpec("data")
  )
  found = jax.jit(run)(*jax.device_put((scores, batch), spread))
  close(found, wanted)


@pytest.mark.parametrize(
  "distribution", [Distribution(), Distribution(0.7, 7, 0.8)]
)
def test_the_scorer_shards_over_rows_and_vocabulary(distribution):
  rng = np.random.default_rng(0)
  hidden, unembedding = (
    jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((8, 5, 6), (16, 6))
  )
  tokens = jnp.asarray(rng.integers(16, size=(8, 5)), jnp.int32)
  allowed = jnp.arange(16) != 3

  def run(hidden, unembedding):
    def f(*args):
      out = logprobs.score(*args, tokens, allowed, distribution, 200)
      return (out.logprobs + 0.1 * out.entropies).sum(), out

    return jax.value_and_grad(f, (0, 1), has_aux=True)(hidden, unembedding)

  wanted = jax.jit(run)(hidden, unembedding)
  grid = mesh((2, 2, 2), ("data", "fsdp", "tensor"))

  def put(x, *axes):
    spec = jax.sharding.PartitionSpec(*axes)
    return jax.device_put(x, jax.sharding.NamedSharding(grid, spec))

  with jax.set_mesh(grid):
    found = jax.jit(run)(
      put(hidden, ("data", "fsdp")), put(unembedding, "tensor", "fsdp")
    )
  close(found, wanted, atol=1e-5)


def test_no_device_ever_holds_all_logits():
  """The compiled step has no array of B x T x V elements."""
  shape = jax.ShapeDtypeStruct

  def f(hidden, unembedding, tokens):
    out = logprobs.score(
      hidden, unembedding, tokens, jnp.ones(512, bool), Distribution(), 1 << 16
    )
    return out.logprobs.sum() + out.entropies.sum()

  compiled = jax.jit(jax.grad(f, (0, 1))).lower(
    shape((4, 256, 8), jnp.float32),
    shape((512, 8), jnp.float32),
    shape((4, 256), jnp.int32),
  )
  used = compiled.compile().memory_analysis().temp_size_in_bytes
  assert used < 4 * 256 * 512 * 4 / 4
