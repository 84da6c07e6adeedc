import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax import diagnostics, losses
from mrl_jax.kernels import correction, surrogate
from mrl_jax.transforms import weights
from mrl_jax.types import Scores, Source, Trace
from tests import factories, oracle

NAN, INF = float("nan"), float("inf")
LOSSES = {
  "policy_gradient": losses.policy_gradient(3.0),
  "gspo": losses.gspo(),
  "cispo": losses.cispo(),
  "reinforce": losses.reinforce(),
  "score": losses.score(),
  "entropy": losses.entropy(),
  "k1": losses.kl(surrogate.k1),
  "k2": losses.kl(surrogate.k2),
  "k3": losses.kl(surrogate.k3),
  "corrected": losses.corrected(losses.policy_gradient(), correction.m2po),
  "switch": losses.switch(
    losses.policy_gradient(), {Source.RESCUE: losses.score()}
  ),
}


def value_and_grad(loss, batch, scores):
  return jax.value_and_grad(lambda s: losses.objective(loss)(s, batch))(scores)


def scores(logprobs):
  logprobs = jnp.asarray(logprobs, jnp.float32)
  return Scores(logprobs, jnp.zeros_like(logprobs))


@pytest.mark.parametrize("masked", [-200.0, -INF, INF, NAN])
def test_a_masked_huge_ratio_has_no_gradient(masked):
  batch = factories.rows(
    [[1, 0]], advantages=[1.0], behavior_logprobs=[[-1.0, masked]]
  )
  value, gradient = value_and_grad(
    losses.policy_gradient(), batch, scores([[-1.0, 0.0]])
  )
  assert value == -1.0
  assert gradient.logprobs.tolist() == [[-1.0, 0.0]]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("junk", [NAN, -INF, INF])
def test_junk_under_weight_zero_reaches_nothing(name, junk):
  """Neither a masked entry nor a masked row, in any array a loss reads."""
  clean = factories.batch(
    rows=4,
    advantages=[1.0, -1.0, 0.5, -2.0],
    source=[0, 2, 0, 2],
    ref_logprobs=-np.random.default_rng(1).exponential(size=(4, 6)),
  )
  clean = clean._replace(weights=clean.weights.at[3].set(0.0))
  said = factories.scores(clean)
  hole = clean.weights == 0
  row = ~(clean.weights != 0).any(-1)

  def spoil(x):
    return jnp.where(hole if x.ndim == 2 else row, junk, x)

  fields = (
    "behavior_logprobs",
    "ref_logprobs",
    "credit",
    "advantages",
    "bonus",
    "clip_low",
    "clip_high",
    "rewards",
  )
  dirty = clean._replace(**{f: spoil(getattr(clean, f)) for f in fields})
  loss = LOSSES[name]
  wanted = value_and_grad(loss, clean, said)
  found = value_and_grad(loss, dirty, Scores(*map(spoil, said)))
  jax.tree.map(np.testing.assert_array_equal, found, wanted)
  assert np.isfinite(found[0])


def test_a_recipe_that_forgets_the_advantages_is_loud():
  batch = factories.batch()
  value, _ = value_and_grad(
    losses.policy_gradient(), batch, factories.scores(batch)
  )
  assert np.isnan(value)


def test_k3_far_from_the_reference_is_finite():
  batch = factories.rows([[1.0]], ref_logprobs=[[0.0]])
  value, gradient = value_and_grad(losses.kl(), batch, scores([[-200.0]]))
  assert np.isfinite(value) and np.isfinite(gradient.logprobs).all()


def test_policy_gradient_is_the_oracles_with_bonus_and_credit():
  rng = np.random.default_rng(5)
  batch = factories.batch(
    rows=6,
    advantages=rng.normal(size=6),
    bonus=rng.normal(size=6),
    credit=rng.normal(size=(6, 6)),
  )
  said = factories.scores(batch, drift=1.0)
  found = losses.policy_gradient(2.0)(said, batch)
  a = (batch.advantages + batch.bonus)[:, None] + batch.credit
  d = said.logprobs - batch.behavior_logprobs
  wanted = oracle.clipped(
    *map(np.asarray, (d, a, batch.clip_low, batch.clip_high)), 2.0
  )
  np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_gspo_decides_by_the_whole_response():
  batch = factories.rows([[1, 1, 0], [1, 1, 1]], advantages=[1.0, 1.0])
  batch = batch._replace(weights=weights.sequence_mean()(batch).weights)
  said = scores([[1.0, 0.0, 9.0], [0.3, -0.3, 0.0]])  # ratios e^0.5 and 1
  value, gradient = value_and_grad(losses.gspo(), batch, said)
  np.testing.assert_allclose(value, -(1.28 + 1.0) / 2, rtol=1e-6)
  wanted = [[0, 0, 0], [-1 / 6] * 3]
  np.testing.assert_allclose(gradient.logprobs, wanted, rtol=1e-6)


