"""Microbatches of their own widths: the same update, less padding."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.studies import waste
from mrl_jax import compose, losses
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.parallel import sharding
from mrl_jax.train import state as state_lib
from mrl_jax.train import update as update_lib
from mrl_jax.train import widths
from mrl_jax.transforms import advantages, clipping, weights
from tests import test_update


@given(
  st.integers(1, 4).flatmap(
    lambda count: st.tuples(
      st.just(count),
      st.lists(st.integers(0, 90), min_size=count, max_size=12).map(
        lambda x: x[: len(x) - len(x) % count]
      ),
    )
  )
)
def test_every_group_fits_its_microbatch(case):
  count, lengths = case
  whole = max(lengths) + 3
  placed = widths.order(lengths, count)
  assert sorted(placed) == list(range(len(lengths)))
  stand = [lengths[group] for group in placed]
  found = widths.widths(stand, count, whole)
  assert len(found) == count and max(found) <= whole
  assert list(found) == sorted(found)
  for position, length in enumerate(stand):
    assert length <= found[position % count]
  step = -(-whole // widths.PARTS)
  assert len({*found}) <= widths.PARTS
  for number, width in enumerate(found):  # no wider than it must be
    longest = max(stand[number::count])
    assert width - longest < step + 8 or width == whole


def test_narrow_cuts_what_is_of_completion_tokens():
  batch = jax.tree.map(jnp.asarray, test_update.batch())
  cut = widths.narrow(batch, 5)
  assert cut.tokens.shape == (32, 5) and cut.weights.shape == (32, 5)
  assert cut.context.shape == batch.context.shape
  assert cut.rewards is batch.rewards


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_the_update_is_that_of_one_width(shape):
  count = np.prod(shape)
  mesh = mesh_lib.make(*shape, devices=jax.devices()[:count])
  model, values = test_update.model(), test_update.params()
  optimizer = state_lib.make_optimizer(1e-2, 10, clip_norm=1.0)
  placed = jax.device_put(values, sharding.tree(model.axes, values, mesh))
  state = state_lib.init(optimizer, placed, mesh)
  groups, share = test_update.PROMPTS, test_update.SAMPLES
  rows = test_update.batch()
  rows.weights[: len(rows.weights) // 2, 6:] = 0  # groups of short rows
  lengths = (rows.weights != 0).sum(1).reshape(groups, share).max(1).tolist()
  position = widths.order(lengths, 2)
  stand = [lengths[group] for group in position]
  order = np.arange(len(rows.rewards)).reshape(groups, share)[position]
  rows = jax.tree.map(lambda x: x[order.reshape(-1)], rows)
  found = widths.widths(stand, 2, rows.tokens.shape[1])
  assert len({*found}) == 2
  prepare = compose.chain(
    advantages.group_advantages(),
    clipping.clip_range(0.2, 0.28),
    weights.token_mean(),
  )
  arguments = (
    *(model, optimizer, prepare, losses.policy_gradient()),
    *(state_lib.of(optimizer, placed, mesh), mesh),
  )
  cut = widths.make(*arguments, microbatches=2, **test_update.OPTIONS)
  whole = update_lib.make(*arguments, microbatches=2, **test_update.OPTIONS)
  with jax.set_mesh(mesh):
    rows = jax.device_put(rows, sharding.batch(mesh))
    wanted = whole(jax.tree.map(lambda x: x + 0, state), rows, share)
    with jax.transfer_guard("disallow"):
      got = cut(state, rows, share, found)
  test_update.close(jax.device_get(got), jax.device_get(wanted))


def test_waste_counts_what_each_layout_computes():
  """Two groups of two rows, prompts of 8: 4, 4 and 28, 32 tokens."""
  found = waste.layouts([[[4, 4], [28, 32]]], 8)
  real = 2 * 8 + 4 + 4 + 28 + 32
  assert found["one width"] == (2 * 8 + 4 * 32) / real
  assert found["2 widths, groups in 1"] == (2 * 8 + 2 * 8 + 2 * 32) / real
  # 40 holds the row of 40, that of 36, and both of 12.
  assert found["packed"] == 3 * 40 / real


def test_lengths_are_read_off_a_runs_rollouts(tmp_path):
  rows = [
    {"policy": "a", "round": 0, "prompt_id": p, "tokens": [7] * n}
    for p, n in (("x", 3), ("x", 5), ("y", 2), ("y", 9))
  ]
  lines = "".join(json.dumps(row) + "\n" for row in rows)
  (tmp_path / "rollouts.jsonl").write_text(lines)
  assert waste.groups(tmp_path) == [[[3, 5], [2, 9]]]
