"""Auxiliary tasks: their prompts, and what is right or wrong about answers."""

import itertools
import re
import types

import numpy as np
import pytest

from experiments import auxiliary, auxiliary_tasks
from experiments import auxiliary_responses as responses
from mrl_jax import config as config_lib
from mrl_jax.shaping import pairs
from mrl_jax.tasks import arithmetic, countdown, splits
from mrl_jax.tasks.dataset import Problem, Verifier
from tests import runs

CHAINS = {task.name: task for task in auxiliary_tasks.chains()}
COUNTDOWNS = {task.name: task for task in auxiliary_tasks.countdowns()}


def rng(seed=0):
  return np.random.default_rng(seed)


def test_a_chain_is_of_what_its_name_says_and_not_of_the_test_split():
  assert len(CHAINS) == 133
  for name, task in CHAINS.items():
    _, operands, operators, length = name.split("/")
    low, high = operands.split("-")
    signs = re.escape(operators)
    pattern = f"[{low}-{high}]([{signs}][{low}-{high}]){{{length}}}="
    for problem in task.problems(3, 6):
      assert re.fullmatch(pattern, problem.prompt), (name, problem.prompt)
      assert not splits.is_test(problem.prompt)
      assert arithmetic.running_values(problem.prompt) == problem.answer


def test_some_chains_would_be_of_the_test_split(monkeypatch):
  monkeypatch.setattr(splits, "is_test", lambda prompt: False)
  problems = CHAINS["chain/0-9/+-*/5"].problems(0, 64)
  monkeypatch.undo()
  assert any(splits.is_test(problem.prompt) for problem in problems)


@pytest.mark.parametrize("name", ["chain/0-9/+-*/5", "countdown/4/6-9/21-50"])
def test_problems_follow_from_the_seed(name):
  task = (CHAINS | COUNTDOWNS)[name]
  problems = task.problems(1, 8)
  assert problems == task.problems(1, 9)[:8]
  prompts = {problem.prompt for problem in problems}
  others = {problem.prompt for problem in task.problems(2, 8)}
  assert len(prompts) == 8 and not prompts & others


def test_a_wrong_chain_slips_once_then_goes_on_or_is_lost():
  task = CHAINS["chain/0-9/+-*/6"]
  problems = task.problems(0, 300)
  texts = [text for (text,) in task.wrong(problems, rng())]
  places, worked_on = [], []
  for problem, text in zip(problems, texts, strict=True):
    assert len(text) == len(problem.answer)
    pairs_ = zip(text, problem.answer, strict=True)
    place = [a == b for a, b in pairs_].index(False)
    places.append(place)
    if place < 4:
      rest = f"{text[place]}{problem.prompt[2 * place + 3 :]}"
      tail = arithmetic.running_values(rest)
      worked_on.append(tail == text[place + 1 :])
  assert set(places) == set(range(6))
  assert 0.4 < np.mean(worked_on) < 0.65


def test_countdowns_share_no_prompt_and_keep_to_their_ranges():
  seen = set()
  for name, task in COUNTDOWNS.items():
    _, count, largest, target = name.split("/")
    for problem in task.problems(0, 6):
      numbers, wanted = countdown.read(problem.prompt)
      assert len(numbers) == int(count)
      for value, band in ((max(numbers), largest), (wanted, target)):
        low, high = map(int, band.split("-"))
        assert low <= value <= high, (name, problem.prompt)
      assert not splits.is_test(problem.prompt)
      assert problem.prompt not in seen
      seen.add(problem.prompt)
  assert len(seen) == 6 * 17


def test_a_task_with_few_prompts_gives_them_all(monkeypatch):
  monkeypatch.setattr(auxiliary_tasks, "_PATIENCE", 20)
  problems = COUNTDOWNS["countdown/3/1-5/21-50"].problems(0, 200)
  assert 30 < len(problems) < 200
  assert len({problem.prompt for problem in problems}) == len(problems)


def test_a_wrong_countdown_has_one_mistake():
  problem = Problem("id", "3,5,2,8=5;", "3+5*2-8")
  task = COUNTDOWNS["countdown/4/6-9/0-20"]
  kinds = set()
  texts = itertools.chain(*task.wrong([problem] * 40, rng()))
  for text in texts:
    changed = [a != b for a, b in zip(text, problem.answer, strict=True)]
    numbers = sorted(text[::2]) == sorted(problem.answer[::2])
    kind = (sum(changed[::2]), sum(changed[1::2]), numbers)
    # One sign; two numbers that changed places; one number.
    assert kind in ((0, 1, True), (2, 0, True), (1, 0, False)), text
    kinds.add(kind)
  assert len(kinds) == 3


def test_corrupted_pairs_are_right_and_wrong():
  tasks = [CHAINS["chain/3-9/-*/7"], *list(COUNTDOWNS.values())[::5]]
  skipped = responses.Skipped()
  done = []
  found = responses.corrupted(tasks, 12, 5, skipped, done.append)
  assert found == responses.corrupted(tasks, 12, 5, skipped)
  assert found != responses.corrupted(tasks, 12, 6, skipped)
  assert len(found) == 12 * len(tasks) and not skipped
  assert sum(done) == len(tasks)
  for pair in found:
    texts = (pair.chosen, pair.rejected)
    if pair.task.startswith("chain/"):
      right = [arithmetic.running_values(pair.prompt) == t for t in texts]
    else:
      numbers, wanted = countdown.read(pair.prompt)
      right = [
        eval(text) == wanted
        and sorted(map(int, re.findall(r"\d+", text))) == sorted(numbers)
        for text in texts
      ]
    assert right == [True, False], pair
    assert pair.share == 0.5


