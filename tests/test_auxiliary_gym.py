"""Auxiliary tasks of text: which families there are, and what is wrong."""

import re

import numpy as np

from experiments import auxiliary_gym
from experiments import auxiliary_responses as responses
from mrl_jax.tasks import gym, splits
from mrl_jax.tasks.dataset import Problem


def rng(seed=0):
  return np.random.default_rng(seed)


def test_families_whose_scorers_cannot_be_trusted_are_left_out():
  names = {
    "puzzle24": "take another one's solution",
    "game_of_life_halting": "cannot be trusted",
    "graph_color": "no solutions",
    "rush_hour": "more than 400 characters",
    "composite": "made of others",
    "word_ladder": "order of a set",
  }
  found, refused = auxiliary_gym.families([*names, "chain_sum"])
  assert [task.name for task in found] == ["gym/chain_sum"]
  assert set(refused) == set(names)
  for name, reason in names.items():
    assert reason in refused[name]


def test_families_give_verified_pairs_of_short_texts():
  names = ["bf", "chain_sum", "syllogism", "time_intervals"]
  tasks, refused = auxiliary_gym.families(names)
  assert not refused
  skipped = responses.Skipped()
  found = responses.corrupted(tasks, 8, 2, skipped)
  assert len(found) == 8 * len(names) and not skipped
  assert len({pair.prompt for pair in found}) == len(found)
  for pair in found:
    assert len(pair.prompt) + len(pair.chosen) <= auxiliary_gym.LONGEST
    assert not splits.is_test(pair.prompt)
  by_prompt = {pair.prompt: pair for pair in found}
  judged = 0
  for name in names:
    task = gym.make(name, size=48, seed=2)
    for problem in map(task.problem, range(48)):
      pair = by_prompt.get(problem.prompt)
      if pair and pair.task == f"gym/{name}":
        judged += 1
        right = task.verify.check(pair.chosen, problem).reward
        wrong = task.verify.check(pair.rejected, problem).reward
        assert (right, wrong) == (1.0, 0.0)
  assert judged >= len(found)
  choices = {p.rejected for p in found if p.task == "gym/syllogism"}
  assert choices <= {"Yes", "No"}


def test_a_changed_solution_keeps_its_form():
  for seed in range(30):
    for text in auxiliary_gym._changed("(-3.5, 12)", rng(seed)):
      assert re.fullmatch(r"\(-?[\d.]+, -?[\d.]+\)", text)
      assert text != "(-3.5, 12)"
    changed = auxiliary_gym._changed("2 + 3i", rng(seed))
    assert len(changed) == 1 and re.fullmatch(r"\d \+ \di", changed[0])
    words = auxiliary_gym._changed("to be or not", rng(seed))
    assert any(sorted(w.split()) == ["be", "not", "or", "to"] for w in words)
  assert auxiliary_gym._changed("Yes", rng()) == []


def test_names_and_numbers_do_not_change_places():
  for seed in range(30):
    for text in auxiliary_gym._changed("A=7,G=0", rng(seed)):
      assert re.fullmatch(r"[A-Z]=\d,[A-Z]=\d", text)


def test_solutions_of_others_look_like_the_right_one():
  numbers = [str(number) for number in range(100_000, 100_030)]
  times = ["5 days", "6 days"]  # as long as the numbers
  lengths = ["12", "13", "7777777", "888888888", "111111111111"]
  for seed in range(10):
    some = auxiliary_gym._others("5 days", [*times, *numbers], rng(seed))
    assert some[0] == "6 days"
    some = auxiliary_gym._others("12", lengths, rng(seed))
    assert some == ["13", "7777777", "888888888"]


def test_where_solutions_are_chosen_so_is_the_wrong_one():
  answers = ["north", "south", "west"] * 4
  problems = [Problem("id", "Where?", answer) for answer in answers]
  found = auxiliary_gym._wrong(problems, rng())
  for problem, texts in zip(problems, found, strict=True):
    assert sorted([*texts, problem.answer]) == ["north", "south", "west"]
