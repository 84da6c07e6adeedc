"""Countdown: any right expression counts, and nothing else does."""

import itertools

import pytest

from mrl_jax.tasks import countdown, dataset, splits, verify

PROBLEM = dataset.Problem("c", "3,5,2=13;", "3+5*2")


@pytest.mark.parametrize("text", ["3+5*2", "5*2+3", "2*5+3", " 3+2*5\n"])
def test_right(text):
  assert countdown.check(text, PROBLEM)


@pytest.mark.parametrize(
  "text",
  [
    "",
    "13",
    "3+5",  # not every number
    "3+5*2+0",
    "3+5*2*1",
    "5+5+3",
    "03+5*2",
    "(3+5*2)",
    "3 + 5*2",
    "3+5*2=13",
    "+3+5*2",
    "3+5**2",
    "3+52",
    "3-5*2",
    "3+5*2;",
    "٣+5*2",
    "9" * 5000,
    "3+5*2\n3",
  ],
)
def test_wrong(text):
  assert not countdown.check(text, PROBLEM)


def test_values_follow_precedence():
  for text in ("2-3*4+1", "2*3*4-5", "7", "1-1-1", "9*9-8*7+6", "10-2*5"):
    assert countdown.value(text) == eval(text)


@pytest.mark.parametrize("split", splits.SPLITS)
def test_problems_are_solved_by_their_answer_and_stay_in_their_split(split):
  task = countdown.make(split=split, seed=3, max_numbers=5)
  for problem in map(task.problem, range(60)):
    assert verify.grade(task.verify.check, problem.answer, problem).reward == 1
    assert splits.is_test(problem.prompt) == (split == "test")
    numbers, target = countdown.read(problem.prompt)
    assert problem.extra["difficulty"] == len(numbers)
    assert 3 <= len(numbers) <= 5
    assert 0 <= target <= 99
    assert all(1 <= number <= 9 for number in numbers)
  assert task.problem(7) == task.problem(7)
  assert task.problem(7).id != task.problem(8).id


def test_solutions_are_all_there_are():
  task = countdown.make(seed=1)
  several = 0
  for problem in map(task.problem, range(12)):
    numbers, target = countdown.read(problem.prompt)
    expected = set()
    for order in itertools.permutations(map(str, numbers)):
      for signs in itertools.product("+-*", repeat=len(numbers) - 1):
        text = "".join(map("".join, zip(order, (*signs, ""), strict=True)))
        if eval(text) == target:
          expected.add(text)
    found = list(countdown.solutions(problem))
    assert len(found) == len(set(found))
    assert set(found) == expected
    assert problem.answer in expected
    assert all(countdown.check(text, problem) for text in found)
    several += len(found) > 1
  assert several > 6


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"min_numbers": 5, "max_numbers": 4}, "min_numbers=5"),
    ({"max_numbers": 9}, "max_numbers=9"),
    ({"largest": 0}, "largest must be 1 or more, got 0"),
    ({"split": "dev"}, "split must be one of"),
    ({"size": 0}, "size must be 1 or more"),
    ({"seed": -1}, "seed must be 0 or more"),
  ],
)
def test_bad_arguments_are_named(arguments, message):
  with pytest.raises(ValueError, match=message):
    countdown.make(**arguments)


def test_a_task_of_other_ranges_has_other_ids():
  ids = {
    countdown.make(**arguments).problem(0).id
    for arguments in ({}, {"max_numbers": 5}, {"largest": 5}, {"seed": 1})
  }
  assert len(ids) == 4