def test_nothing_is_taken_without_the_verifier():
  problems = [
    Problem("both", "1+1=", "2"),
    Problem("unsolved", "2+2=", "5"),
    Problem("right", "3+3=", "6"),
  ]
  wrong = {"both": ["2", "3", "4"], "unsolved": ["7"], "right": ["6", "6"]}
  task = auxiliary_tasks.Variant(
    "sums/small",
    lambda seed, count: problems[:count],
    Verifier(lambda text, p: text == str(2 * int(p.prompt[0])), quick=True),
    lambda problems, generator: [wrong[p.id] for p in problems],
  )
  skipped = responses.Skipped()
  found = responses.corrupted([task], 3, 0, skipped)
  assert found == [pairs.Pair("sums/small", "1+1=", "2", "3")]
  assert skipped == {
    ("sums", "its solution is not right"): 1,
    ("sums", "no response to it is wrong"): 1,
  }


def test_errors_follow_from_the_seed():
  task = CHAINS["chain/0-9/+-*/6"]
  problems = task.problems(0, 8)
  same = task._replace(problems=lambda seed, count: problems)
  found = [
    responses.corrupted([same], 8, seed, responses.Skipped()) for seed in (0, 1)
  ]
  assert all(a.prompt == b.prompt for a, b in zip(*found, strict=True))
  assert found[0] != found[1]


def answer(text, outcome, finished=True):
  return types.SimpleNamespace(text=text, outcome=outcome, finished=finished)


def paired(*answers):
  skipped = responses.Skipped()
  task = CHAINS["chain/0-9/+/2"]
  problem = Problem("id", "1+1+1=", "23")
  return responses._paired(task, problem, answers, skipped), skipped


def test_a_prompt_gives_few_pairs_of_different_texts():
  right = answer("23", "correct")
  wrong = [answer(text, "wrong") for text in ("24", "24", "25", "26")]
  found, skipped = paired(answer(" ", "wrong"), *wrong, right, right, right)
  assert [(p.chosen, p.rejected) for p in found] == [("23", "24"), ("23", "25")]
  assert {p.share for p in found} == {3 / 8} and not skipped
  assert {(p.task, p.prompt) for p in found} == {("chain/0-9/+/2", "1+1+1=")}


def test_what_has_no_end_or_no_verdict_is_no_response():
  right, wrong = answer("23", "correct"), answer("24", "wrong")
  cut = wrong.__class__(**{**vars(wrong), "finished": False})
  unread = answer("x", "timeout")
  found, skipped = paired(right, cut, unread)
  assert not found
  assert skipped == {("chain", "no response to it is wrong"): 1}
  found, skipped = paired(wrong, unread)
  assert not found
  assert skipped == {("chain", "no response to it is right"): 1}


def test_a_policy_answers_and_its_verified_answers_are_paired():
  [policy] = runs.learned("char")
  names = ("chain/0-9/+-*/3", "chain/0-9/+/2")
  unread = auxiliary_tasks.Variant(
    "text/any",
    lambda seed, count: [Problem("id", "Why?", "so")] * count,
    Verifier(arithmetic.check, quick=True),
    auxiliary_tasks._wrong_chains,
    limit=8,  # so that it is asked alone
  )
  tasks = [*(CHAINS[name] for name in names), unread]
  skipped, done = responses.Skipped(), []
  found = responses.sampled(tasks, policy, 8, 8, 0, skipped, done.append)
  assert sum(done) == len(tasks)
  assert list(dict.fromkeys(pair.task for pair in found)) == list(names)
  assert skipped["text", "its prompt is not in the vocabulary"] == 8
  prompts = {(pair.task, pair.prompt) for pair in found}
  assert len(prompts) + sum(skipped.values()) == 8 * len(tasks)
  for pair in found:
    assert (
      arithmetic.running_values(pair.prompt) == pair.chosen != pair.rejected
    )
    assert pair.share * 8 in range(1, 8)
  again = responses.sampled(tasks[:1], policy, 8, 8, 0, responses.Skipped())
  assert again == [pair for pair in found if pair.task == names[0]]


def test_build_tells_what_came_out(capsys):
  found = auxiliary.build("corrupted", "", 2, 2, 0, ("chain", "countdown"))
  assert len(found) == 2 * (133 + 17)
  text = capsys.readouterr().out
  assert re.search(r"chain +\| +133 \| +266 ", text)
  assert re.search(r"countdown +\| +17 \| +34 ", text)


def test_build_refuses_what_gives_nothing(monkeypatch):
  with pytest.raises(config_lib.ConfigError, match="chain, countdown, gym"):
    auxiliary.build("corrupted", "", 2, 2, 0, ("chains",))
  monkeypatch.setitem(auxiliary.FAMILIES, "none", lambda: [])
  with pytest.raises(config_lib.ConfigError, match="not one pair"):
    auxiliary.build("corrupted", "", 2, 2, 0, ("none",))
