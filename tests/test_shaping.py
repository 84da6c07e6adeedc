"""The potential, its meta-training and its transforms against oracles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax import losses
from mrl_jax.kernels import potentials
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.parallel import sharding
from mrl_jax.shaping import features, meta, potential, scale
from mrl_jax.train import reference, update
from mrl_jax.transforms import advantages, shaping, weights
from mrl_jax.types import Distribution, Shaping, Source
from tests import factories

SPEC = potential.Spec(width=8, hidden=16, depth=2)


@pytest.fixture(scope="module")
def model():
  made = factories.decoder()
  return made, made.init(jax.random.key(0))


@pytest.fixture(scope="module")
def params():
  found = potential.init(SPEC, jax.random.key(1))
  rng = np.random.default_rng(0)
  states = {
    "centre": jnp.asarray(rng.normal(size=8), jnp.float32),
    "scale": jnp.asarray(rng.uniform(0.5, 2, size=8), jnp.float32),
  }
  return {**found, **states}


def network(params, spec, start, mean):
  """The potential of one prefix, in float64 and with a concatenation."""
  standard = [
    (np.asarray(x, np.float64) - params["centre"]) / params["scale"]
    for x in (start, mean)
  ]
  x = np.concatenate([*standard, standard[1] - standard[0]])
  for number in range(spec.depth + 1):
    layer = params["network"][f"layer{number}"]
    x = x @ np.asarray(layer["kernel"], np.float64) + layer["bias"]
    if number < spec.depth:
      x = x / (1 + np.exp(-x))
  return spec.bound * np.tanh(x[0] / spec.bound)


def test_a_prefix_is_read_as_the_mean_of_the_states_since_the_prompt(params):
  states = np.random.default_rng(1).normal(size=(3, 5, 8)).astype(np.float32)
  mask = jnp.arange(5)[None] < jnp.asarray([5, 3, 1])[:, None]
  found = potential.values(SPEC, params, jnp.asarray(states), mask)
  for row in range(3):
    for step in range(5):
      since = states[row, 1 : step + 1]
      mean = since.mean(0) if step else states[row, 0]
      want = network(params, SPEC, states[row, 0], mean)
      want = want if mask[row, step] else 0.0
      assert abs(found[row, step] - want) < 2e-6


def test_no_value_is_beyond_the_bound(params):
  spec = dataclasses.replace(SPEC, bound=0.5)
  states = 100 * jax.random.normal(jax.random.key(0), (4, 6, 8))
  found = potential.values(spec, params, states, jnp.ones((4, 6), bool))
  assert jnp.abs(found).max() <= 0.5


@pytest.mark.parametrize("cap", [0.3, 4.0])
def test_kernels_are_kept_to_their_norm_and_smaller_ones_left_alone(
  params, cap
):
  exact = potential.sealed(params, cap)
  near = potential.capped(params, cap)
  for name, layer in params["network"].items():
    before = np.linalg.svd(layer["kernel"], compute_uv=False)[0]
    after = np.linalg.svd(exact["network"][name]["kernel"], compute_uv=False)[0]
    assert after <= cap * (1 + 1e-6)
    assert np.isclose(after, min(before, cap), rtol=1e-5)
    assert np.allclose(
      near["network"][name]["kernel"],
      exact["network"][name]["kernel"],
      atol=0.05 * cap,
    )


def test_padding_changes_nothing(params):
  states = jax.random.normal(jax.random.key(2), (2, 4, 8))
  mask = jnp.asarray([[True] * 4, [True, True, False, False]])
  wide = jnp.concatenate([states, jnp.full((2, 3, 8), 1e3)], axis=1)
  more = jnp.concatenate([mask, jnp.zeros((2, 3), bool)], axis=1)
  found = potential.values(SPEC, params, states, mask)
  padded = potential.values(SPEC, params, wide, more)
  assert np.allclose(found, padded[:, :4], atol=1e-6)
  assert not padded[:, 4:].any()


def test_phi_is_exactly_zero_where_nothing_may_be_added():
  rng = np.random.default_rng(0)
  mask = np.arange(6)[None] < np.asarray([6, 4, 1, 0])[:, None]
  values = rng.normal(size=(4, 6)).astype(np.float32)
  device = jnp.asarray(values), jnp.asarray(mask)
  phi = np.asarray(potentials.telescoping(*device))
  assert not phi[:, 0].any()
  assert not phi[~mask].any()
  want = np.where(mask, values - values[:, :1], 0)
  assert np.array_equal(phi, want)
  last = np.asarray(potentials.last(*device))
  assert last.tolist() == [values[0, 5], values[1, 3], values[2, 0], 0.0]


def shaped(rows=4, steps=6, samples=2, seed=0, **fields):
  batch = factories.batch(rows, steps, samples, seed=seed, **fields)
  rng = np.random.default_rng(seed + 1)
  values = rng.normal(size=(rows, steps)) * np.asarray(batch.weights != 0)
  values = jnp.asarray(values, jnp.float32)
  return batch._replace(
    shaping=Shaping(values, jnp.full((rows,), 0.4, jnp.float32))
  )


def test_tokens_are_shaped_by_the_prefix_before_them():
  batch = shaped(source=[0, 1, 3, 2])
  found = shaping.shape_tokens(0.3)(batch)
  mask = np.asarray(batch.weights) != 0
  values = np.asarray(batch.shaping.potentials, np.float64)
  want = np.where(mask, -(0.3 / 0.4) * (values - values[:, :1]), 0)
  want[[1, 3]] = 0  # of a peer
  assert np.allclose(found.credit, want, atol=1e-6)
  assert np.array_equal(found.rewards, batch.rewards)


def test_the_sequence_is_shaped_by_its_last_prefix():
  batch = shaped(rewards=[1.0, 0.0, np.nan, 1.0])
  found = shaping.shape_sequence(0.3)(batch)
  lengths = np.asarray(batch.weights != 0).sum(1)
  last = np.asarray(batch.shaping.potentials)[np.arange(4), lengths - 1]
  want = np.asarray(batch.rewards) + 0.3 * last
  assert np.allclose(found.rewards, want, atol=1e-6, equal_nan=True)
  assert not found.credit.any()


def test_a_bound_that_could_reorder_rewards_is_refused():
  shaping.shape_bounded(0.3, 1.0, 1.0)
  with pytest.raises(ValueError, match=r"alpha=0\.5.*gap=1\.0"):
    shaping.shape_bounded(0.5, 1.0, 1.0)


def test_shaping_without_values_says_what_is_missing():
  with pytest.raises(ValueError, match="shaping=None"):
    shaping.shape_tokens(0.3)(factories.batch())


def test_a_group_of_equal_rewards_learns_where_the_reward_is_shaped():
  batch = shaped(rewards=[1.0, 1.0, 0.0, 0.0])
  plain = advantages.group_advantages()(batch)
  found = advantages.group_advantages()(shaping.shape_sequence(0.3)(batch))
  assert not plain.advantages.any()
  assert jnp.abs(found.advantages).min() > 0.1


def test_no_gradient_reaches_the_potential(params, model):
  made, weights_ = model
  batch = shaped()
  measure = weights.constant_mean(6)

  def cost(params, transform):
    states = made.hidden(
      weights_, batch.context, batch.context_lengths, batch.tokens
    )
    values = potential.values(SPEC, params, states, batch.weights != 0)
    rows = batch._replace(shaping=batch.shaping._replace(potentials=values))
    rows = measure(advantages.group_advantages()(transform(rows)))
    return losses.objective(losses.policy_gradient())(
      factories.scores(batch), rows
    )

  for transform in (shaping.shape_tokens(1.0), shaping.shape_sequence(1.0)):
    assert cost(params, transform) != cost(
      jax.tree.map(lambda x: 2 * x, params), transform
    )
    found = jax.grad(cost)(params, transform)
    assert not any(jnp.any(leaf != 0) for leaf in jax.tree.leaves(found))


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("compared", [False, True])
def test_devices_and_microbatches_change_nothing(
  params, model, shape, compared
):
  made, weights_ = model
  batch = factories.batch(rows=32, samples=2)
  found = potential.Potential(SPEC, params, np.zeros(8, np.float32))
  options = {"allowed": np.ones(11, bool), "distribution": Distribution()}

  def score(mesh, microbatches):
    ref = reference.make(
      made,
      mesh,
      found,
      microbatches=microbatches,
      compared=compared,
      **options,
    )
    places = sharding.tree(made.axes, weights_, mesh)
    with jax.set_mesh(mesh):
      rows = jax.device_put(batch, sharding.batch(mesh))
      return ref.score(jax.device_put(weights_, places), rows, 2)

  one = score(mesh_lib.make(1, 1, 1, devices=jax.devices()[:1]), 1)
  many = score(mesh_lib.make(*shape), 2)
  assert set(one) == {"potentials"} | ({"ref_logprobs"} if compared else set())
  for name in one:
    assert np.allclose(one[name], many[name], atol=1e-5), name
  if compared:
    plain = update.scorer(made, **options)(weights_, batch, 2).logprobs
    real = np.asarray(batch.weights) != 0
    assert np.allclose(one["ref_logprobs"][real], plain[real], atol=1e-6)


def test_what_is_written_is_read_and_belongs_to_one_reference(
  tmp_path, params, model
):
  made, weights_ = model
  probe = potential.probe(made, weights_)
  sealed = potential.sealed(params, SPEC.cap)
  potential.save(potential.Potential(SPEC, sealed, probe), tmp_path, {"a": 1})
  found = potential.load(tmp_path)
  assert found.spec == SPEC
  for one, other in zip(
    jax.tree.leaves(found.params), jax.tree.leaves(sealed), strict=True
  ):
    assert np.array_equal(one, other)
  potential.check(found, made, weights_)
  with pytest.raises(ValueError, match="relative distance"):
    potential.check(found, made, made.init(jax.random.key(9)))
  wide = found._replace(spec=dataclasses.replace(SPEC, width=4))
  with pytest.raises(ValueError, match="width 4"):
    potential.check(wide, made, weights_)
  (tmp_path / "potential.json").write_text("{}")
  with pytest.raises(ValueError, match="not a potential"):
    potential.load(tmp_path)


def test_the_scale_is_an_average_of_past_groups_with_a_spread():
  rule = scale.Rule(decay=0.9, start=0.5)
  rewards = np.asarray([[1, 0, 1, 0], [1, 1, 1, 1], [0, np.nan, 1, 1]], float)
  stds = [np.std([1, 0, 1, 0], ddof=1), np.std([0, 1, 1], ddof=1)]
  want = 0.9 * 0.5 + 0.1 * np.mean(stds)
  assert np.isclose(scale.after(rule, scale.first(rule), rewards), want)
  assert scale.after(rule, 0.3, np.ones((2, 4))) == 0.3
  plain = rule._replace(normalize=False)
  assert scale.after(plain, scale.first(plain), rewards) == 1.0


# Meta-training.


def examples(count=6, seed=0):
  rng = np.random.default_rng(seed)
  return meta.Examples(
    start=jnp.asarray(rng.normal(size=(count, 8)), jnp.float32),
    means=jnp.asarray(rng.normal(size=(count, 2, 4, 8)), jnp.float32),
    apart=jnp.asarray(rng.random((count, 4)) < 0.8),
    gap=jnp.full((count,), 2.0),
    share=jnp.asarray(rng.random(count), jnp.float32),
  )


def entropy(values, bound):
  """Of a soft histogram, bin by bin."""
  width = 2 * bound / 16
  shares = np.zeros(16)
  for value in values:
    near = np.asarray(
      [
        np.exp(-(((value + bound - width * (k + 0.5)) / width) ** 2) / 2)
        for k in range(16)
      ]
    )
    shares += near / near.sum() / len(values)
  return -sum(s * np.log(s) for s in shares if s > 0) / np.log(16)


def test_the_token_terms(params):
  data = examples()
  found = meta.terms(SPEC, params, data)
  costs, drifts, used = [], np.zeros((6, 3)), []
  for n in range(6):
    birth = network(params, SPEC, data.start[n], data.start[n])
    for p in range(3):
      good, bad = (
        network(params, SPEC, data.start[n], data.means[n, side, p])
        for side in (0, 1)
      )
      share = float(data.share[n])
      drifts[n, p] = share * (good - birth) + (1 - share) * (bad - birth)
      used += [good - birth, bad - birth]
      if data.apart[n, p]:
        costs.append(np.log1p(np.exp(-(good - bad))))
  assert np.isclose(found.task, np.mean(costs), rtol=1e-5)
  assert np.isclose(found.consistency, (drifts.mean(0) ** 2).mean(), rtol=1e-4)
  assert np.isclose(found.entropy, -entropy(used, 1.0), rtol=1e-5)


@pytest.mark.parametrize("mode", ["sequence", "bounded"])
def test_the_sequence_terms(params, mode):
  spec, data = dataclasses.replace(SPEC, mode=mode), examples()
  found = meta.terms(spec, params, data, alpha=0.3)
  rises, used = [], []
  for n in range(6):
    good, bad = (
      network(params, spec, data.start[n], data.means[n, side, 3])
      for side in (0, 1)
    )
    rises.append(good - bad)
    used += [good, bad]
  rises, share = np.asarray(rises), np.asarray(data.share, np.float64)
  cost = np.log1p(np.exp(-(2.0 + 0.3 * rises))).mean()
  assert np.isclose(found.task, cost, rtol=1e-5)
  variance = (share * (1 - share) * rises**2).mean()
  assert np.isclose(found.consistency, variance, rtol=1e-4)
  assert np.isclose(found.entropy, -entropy(used, 1.0), rtol=1e-5)


def test_the_entropy_is_a_share_of_the_most():
  one = meta.histogram_entropy(jnp.zeros(9), 1.0)
  even = meta.histogram_entropy(jnp.linspace(-1, 1, 4096), 1.0)
  assert 0 <= one < 0.6 < 0.99 < even <= 1 + 1e-6
  for seed in range(5):
    values = 3 * jax.random.normal(jax.random.key(seed), (50,))
    assert 0 <= meta.histogram_entropy(jnp.clip(values, -1, 1), 1.0) <= 1 + 1e-6


def separable(tasks=6, count=40, seed=0):
  """Tasks whose good prefixes lie along one direction, with noise."""
  rng = np.random.default_rng(seed)
  means = rng.normal(size=(tasks * count, 2, 4, 8))
  means[:, 0, :, 0] += 3.0
  start = rng.normal(size=(tasks * count, 8))
  read = features.Features(
    start.astype(np.float32),
    means.astype(np.float32),
    np.ones((tasks * count, 4), bool),
  )
  names = [f"task/{number}" for number in range(tasks) for _ in range(count)]
  ones = np.ones(tasks * count, np.float32)
  return meta.data(read, names, 2 * ones, ones / 2, {"task/0", "task/3"})


SETTINGS = meta.Settings(steps=120, tasks=4, pairs=8, every=40, lr=3e-3)


def held_out(records, place="1/2"):
  return np.mean([r[place]["right"] for r in records if r["held_out"]])


@pytest.mark.parametrize("mode", meta.MODES)
def test_it_learns_what_carries_over_to_tasks_it_never_saw(mode):
  spec, data = dataclasses.replace(SPEC, mode=mode), separable()
  place = "1/2" if mode == "token" else "whole"
  settings = dataclasses.replace(SETTINGS, alpha=1.0)
  found, history = meta.train(spec, data, settings)
  born, none = meta.train(spec, data, dataclasses.replace(settings, steps=0))
  assert none == [] and [h["step"] for h in history] == [40, 80, 120]
  assert held_out(meta.accuracy(spec, found, data), place) > 0.9
  assert held_out(meta.accuracy(spec, born, data), place) < 0.85
  for layer in found["network"].values():
    norm = np.linalg.svd(layer["kernel"], compute_uv=False)[0]
    assert norm <= spec.cap * (1 + 1e-6)


def test_fewer_steps_than_lie_between_two_looks_are_made_too():
  settings = dataclasses.replace(SETTINGS, steps=20)  # every 40
  found, history = meta.train(SPEC, separable(), settings)
  assert [look["step"] for look in history] == [20]
  born, _ = meta.train(
    SPEC, separable(), dataclasses.replace(settings, steps=0)
  )
  kernel = ("network", "layer0", "kernel")
  one, other = (p[kernel[0]][kernel[1]][kernel[2]] for p in (found, born))
  assert not np.array_equal(one, other)


@pytest.mark.parametrize("field", ["hidden", "depth", "bound", "cap"])
def test_a_potential_needs_a_size(field):
  nothing = type(getattr(SPEC, field))(0)
  with pytest.raises(ValueError, match=f"{field}=0"):
    dataclasses.replace(SPEC, **{field: nothing})


def test_labels_that_say_nothing_are_not_learned():
  data = separable()
  rng = np.random.default_rng(3)
  swap = rng.random(len(data.task)) < 0.5
  means = np.where(
    swap[:, None, None, None],
    data.examples.means[:, ::-1],
    data.examples.means,
  )
  data = data._replace(examples=data.examples._replace(means=means))
  found, _ = meta.train(SPEC, data, SETTINGS)
  assert 0.3 < held_out(meta.accuracy(SPEC, found, data)) < 0.7


def test_an_inner_step_is_one_of_gradient_descent_on_the_other_half(params):
  data = jax.tree.map(lambda x: x[None], examples(8))
  settings = dataclasses.replace(SETTINGS, inner_lr=0.1)
  run = jax.jit(lambda p: meta.gradient(SPEC, p, data, settings))
  grads, cost = run(params)

  def objective(params, rows):
    half = jax.tree.map(lambda x: x[0, rows], data)
    return meta.objective(SPEC, params, half, settings)[0]

  first = jax.jit(jax.grad(lambda p: objective(p, slice(0, 4))))
  second = jax.jit(jax.value_and_grad(lambda p: objective(p, slice(4, 8))))
  step = first(params)["network"]
  moved = jax.tree.map(lambda p, g: p - 0.1 * g, params["network"], step)
  want, wanted = second({**params, "network": moved})
  assert np.isclose(cost, want, rtol=1e-5)
  for one, other in zip(
    jax.tree.leaves(grads["network"]),
    jax.tree.leaves(wanted["network"]),
    strict=True,
  ):
    assert np.allclose(one, other, atol=1e-6)


def test_it_stops_once_unseen_tasks_gain_no_more():
  data = separable(count=10)
  settings = dataclasses.replace(SETTINGS, steps=4000, every=20, patience=2)
  _, history = meta.train(SPEC, data, settings)
  assert len(history) < 200
  least = min(range(len(history)), key=lambda i: history[i]["held_out"])
  assert least == len(history) - 3


def test_features_are_the_states_at_fractions_of_each_response(model):
  made, weights_ = model
  rng = np.random.default_rng(0)
  pairs = [
    features.Encoded(
      rng.integers(11, size=rng.integers(1, 5)).tolist(),
      rng.integers(11, size=rng.integers(1, 9)).tolist(),
      rng.integers(11, size=rng.integers(1, 9)).tolist(),
    )
    for _ in range(5)
  ]
  found = features.extract(made, weights_, mesh_lib.make(8, 1, 1), pairs)
  run = jax.jit(made.hidden)
  for n, pair in enumerate(pairs):
    for side, row in enumerate((pair.chosen, pair.rejected)):
      states = run(
        weights_,
        np.asarray([[0] * (4 - len(pair.context)) + pair.context], np.int32),
        np.asarray([len(pair.context)], np.int32),
        np.asarray([[*row, *[0] * (9 - len(row))]], np.int32),
      )[0]
      assert np.allclose(found.start[n], states[0], atol=1e-5)
      for place, count in enumerate(features.places(len(row))):
        assert count < len(row)
        want = states[1 : count + 1].mean(0) if count else states[0]
        assert np.allclose(found.means[n, side, place], want, atol=1e-5)
    ends = [features.places(len(row)) for row in (pair.chosen, pair.rejected)]
    for place in range(4):
      same = pair.chosen[: ends[0][place]] == pair.rejected[: ends[1][place]]
      assert found.apart[n, place] == (not same)


def test_sources_that_are_shaped_are_own():
  batch = shaped(source=[int(Source.PEER)] * 4)
  assert not shaping.shape_tokens(0.3)(batch).credit.any()
  found = shaping.shape_sequence(0.3)(batch)
  assert np.array_equal(found.rewards, batch.rewards)
