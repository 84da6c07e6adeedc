"""A stage: what is on disk, which groups an update gets, and the laws."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl_jax import records
from mrl_jax.train import spill, stage
from tests import test_collate

NAN = float("nan")


def rollout(group, sample=0, reward=0.0, tokens=(3, 4)):
  return test_collate.rollout(list(tokens))._replace(
    prompt_id=f"p{group}", sample=sample, reward=reward, version=7
  )


def same(left, right):
  for name in records.Rollout._fields:
    a, b = getattr(left, name), getattr(right, name)
    if isinstance(a, np.ndarray):
      assert a.dtype == b.dtype, name
    if isinstance(a, str | tuple | bool):
      assert a == b, name
    else:
      np.testing.assert_array_equal(a, b, name)


@settings(max_examples=20, deadline=None)
@given(
  st.lists(
    st.tuples(
      st.text(max_size=5),
      st.lists(st.integers(0, 2**31 - 1), max_size=9),
      st.sampled_from([0.0, 1.0, 0.1, NAN]),
    ),
    min_size=1,
    max_size=6,
  )
)
def test_rows_come_back_from_disk_as_they_were(tmp_path_factory, rows):
  shelf = spill.Shelf(tmp_path_factory.mktemp("shelf"))
  written = [
    rollout(i, i, reward, tokens)._replace(text=text, finished=bool(i % 2))
    for i, (text, tokens, reward) in enumerate(rows)
  ]
  shelf.put(1, written[1:])
  shelf.put(0, written[:1])
  found = shelf.rows()
  assert len(found) == len(written)
  for left, right in zip(written, found, strict=True):
    same(left, right)
  for index, row in enumerate(written):
    same(row, found[index])
    same(row, found[index - len(written)])
  assert [row.sample for row in found[1:]] == [*range(1, len(written))]
  with pytest.raises(IndexError):
    found[len(written)]


def test_a_part_is_whole_or_not_there(tmp_path):
  shelf = spill.Shelf(tmp_path)
  (tmp_path / "part-000003.new").write_bytes(b"half of a part")
  assert shelf.parts() == []
  shelf.put(3, [rollout(0)])
  assert shelf.parts() == [3]
  assert len(shelf.rows()) == 1


def stage_of(rewards, number=0, **changes):
  own = tuple(
    rollout(group, sample, reward)
    for group, row in enumerate(rewards)
    for sample, reward in enumerate(row)
  )
  return records.Round("p", number, own, **changes)


def plan(round_, updates, samples=2, **changes):
  options = {"seed": 0, "shuffle": True, "drop": True, "multiple": 1}
  schedule = stage.Schedule(1, len(round_.own) // samples, updates)
  return stage.plan(round_, schedule, samples, **{**options, **changes})


@given(
  st.lists(st.booleans(), min_size=1, max_size=40),
  st.integers(1, 12),
  st.sampled_from([1, 2, 3]),
  st.booleans(),
  st.booleans(),
)
def test_every_group_that_teaches_is_in_one_update(
  useful, updates, multiple, shuffle, drop
):
  round_ = stage_of([(0.0, 1.0 if u else 0.0) for u in useful])
  found = plan(round_, updates, shuffle=shuffle, drop=drop, multiple=multiple)
  kept = [i for i, u in enumerate(useful) if u or not drop]
  flat = [group for update in found.updates for group in update]
  assert sorted(flat) == kept
  assert found.dropped == len(useful) - len(kept)
  sizes = [len(update) for update in found.updates]
  assert len(sizes) == min(updates, len(kept))
  if sizes:
    assert max(sizes) - min(sizes) <= 1
    assert found.size >= max(sizes)
    assert not drop or found.size % multiple == 0
  if not shuffle:
    assert flat == kept


def test_groups_are_shuffled_by_seed_policy_and_round():
  rewards = [(0.0, 1.0)] * 30
  orders = [
    plan(stage_of(rewards, number), 3, seed=seed).updates
    for number, seed in [(0, 0), (0, 0), (1, 0), (0, 1)]
  ]
  assert orders[0] == orders[1]
  assert len({*orders}) == 3
  other = plan(stage_of(rewards)._replace(policy="q"), 3)
  assert other.updates != orders[0]
  # One update is a sum over all groups: their order is left alone.
  assert plan(stage_of(rewards), 1).updates == (tuple(range(30)),)


def test_a_group_is_dropped_by_the_spread_of_its_scored_rewards():
  rewards = [(0.1, 0.1), (0.0, 1.0), (NAN, 1.0), (NAN, NAN), (1.0, 1.0)]
  round_ = stage_of(rewards)
  assert plan(round_, 1).updates == ((1,),)
  # What a peer says about a group can teach where own rewards do not.
  foreign = records.Foreign(
    "p0", "q", "r", np.asarray([1], np.int32), "", True, 1.0
  )
  tally = records.Tally(2.0, 1.0, 1.0)
  heard = round_._replace(extra=(foreign,), peers={"p4": tally})
  assert plan(heard, 1).updates == ((0, 1, 4),)
  nothing = round_._replace(peers={"p4": records.Tally(0.0, 0.0, 0.0)})
  assert plan(nothing, 1).updates == ((1,),)
  assert plan(stage_of([(1.0, 1.0)]), 4).updates == ()
