"""The veto inside the jitted update, and how stale its rows are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax import collate, losses, recipes
from mrl_jax.kernels import veto
from mrl_jax.train import state as state_lib
from mrl_jax.train import update as update_lib
from mrl_jax.transforms import weights
from mrl_jax.types import Source
from tests import test_collate
from tests import test_update as small

UPDATES = 3


@functools.cache
def run(rule, microbatches=1):
  """Parameters and reports of some updates on one batch."""
  base = recipes.grpo(
    loss=losses.policy_gradient(3.0), reduction=weights.token_mean()
  )
  recipe = recipes.mu_grpo(base, rule)
  optimizer = state_lib.make_optimizer(3e-2, 10, clip_norm=1.0)
  mesh = small.one()
  params = jax.device_put(small.params(), mesh.devices.item())
  state = state_lib.init(optimizer, params, mesh)
  update = update_lib.make(
    small.model(),
    optimizer,
    recipe.prepare,
    recipe.loss,
    state_lib.of(optimizer, params, mesh),
    mesh,
    microbatches=microbatches,
    veto=recipe.veto,
    **small.OPTIONS,
  )
  reports = []
  with jax.set_mesh(mesh):
    for _ in range(UPDATES):
      state, report = update(state, small.batch(), small.SAMPLES)
      reports.append(jax.device_get(report))
  return jax.device_get(state.params), reports


def test_a_veto_that_never_triggers_is_relaxed_clipping_to_the_bit():
  found, plain = run(veto.Rule(0.0)), run(None)
  jax.tree.map(np.testing.assert_array_equal, found[0], plain[0])
  assert [r["loss"] for r in found[1]] == [r["loss"] for r in plain[1]]
  assert [r["tokens"].vetoed[0] for r in found[1]] == [0] * UPDATES
  other, reports = run(veto.Rule(0.5))
  assert all(r["tokens"].vetoed[0] > 0 for r in reports)
  with pytest.raises(AssertionError):
    jax.tree.map(np.testing.assert_array_equal, other, plain[0])


def test_microbatches_change_nothing_under_a_veto():
  found, wanted = run(veto.Rule(0.5), 4), run(veto.Rule(0.5))
  small.close(found[0], wanted[0], 1e-4)
  small.close(found[1][0]["tokens"], wanted[1][0]["tokens"], 1e-3)


def test_rows_grow_stale_with_the_updates():
  _, reports = run(None)
  assert [int(r["staleness"]) for r in reports] == [*range(UPDATES)]
  for report in reports:
    assert report["ratio_max"] == report["tokens"].ratio_max[Source.OWN] > 0


def test_staleness_is_of_the_oldest_own_row():
  rows = small.batch()
  version = np.full_like(rows.source, 5)
  version[[3, 7]] = 2, 0
  source = rows.source.copy()
  source[7] = Source.PEER
  rows = rows._replace(version=version, source=source)
  assert update_lib.staleness(jnp.int32(9), rows) == 7
  peers = rows._replace(source=np.full_like(source, Source.PEER))
  assert update_lib.staleness(jnp.int32(9), peers) == 0


def test_a_batch_says_which_version_of_the_policy_sampled_each_row():
  own = [test_collate.rollout([1, 2]), test_collate.rollout([3])]
  own = [row._replace(version=7 + i) for i, row in enumerate(own)]
  assert collate.batch(own, slots=1).version.tolist() == [7, 8, 0]
