"""The loop's bookkeeping: which prompts a round takes, what it reports."""

import math

import jax
import numpy as np
import pytest

from experiments import tokenizers
from mrl_jax import config as config_lib
from mrl_jax import records
from mrl_jax.tasks import dataset, verifiers, verify
from mrl_jax.text import tokenizer as tokenizer_lib
from mrl_jax.train import checkpoint, report
from mrl_jax.train import policy as policy_lib
from mrl_jax.train import rounds as rounds_lib
from mrl_jax.train import state as state_lib
from tests import test_collate


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
  directory = tmp_path_factory.mktemp("tokenizer")
  tokenizers.write(directory, tokenizers.char())
  tokenizer = tokenizer_lib.load(str(directory))
  actor = policy_lib.Actor("p", "", None, tokenizer, None, None, None)
  return policy_lib.Policy("p", 0, 2, actor, *(None,) * 9)


def task(size, long=()):
  def problem(index):
    text = "1+1=" if index not in long else "1+" * 50 + "1="
    return dataset.Problem(f"t/{index}", text, "2")

  return dataset.Task("t", size, problem, verifiers.exact)


def config(**changes):
  values = {"workdir": "w", "policies": ("p",), "prompts": 4, **changes}
  return config_lib.Config(**{"prompt_limit": 20, **values})


def rounds(order, policy, count, cursor=None):
  cursor = cursor or rounds_lib.Cursor()
  taken = []
  for _ in range(count):
    slots, cursor = rounds_lib.take(config(), [policy], order, cursor)
    assert len(slots["p"]) == 4
    assert all(order.at(s.position) == s.problem for s in slots["p"])
    taken.append([s.problem.id for s in slots["p"]])
  return taken, cursor


@pytest.mark.parametrize("size", [4, 5, 6, 7, 10])
@pytest.mark.parametrize("seed", range(5))
def test_no_round_holds_a_prompt_twice_and_none_is_lost(size, seed, policy):
  order = dataset.Order(task(size), seed)
  taken, cursor = rounds(order, policy, 25)
  for ids in taken:
    assert len(set(ids)) == 4
  counts = np.unique([i for ids in taken for i in ids], return_counts=True)[1]
  assert len(counts) == size
  drawn = sum(counts) + len(cursor.waiting)
  assert drawn == cursor.position
  assert counts.max() - counts.min() <= 2


def test_a_run_that_stops_takes_the_same_prompts_afterwards(policy):
  order = dataset.Order(task(10), 3)
  whole, end = rounds(order, policy, 9)
  first, cursor = rounds(order, policy, 3)
  stored = rounds_lib.Cursor(**cursor._asdict())
  rest, again = rounds(dataset.Order(task(10), 3), policy, 6, stored)
  assert first + rest == whole
  assert again == end


def test_a_prompt_over_the_limit_is_skipped_and_counted(policy):
  order = dataset.Order(task(10, long={2, 5}), 0)
  taken, cursor = rounds(order, policy, 2)
  assert not {"t/2", "t/5"} & {i for ids in taken for i in ids}
  assert cursor.dropped == 2


def test_no_prompt_that_fits_is_an_error_and_no_endless_loop(policy):
  order = dataset.Order(task(6, long=range(6)), 0)
  with pytest.raises(config_lib.ConfigError, match="--prompt_limit=20"):
    rounds_lib.take(config(), [policy], order, rounds_lib.Cursor())


def test_a_round_nothing_of_which_was_scored_has_finite_counts():
  rows = [
    test_collate.rollout([1, 2])._replace(
      reward=math.nan, outcome=verify.Outcome.timeout.value
    )
  ] * 4
  values = report.summarize(records.Round("p", 0, tuple(rows)), [], 2)
  assert values["unscored"] == 4
  assert values["outcome/timeout"] == 4
  assert values["pass@1"] == values["pass@2"] == 0
  assert math.isnan(values["reward"])
  assert not any(math.isinf(v) for v in values.values())


def test_degenerate_groups_are_those_of_equal_rewards():
  rewards = [0.1, 0.1, 0.0, 1.0, math.nan, 1.0]
  rows = [test_collate.rollout([1])._replace(reward=r) for r in rewards]
  values = report.summarize(records.Round("p", 0, tuple(rows)), [], 2)
  assert values["degenerate"] == pytest.approx(2 / 3)
  assert values["unscored"] == 1


def test_a_checkpoint_that_is_being_written_is_not_the_last(tmp_path):
  """Else what the last complete one needs would be removed under it."""
  big = {"x": jax.numpy.ones((1 << 22,))}
  zero = jax.numpy.zeros(())
  state = state_lib.TrainState(big, {}, zero, zero)
  with checkpoint.Checkpoints(tmp_path, keep=3) as checkpoints:
    checkpoints.save(1, {"one": state}, {})
    checkpoints.wait()
    for number in (2, 3):
      checkpoints.save(number, {"one": state}, {})
      assert (tmp_path / str(checkpoints.latest())).is_dir()
      assert all((tmp_path / str(n)).is_dir() for n in checkpoints.all())
    checkpoints.wait()
    assert checkpoints.all() == [1, 2, 3] and checkpoints.latest() == 3