def test_the_responses_sign_decides_for_every_token():
  """Credit may flip a token's sign; what drops a response must not care."""
  fields = {
    "credit": [[0.0, 0.75, 0.25]],
    "behavior_logprobs": np.ones((1, 3)),
  }
  drop = functools.partial(correction.opsm, delta=0.5)
  loss = losses.corrected(lambda s, b: jnp.ones_like(s.logprobs), drop)
  for advantage, kept in ((-0.5, 0.0), (0.5, 1.0)):
    batch = factories.rows(np.ones((1, 3)), advantages=[advantage], **fields)
    found = loss(scores(np.zeros((1, 3))), batch)
    assert found.tolist() == [[kept] * 3]


def test_corrected_keeps_the_original_denominator_and_no_gradient():
  batch = factories.rows(np.ones((1, 5)))
  batch = weights.token_mean()(batch)
  reject = functools.partial(correction.mis_token, low=0.5, high=2.0)
  loss = losses.corrected(lambda s, b: jnp.ones_like(s.logprobs), reject)
  said = scores([[0.1, -1.5, 0.8, -10, 0.3]])
  value, gradient = value_and_grad(loss, batch, said)
  np.testing.assert_allclose(value, 0.4, rtol=1e-6)
  assert not gradient.logprobs.any()
  truncate = losses.corrected(losses.score(), correction.tis_token)
  _, gradient = value_and_grad(truncate, batch, said)
  wanted = -np.minimum(np.exp(said.logprobs), 2.0) / 5
  np.testing.assert_allclose(gradient.logprobs, wanted, rtol=1e-6)


def test_corrected_leaves_other_sources_alone():
  batch = factories.rows(np.ones((2, 3)), source=[0, 1])
  reject = functools.partial(correction.mis_token, low=0.5, high=2.0)
  loss = losses.corrected(losses.score(), reject, Source.OWN)
  _, gradient = value_and_grad(loss, batch, scores([[0, -9, 9]] * 2))
  assert gradient.logprobs.tolist() == [[-1, 0, 0], [-1, -1, -1]]


def test_a_token_that_a_correction_drops_is_neutralised():
  """Dropped for its ratio, and its loss would not be finite."""
  batch = factories.rows(np.ones((1, 2)), ref_logprobs=np.zeros((1, 2)))
  reject = functools.partial(correction.mis_token, low=0.5, high=2.0)
  loss = losses.corrected(losses.score(), reject)
  value, gradient = value_and_grad(loss, batch, scores([[0.0, -INF]]))
  assert value == 0
  assert gradient.logprobs.tolist() == [[-1, 0]]


def test_switch_is_each_loss_on_its_own_rows():
  batch = factories.batch(rows=4, source=[0, 2, 0, 2])
  batch = batch._replace(
    advantages=jnp.asarray([1.0, NAN, -1.0, NAN], jnp.float32)
  )
  said = factories.scores(batch)
  loss = losses.switch(losses.reinforce(), {Source.RESCUE: losses.score()})
  value, gradient = value_and_grad(loss, batch, said)
  factor = jnp.asarray([1.0, 1.0, -1.0, 1.0])[:, None]
  wanted = -factor * batch.weights
  np.testing.assert_array_equal(gradient.logprobs, wanted)
  np.testing.assert_allclose(value, (wanted * said.logprobs).sum(), rtol=1e-6)


def test_add_is_linear():
  batch = factories.batch(advantages=[1.0, -1.0, 0.5, 2.0])
  said = factories.scores(batch)
  total = losses.add((1.0, losses.reinforce()), (0.01, losses.entropy()))
  wanted = losses.reinforce()(said, batch) - 0.01 * said.entropies
  np.testing.assert_allclose(total(said, batch), wanted, rtol=1e-6)


def test_kl_without_a_reference_is_refused():
  batch = factories.batch()
  with pytest.raises(ValueError, match="ref_logprobs=None"):
    losses.kl()(factories.scores(batch), batch)


