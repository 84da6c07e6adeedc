"""Novelty: what it is, when it counts, and what it adds to an advantage."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl_jax import compose, losses, recipes
from mrl_jax.explore import memory as memory_lib
from mrl_jax.explore import novelty
from mrl_jax.kernels import nearest
from mrl_jax.transforms import advantages, weights
from tests import factories, oracle

X, Y, Z = np.eye(3, dtype=np.float32)
HALF = np.asarray([0.6, 0.8, 0.0], np.float32)


def call(embeddings, pool, memory, filled, warm):
  arrays = (jnp.asarray(a) for a in (embeddings, pool, memory, filled))
  return np.asarray(nearest.novelty(*arrays, warm))


def test_by_hand():
  rows = np.stack([X, X, HALF, Z])[None]
  memory = np.stack([Y, Y])[None]
  everyone = np.ones((1, 4), bool)
  found = call(rows, everyone, memory, np.ones((1, 2), bool), 2)
  # X has a twin; HALF is 0.8 from Y in memory; Z is at right angles to all.
  np.testing.assert_allclose(found, [[0.0, 0.0, 0.2, 1.0]], atol=1e-6)
  nothing = call(rows, everyone, memory, np.asarray([[True, False]]), 2)
  assert (nothing == 0).all()


def test_an_opposite_direction_is_more_than_new_and_a_row_is_not_its_own():
  rows = np.stack([X, -X])[None]
  memory = np.zeros((1, 1, 3), np.float32)
  one = np.ones((1, 2), bool)
  found = call(rows, one, memory, np.zeros((1, 1), bool), 0)
  np.testing.assert_allclose(found, [[2.0, 2.0]])
  alone = np.asarray([[True, False]])  # the second has a neighbour, itself not
  found = call(rows, alone, memory, np.zeros((1, 1), bool), 0)
  np.testing.assert_allclose(found, [[0.0, 2.0]])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_the_kernel_is_the_oracle(seed):
  rng = np.random.default_rng(seed)
  groups, samples, size = rng.integers(1, 5, 3)
  rows = novelty.unit(rng.normal(size=(groups * samples, 4)))
  rows = rows.reshape(groups, samples, 4)
  memory = novelty.unit(rng.normal(size=(groups * size, 4)))
  memory = memory.reshape(groups, size, 4)
  filled = rng.random((groups, size)) < 0.7
  pool = rng.random((groups, samples)) < 0.7
  warm = int(rng.integers(0, size + 1))
  found = call(rows, pool, memory, filled, warm)
  for n in range(groups):
    entries = memory[n][filled[n]]
    expected = oracle.novelty(rows[n], pool[n], entries, warm)
    np.testing.assert_allclose(found[n], expected, atol=2e-6)


def test_memories_are_first_in_first_out_and_bounded_twice():
  memory = memory_lib.Memory(size=3, prompts=2)
  rows = np.arange(10, dtype=np.float32)[:, None]
  memory = memory.push([("a", rows[:2]), ("b", rows[2:3]), ("a", rows[3:6])])
  assert memory.entries["a"].ravel().tolist() == [3, 4, 5]
  before = memory
  memory = memory.push([("c", rows[6:7])])
  assert list(memory.entries) == ["a", "c"]  # b was used longest ago
  assert memory.evicted == 1
  assert list(before.entries) == ["b", "a"]  # a push changes nothing
  assert memory.holding(["a", "b", "c"], 1).tolist() == [True, False, True]
  assert memory.push([("c", rows[:0])]).entries.keys() == {"a", "c"}


def test_a_memory_comes_back_from_its_parts():
  memory = memory_lib.Memory(2, 9)
  assert memory.unpack(*memory.pack()) == memory
  rows = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
  memory = memory.push([("b", rows[:2]), ("a", rows[2:])])
  plain, arrays = memory.pack()
  again = memory_lib.Memory(2, 9).unpack(plain, arrays)
  assert list(again.entries) == ["b", "a"]
  for name in "ab":
    np.testing.assert_array_equal(again.entries[name], memory.entries[name])
  with pytest.raises(ValueError, match="rows for counts"):
    memory.unpack(plain, {"rows": rows[:2]})


def visit(memory, rule, rows, correct=(True, True)):
  rows = np.asarray(rows, np.float32)[None]
  return novelty.score(memory, ["p"], rows, np.asarray([correct]), rule)


def test_nothing_is_new_until_the_memory_holds_g():
  rule = novelty.Rule()
  memory = rule.memory(2)
  found, memory = visit(memory, rule, [X, Z])
  assert (found == 0).all()  # the memory was empty
  found, memory = visit(memory, rule, [X, HALF], (True, False))
  np.testing.assert_allclose(found, [[0.0, 0.4]], atol=1e-6)
  found, memory = visit(memory, rule, [Z, Z])  # Z was forgotten; a twin is not
  assert (found == 0).all()


def test_wrong_rollouts_are_remembered_unless_the_pool_is_of_right_ones():
  for correct, expected in ((False, [[0.0, 0.0]]), (True, [[1.0, 0.0]])):
    rule = novelty.Rule(correct=correct)
    memory = rule.memory(2)
    _, memory = visit(memory, rule, [X, X], (False, False))
    _, memory = visit(memory, rule, [Y, Y])
    rule3 = rule._replace(size=4)
    memory = memory._replace(size=4)
    _, memory = visit(memory, rule3, [X, X], (False, False))
    found, _ = visit(memory, rule3, [X, Y])
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_group_twice_in_a_round_sees_the_memory_as_it_was():
  rule = novelty.Rule()
  _, memory = visit(rule.memory(2), rule, [X, X])
  rows = np.stack([np.stack([Y, X]), np.stack([Y, X])])
  found, after = novelty.score(
    memory, ["p", "p"], rows, np.ones((2, 2), bool), rule
  )
  np.testing.assert_allclose(found, [[1.0, 0.0]] * 2, atol=1e-6)
  assert len(after.entries["p"]) == 2


def test_many_groups_are_scored_block_by_block():
  rng = np.random.default_rng(1)
  rule, count = novelty.Rule(), 2 * novelty._BLOCK + 3
  names = [f"p{n}" for n in range(count)]
  first, second = (
    novelty.unit(rng.normal(size=(count * 2, 4))).reshape(count, 2, 4)
    for _ in range(2)
  )
  right = np.ones((count, 2), bool)
  _, memory = novelty.score(rule.memory(2), names, first, right, rule)
  found, _ = novelty.score(memory, names, second, right, rule)
  expected = [
    oracle.novelty(rows, [True] * 2, earlier, 2)
    for rows, earlier in zip(second, first, strict=True)
  ]
  np.testing.assert_allclose(found, expected, atol=2e-6)


def test_a_memory_that_cannot_hold_g_is_refused():
  with pytest.raises(ValueError, match="size=3 must be 0 or at least G=4"):
    novelty.Rule(size=3).memory(4)


def test_directions_are_centred_and_zero_stays_zero():
  rows = np.asarray([[3.0, 1.0], [1.0, 1.0]])
  found = novelty.unit(rows, np.asarray([1.0, 1.0]))
  np.testing.assert_array_equal(found, [[1.0, 0.0], [0.0, 0.0]])


def made(rewards, nu, rule):
  rows = factories.batch(rows=4, steps=3, samples=4)._replace(
    rewards=jnp.asarray(rewards, jnp.float32),
    bonus=jnp.asarray(nu, jnp.float32),
  )
  base = recipes.grpo(
    loss=losses.policy_gradient(), reduction=weights.token_mean()
  )
  recipe = recipes.novelty(base, rule)
  assert recipe.novelty == rule
  batch = recipe.prepare(rows)
  return np.asarray(losses.token_advantages(batch)[:, 0]), batch


NU = (0.0, 0.5, 1.0, 0.25)


def test_a_group_of_right_answers_still_learns():
  found, batch = made([1, 1, 1, 1], NU, novelty.Rule())
  np.testing.assert_allclose(found, 0.1 * np.asarray(NU), rtol=1e-6)
  assert (np.asarray(batch.advantages) == 0).all()


def test_the_bonus_is_of_right_rows_alone_and_is_not_centred():
  rewards = np.asarray([1.0, 0.0, np.nan, 1.0])
  found, _ = made(rewards, NU, novelty.Rule(weight=0.2))
  base = oracle.advantages(rewards, [0] * 4, np.isfinite(rewards), ddof=1)
  expected = base + 0.2 * np.asarray(NU) * (rewards > 0)
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_before_normalisation_the_reward_itself_is_raised():
  rewards = np.asarray([1.0, 0.0, 1.0, 1.0])
  found, batch = made(rewards, NU, novelty.Rule(before=True))
  raised = rewards + 0.1 * np.asarray(NU) * (rewards > 0)
  expected = oracle.advantages(raised, [0] * 4, [True] * 4)
  np.testing.assert_allclose(found, expected, rtol=1e-4)
  assert (np.asarray(batch.bonus) == 0).all()


def test_without_weight_it_is_the_base():
  plain = compose.chain(advantages.group_advantages())
  rows = factories.batch(rows=4, samples=4)._replace(
    bonus=jnp.asarray(NU, jnp.float32)
  )
  found = advantages.add_novelty(0.0)(plain(rows))
  np.testing.assert_array_equal(found.advantages, plain(rows).advantages)
  assert (np.asarray(found.bonus) == 0).all()
