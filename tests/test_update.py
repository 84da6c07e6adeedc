"""One optimiser step: exact under any split, mesh and sharing of prompts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax import collate, compose, losses, records
from mrl_jax.model import spec as spec_lib
from mrl_jax.model import transformer
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.parallel import sharding
from mrl_jax.train import state as state_lib
from mrl_jax.train import update as update_lib
from mrl_jax.transforms import advantages, clipping, weights
from mrl_jax.types import Distribution

VOCAB, SAMPLES, PROMPTS = 23, 4, 8
OPTIONS = {
  "allowed": np.ones(VOCAB, bool),
  "distribution": Distribution(temperature=0.9),
}


@functools.cache
def model():
  config = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
  }
  return transformer.make(spec_lib.from_config(config))


def params():
  return model().init(jax.random.key(0))


def batch(seed=0):
  rng = np.random.default_rng(seed)
  rows = []
  for prompt in range(PROMPTS):
    context = tuple(rng.integers(0, VOCAB, 3 + prompt).tolist())
    for sample in range(SAMPLES):
      length = int(rng.integers(1, 14))
      rows.append(
        records.Rollout(
          prompt_id=str(prompt),
          sample=sample,
          prompt="",
          context=context,
          tokens=rng.integers(0, VOCAB, length).astype(np.int32),
          logprobs=rng.normal(-3, 0.3, length).astype(np.float32),
          entropies=np.zeros(length, np.float32),
          finished=True,
          text="",
          answer="",
          reward=float(rng.integers(0, 2)),
          outcome="",
        )
      )
  return collate.batch(rows)


def step(mesh, rows, microbatches=1, share=1, updates=1):
  """The state and report after `updates` steps on the same batch."""
  optimizer = state_lib.make_optimizer(1e-2, 10, clip_norm=1.0)
  values = params()
  placed = jax.device_put(values, sharding.tree(model().axes, values, mesh))
  state = state_lib.init(optimizer, placed, mesh)
  update = update_lib.make(
    model(),
    optimizer,
    compose.chain(
      advantages.group_advantages(),
      clipping.clip_range(0.2, 0.28),
      weights.token_mean(),
    ),
    losses.policy_gradient(),
    state_lib.of(optimizer, placed, mesh),
    mesh,
    microbatches=microbatches,
    **OPTIONS,
  )
  with jax.set_mesh(mesh):
    for _ in range(updates):
      state, report = update(state, rows, share)
  return jax.device_get(state), jax.device_get(report)


@functools.cache
def one():
  return mesh_lib.make(1, 1, 1, devices=jax.devices()[:1])


@functools.cache
def reference():
  return step(one(), batch(), updates=2)


def close(found, wanted, atol=1e-5):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=atol, rtol=1e-4),
    found,
    wanted,
  )


@pytest.mark.parametrize(
  ("microbatches", "share"), [(1, SAMPLES), (4, 1), (2, SAMPLES), (8, 2)]
)
def test_microbatches_and_shared_prompts_change_nothing(microbatches, share):
  state, report = step(one(), batch(), microbatches, share, updates=2)
  close(report["loss"], reference()[1]["loss"])
  close(report["grad_norm"], reference()[1]["grad_norm"], 1e-4)
  close(state.params, reference()[0].params, 1e-4)
  close(report["tokens"], reference()[1]["tokens"], 1e-3)


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1), (2, 2, 2)])
def test_eight_devices_make_the_same_step(shape):
  state, report = step(mesh_lib.make(*shape), batch(), 1, SAMPLES, updates=2)
  close(report["loss"], reference()[1]["loss"])
  close(state.params, reference()[0].params, 1e-4)


def test_padding_to_another_width_changes_nothing():
  rows = batch()
  pad = ((0, 0), (0, 5))
  wide = rows._replace(
    tokens=np.pad(rows.tokens, pad, constant_values=3),
    weights=np.pad(rows.weights, pad),
    behavior_logprobs=np.pad(rows.behavior_logprobs, pad),
    credit=np.pad(rows.credit, pad),
    context=np.pad(rows.context, ((0, 0), (7, 0))),
  )
  state, report = step(one(), wide, updates=2)
  close(report["loss"], reference()[1]["loss"])
  close(state.params, reference()[0].params, 1e-4)


def test_a_step_that_is_not_finite_is_skipped_and_counted():
  rows = batch()
  bad = rows._replace(behavior_logprobs=np.full_like(rows.tokens, np.nan, "f4"))
  state, report = step(one(), bad, updates=2)
  close(state.params, jax.device_get(params()), 0)
  assert (int(report["step"]), int(report["skipped"])) == (0, 2)


def test_unscored_groups_leave_the_others_as_they_were():
  rows = batch()
  rewards = rows.rewards.copy()
  rewards[:SAMPLES] = np.nan
  state, report = step(one(), rows._replace(rewards=rewards))
  kept = jax.tree.map(lambda x: x[SAMPLES:], rows)
  other, wanted = step(one(), kept)
  close(report["loss"], wanted["loss"])
  close(state.params, other.params, 1e-4)


def test_nothing_to_learn_from_is_a_finite_step():
  rows = batch()
  state, report = step(
    one(), rows._replace(rewards=np.full_like(rows.rewards, np.nan))
  )
  assert report["loss"] == 0
  assert report["grad_norm"] == 0
  close(state.params, jax.device_get(params()), 0)


def test_split_and_merge_are_inverse_and_keep_groups_together():
  rows = batch()
  for count, share in ((1, 1), (2, 4), (4, 2), (8, 4)):
    parts = update_lib.split(rows, count, share)
    for part in np.asarray(parts.group):
      runs = part.reshape(-1, share)
      assert (runs == runs[:, :1]).all()
    jax.tree.map(
      np.testing.assert_array_equal, update_lib.merge(parts, share), rows
    )


def test_moments_lie_where_their_parameters_lie():
  mesh = mesh_lib.make(2, 2, 2)
  optimizer = state_lib.make_optimizer(1e-3, 10, clip_norm=1.0)
  values = params()
  placed = jax.device_put(values, sharding.tree(model().axes, values, mesh))
  state = state_lib.init(optimizer, placed, mesh)
  adam = state.opt_state[1][0]
  for moments in (adam.mu, adam.nu):
    jax.tree.map(
      lambda m, p: None if m.sharding == p.sharding else pytest.fail(str(m)),
      moments,
      state.params,
    )


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_warmed_up_schedule_peaks_once_at_the_rate(schedule):
  optimizer = state_lib.make_optimizer(
    0.5, 20, schedule=schedule, warmup=5, b1=0.0, b2=0.0
  )
  value = jnp.ones(())
  state, sizes = optimizer.init(value), []
  for _ in range(20):
    change, state = optimizer.update(jnp.ones(()), state, value)
    sizes.append(-float(change))
  assert max(sizes) == pytest.approx(0.5, rel=1e-3)
  assert np.argmax(np.asarray(sizes) > 0.499) == 4
  assert (np.diff(sizes[:5]) > 0).all()
