"""Laws of whole runs: on-policy GRPO and Mu-GRPO are one loop."""

import jax
import numpy as np
import pytest

from mrl_jax import config as config_lib
from mrl_jax.exchange import store
from mrl_jax.train import metrics
from tests import runs

STAGED = {
  "clip_low": 0.5,
  "clip_high": 1.0,
  "dual_clip": 3.0,
  "veto": "suffix",
  "part": 4,
  "save_updates": 1,
}


@pytest.fixture(scope="module")
def char():
  return runs.learned("char")[0]


def train(char, workdir, **changes):
  """Updates and final parameters of a short run on one device."""
  values = {
    "policies": (char,),
    "task_args": '{"max_operations": 3}',
    "rounds": 3,
    "prompts": 8,
    "samples": (8,),
    "completion_limit": 8,
    "rescore": True,
    "lr": (2e-4,),
    "mesh": (1, 1, 1),
    "shares": (1,),
    "progress": "none",
    **changes,
  }
  config = config_lib.Config(workdir=str(workdir), **values)
  _, states = runs.train(config, store.Memory())
  updates = metrics.read(workdir / "updates.jsonl")
  return updates, jax.device_get(states["char"].params)


def equal(left, right):
  for a, b in zip(*map(jax.tree.leaves, (left, right)), strict=True):
    np.testing.assert_array_equal(a, b)


def test_stages_of_one_update_are_on_policy_grpo_to_the_bit(char, tmp_path):
  plain, params = train(char, tmp_path / "plain")
  staged, same = train(char, tmp_path / "staged", **STAGED)
  equal(params, same)
  assert [u["grad_norm"] for u in plain] == [u["grad_norm"] for u in staged]
  assert [u["staleness"] for u in staged] == [0, 0, 0]
  assert [u["veto"] for u in staged] == [0.0, 0.0, 0.0]
  for update in staged:
    assert update["ratio_max"] == pytest.approx(1.0, abs=1e-3)


def test_a_veto_that_never_triggers_is_relaxed_clipping_to_the_bit(
  char, tmp_path
):
  stale = {**STAGED, "updates": 4, "rounds": 2, "drop_degenerate": True}
  relaxed, params = train(char, tmp_path / "a", **{**stale, "veto": "none"})
  never, same = train(char, tmp_path / "b", **stale, veto_tau=0.0)
  equal(params, same)
  assert len(relaxed) == len(never) > 4
  vetoed, other = train(char, tmp_path / "c", **stale, veto_tau=0.95)
  assert max(u["veto"] for u in vetoed) > 0
  with pytest.raises(AssertionError):
    equal(params, other)
  for update in vetoed:
    first = update["staleness"] == 0
    assert (update["log_ratio_max"] < 1e-3) == first
    assert update["ratio_max"] > 0
    assert not (first and update["veto"])


def test_where_a_round_is_saved_or_cut_into_parts_changes_nothing(
  char, tmp_path
):
  stale = {**STAGED, "updates": 4, "rounds": 2, "drop_degenerate": True}
  whole = {**stale, "part": 0, "save_updates": 0}
  _, params = train(char, tmp_path / "whole", **whole)
  _, same = train(char, tmp_path / "parts", **stale)
  equal(params, same)


def test_scores_of_other_weights_are_noticed(char, tmp_path, monkeypatch):
  from mrl_jax.train import stage

  score = stage.Stage.score

  def wrong(self, params, numbers):
    score(self, jax.tree.map(lambda x: 1.1 * x, params), numbers)

  monkeypatch.setattr(stage.Stage, "score", wrong)
  with pytest.raises(RuntimeError, match="not of the policy that is being"):
    train(char, tmp_path / "run", rounds=1)


def test_microbatches_of_their_own_widths_waste_less(char, tmp_path):
  """Chains of up to 20 steps; the order of sums is all that changes."""
  values = {
    "task_args": '{"max_operations": 20}',
    "completion_limit": 32,
    "microbatches": 2,
    "rounds": 1,
  }
  whole, params = train(char, tmp_path / "whole", **values)
  cut, other = train(char, tmp_path / "cut", **values, length_buckets=2)
  for a, b in zip(*map(jax.tree.leaves, (params, other)), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-4)
  for a, b in zip(whole, cut, strict=True):
    assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
  found = [
    metrics.read(tmp_path / name / "metrics.jsonl") for name in ("whole", "cut")
  ]
  for a, b in zip(*found, strict=True):
    assert 0 < b["padding"] < a["padding"] < 1