def test_diagnostics_are_their_definitions():
  batch = factories.batch(
    rows=8,
    advantages=[1, -1, 2, -2, 0.5, -0.5, 1, -1],
    source=[0, 0, 0, 0, 1, 1, 2, 3],
    ref_logprobs=-np.random.default_rng(3).exponential(size=(8, 6)),
  )
  batch = batch._replace(weights=batch.weights.at[7].set(0) / 7)
  said = factories.scores(batch, drift=0.5)
  found = diagnostics.summarize([diagnostics.measure(said, batch)])
  assert not any(key.startswith("regen/") for key in found)
  for source, prefix in ((0, ""), (1, "peer/"), (2, "rescue/")):
    rows = np.asarray(batch.source) == source
    mask = (np.asarray(batch.weights) != 0) & rows[:, None]
    d = np.asarray(said.logprobs - batch.behavior_logprobs, np.float64)[mask]
    a = np.broadcast_to(np.asarray(batch.advantages)[:, None], (8, 6))[mask]
    ref = np.asarray(batch.ref_logprobs - said.logprobs, np.float64)[mask]
    r = np.exp(d)
    wanted = {
      "clip_low": (r[a < 0] < 0.8).mean() if (a < 0).any() else 0.0,
      "clip_high": (r[a > 0] > 1.28).mean(),
      "log_ratio_mean": np.abs(d).mean(),
      "log_ratio_max": np.abs(d).max(),
      "ratio_max": r.max(),
      "ess": r.sum() ** 2 / (len(r) * (r**2).sum()),
      "kl": (r - 1 - d).mean(),
      "entropy": np.asarray(said.entropies)[mask].mean(),
      "nll": -np.asarray(said.logprobs, np.float64)[mask].mean(),
      "ref_kl": (np.exp(ref) - 1 - ref).mean(),
    }
    if prefix == "rescue/":  # text alone: whoever sampled it told no log-probs
      wanted = {name: wanted[name] for name in ("entropy", "nll")}
    assert {k for k in found if k.startswith(prefix or tuple(wanted))} == {
      prefix + name for name in wanted
    }
    for name, value in wanted.items():
      np.testing.assert_allclose(found[prefix + name], value, 1e-4, 1e-6)


def test_a_peers_weights_are_those_of_whole_chunks():
  """Chunks [0, 1], [2], [3] of a peer's row; of own rows there are none."""
  batch = factories.rows(
    [[1, 1, 1, 1], [1, 1, 1, 0]], source=[0, 1], advantages=[1, 1]
  )
  batch = batch._replace(weights=batch.weights.at[1, 3].set(1))
  source_logprobs = np.asarray([-0.5, -1.0, -0.25, -2.0], np.float32)
  row = jnp.asarray([[0, 1, 2, 3]] * 2, jnp.int32)
  batch = batch._replace(
    trace=Trace(
      logprobs=jnp.asarray([[0.0] * 4, source_logprobs]),
      first=row,
      first_part=jnp.ones((2, 4)),
      last=row,
      last_part=jnp.zeros((2, 4)),
      chunk_start=jnp.asarray([[0, 0, 2, 3]] * 2, jnp.int32),
      chunk_stop=jnp.asarray([[2, 2, 3, 4]] * 2, jnp.int32),
      byte_share=jnp.ones((2, 4)),
    )
  )
  said = factories.scores(batch, drift=0.5)
  d = np.asarray(said.logprobs[1], np.float64) - source_logprobs
  w = np.exp([d[0] + d[1], d[2], d[3]])
  one = diagnostics.measure(said, batch)
  found = diagnostics.summarize([one])
  assert found["peer/chi2"] == pytest.approx((w**2).mean() - 1, rel=1e-4)
  wanted = w.sum() ** 2 / (3 * (w**2).sum())
  assert found["peer/chunk_ess"] == pytest.approx(wanted, rel=1e-4)
  assert "chi2" not in found
  # An update in which nobody was heard adds nothing to them.
  alone = diagnostics.measure(said, batch._replace(trace=None))
  both = diagnostics.summarize([one, alone])
  assert both["peer/chi2"] == pytest.approx(found["peer/chi2"])


def test_diagnostics_of_parts_merge_into_those_of_the_whole():
  batch = factories.batch(rows=6, advantages=[1, -1, 2, -2, 1, -1])
  said = factories.scores(batch, drift=0.5)
  part = [jax.tree.map(lambda x, i=i: x[i::2], (said, batch)) for i in (0, 1)]
  sums = [diagnostics.measure(*p) for p in part]
  merged = diagnostics.merge(diagnostics.zeros(sums[0]), sums[0])
  merged = diagnostics.merge(merged, sums[1])
  whole = diagnostics.measure(said, batch)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, 1e-5, 1e-6), merged, whole
  )
  one, two = diagnostics.summarize([whole]), diagnostics.summarize(sums)
  assert one.keys() == two.keys()
  np.testing.assert_allclose(list(one.values()), list(two.values()), 1e-5)


def test_diagnostics_of_nothing_are_nothing():
  batch = factories.batch()
  batch = batch._replace(weights=jnp.zeros_like(batch.weights))
  sums = diagnostics.measure(factories.scores(batch), batch)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(sums))
  assert diagnostics.summarize([sums]) == {}
  assert diagnostics.summarize([]) == {}
