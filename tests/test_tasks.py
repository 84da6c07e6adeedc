"""Problems are stable, orders resume exactly, and bad input is named."""

import decimal
import functools
import json
import pickle
import subprocess
import sys

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from mrl_jax.tasks import (
  arithmetic,
  dataset,
  files,
  gym,
  splits,
  verifiers,
  verify,
)
from mrl_jax.tasks.dataset import Problem, Task


def numbered(size):
  return Task("n", size, lambda i: Problem(f"n/{i}", str(i)), verifiers.exact)


def ids(order, start, stop):
  return [order.at(position).id for position in range(start, stop)]


# Order -----------------------------------------------------------------------


@pytest.mark.parametrize("stop", [0, 3, 9, 10, 14, 20, 27])
def test_an_order_resumes_anywhere(stop):
  """Ten shuffled prompts, stopped early, at an epoch's end, in epoch 2."""
  whole = ids(dataset.Order(numbered(10), 7), 0, 30)
  first = ids(dataset.Order(numbered(10), 7), 0, stop)
  assert first + ids(dataset.Order(numbered(10), 7), stop, 30) == whole


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**31 - 1))
def test_every_epoch_is_a_permutation(size, seed):
  order = dataset.Order(numbered(size), seed)
  want = {f"n/{i}" for i in range(size)}
  for epoch in range(3):
    assert set(ids(order, epoch * size, (epoch + 1) * size)) == want


def test_epochs_and_seeds_differ():
  order = dataset.Order(numbered(10), 7)
  epochs = [tuple(ids(order, 10 * e, 10 * e + 10)) for e in range(4)]
  assert len(set(epochs)) == 4
  assert ids(dataset.Order(numbered(10), 8), 0, 10) != list(epochs[0])


def test_the_order_is_the_same_in_another_process():
  code = (
    "from mrl_jax.tasks import arithmetic, dataset;"
    "order = dataset.Order(arithmetic.make(size=10), 7);"
    "print([order.at(i).prompt for i in range(25)])"
  )
  printed = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  ).stdout
  order = dataset.Order(arithmetic.make(size=10), 7)
  assert printed.strip() == str([order.at(i).prompt for i in range(25)])


def test_an_endless_task_is_its_own_order():
  task = arithmetic.make(seed=3)
  assert task.size is None
  order = dataset.Order(task, 99)
  assert [order.at(i) for i in (0, 5, 10**12)] == [
    task.problem(i) for i in (0, 5, 10**12)
  ]


def test_positions_and_sizes_are_checked():
  with pytest.raises(ValueError, match="got -1"):
    dataset.Order(numbered(3), 0).at(-1)
  with pytest.raises(ValueError, match="no problems"):
    dataset.Order(numbered(0), 0)
  with pytest.raises(ValueError, match="seed must be 0 or more, got -1"):
    dataset.Order(numbered(3), -1)


# Chain arithmetic ------------------------------------------------------------


def by_hand(chain):
  """Left to right with Python's own operators, reduced at the end only."""
  value, values = int(chain[0]), ""
  for at in range(1, len(chain) - 1, 2):
    value = eval(f"{value}{chain[at]}{chain[at + 1]}")
    values += str(value % 10)
  return values


def test_the_example_of_the_docs():
  assert arithmetic.running_values("3+4*2-1=") == "743"


@settings(max_examples=200, deadline=None)
@given(
  st.integers(0, 2**40),
  st.integers(0, 2**31),
  st.sampled_from(splits.SPLITS),
)
def test_chains_are_right_and_repeatable(index, seed, split):
  task = arithmetic.make(split=split, seed=seed)
  problem = task.problem(index)
  again = arithmetic.make(split=split, seed=seed).problem(index)
  assert problem == again
  assert problem.answer == by_hand(problem.prompt)
  assert len(problem.answer) == problem.extra["difficulty"]
  assert len(problem.prompt) == 2 * problem.extra["difficulty"] + 2
  assert splits.is_test(problem.prompt) == (split == "test")
  assert task.verify.check(problem.answer, problem) is True
  wrong = problem.answer[:-1] + str((int(problem.answer[-1]) + 1) % 10)
  for bad in (wrong, problem.answer + "0", problem.answer[:-1], ""):
    assert task.verify.check(bad, problem) is False


def test_splits_share_no_chain_but_all_lengths():
  def chains(split):
    task = arithmetic.make(1, 3, split=split)
    return [task.problem(i) for i in range(1500)]

  train, test = chains("train"), chains("test")
  assert not {p.prompt for p in train} & {p.prompt for p in test}
  assert not {p.id for p in train} & {p.id for p in test}
  for problems in (train, test):
    counts = [p.extra["difficulty"] for p in problems]
    assert all(counts.count(n) > 350 for n in (1, 2, 3))


def test_ids_are_stable():
  assert arithmetic.make().problem(17).id == "chain-arithmetic/0/17"
  task = arithmetic.make(8, 8)
  assert task.problem(17).id == "chain-arithmetic/8-8/0/17"
  assert len({task.problem(i).prompt for i in range(300)}) > 295


def test_ids_tell_tasks_apart():
  """Two tasks share an id only where they share the problem."""
  tasks = [
    *(
      arithmetic.make(seed=s, split=k)
      for s in (0, 1)
      for k in ("train", "test")
    ),
    arithmetic.make(1, 3),
    arithmetic.make(8, 8),
    gym.make("leg_counting"),
    gym.make("leg_counting", seed=1),
    gym.make("leg_counting", {"max_animals": 4}),
    gym.make("leg_counting", {"max_animals": 5}),
  ]
  assert len({task.problem(0).id for task in tasks}) == len(tasks)


def test_a_task_has_no_problem_past_its_end(tmp_path):
  path = write(tmp_path / "a.jsonl", ROWS[:2])
  tasks = [
    arithmetic.make(size=2),
    gym.make("leg_counting", size=2),
    files.load(path, verifiers.exact)[0],
  ]
  for task in tasks:
    assert task.problem(1) == task.problem(1)
    for index in (2, -1):
      with pytest.raises(IndexError, match=f"0 to 1, got {index}"):
        task.problem(index)
  with pytest.raises(IndexError, match="0 or more, got -1"):
    arithmetic.make().problem(-1)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"min_operations": 0}, "min_operations=0"),
    ({"min_operations": 3, "max_operations": 2}, "max_operations=2"),
    ({"split": "tset"}, r"train.*test.*'tset'"),
    ({"size": 0}, "size.*got 0"),
    ({"seed": -1}, "seed must be 0 or more, got -1"),
  ],
)
def test_arithmetic_refuses(arguments, message):
  with pytest.raises(ValueError, match=message):
    arithmetic.make(**arguments)


# Files -----------------------------------------------------------------------

ROWS = [
  {"id": "one", "prompt": "1+1?", "answer": "2", "junk": [1]},
  {"id": "two", "prompt": "2+2?", "answer": 4},
  {"id": "three", "prompt": " ", "answer": "4"},
  {"id": "four", "prompt": "4?", "answer": None},
  {"id": "five", "prompt": 5, "answer": "5"},
  {"id": "six", "prompt": "6?", "answer": [6]},
  {"id": "seven", "prompt": "7?", "answer": True},
  {"id": "eight", "prompt": "8?", "answer": ""},
  {"id": "nine", "answer": "9"},
]


def write(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


def test_jsonl_keeps_good_rows_and_counts_bad_ones(tmp_path):
  path = write(tmp_path / "a.jsonl", ROWS)
  with path.open("ab") as file:
    file.write(b'\n[1]\n{"prompt": \n{"prompt": "\xff", "answer": "1"}\n')
  task, report = files.load(path, verifiers.exact)
  assert [task.problem(i) for i in range(task.size)] == [
    Problem("one", "1+1?", "2"),
    Problem("two", "2+2?", "4"),
  ]
  assert report == files.Report(
    rows=12,
    kept=2,
    dropped={
      "empty prompt": 1,
      "missing answer": 1,
      "prompt is not text": 1,
      "answer is neither text nor a number": 2,
      "empty answer": 1,
      "missing prompt": 1,
      "not a JSON object": 3,
    },
  )


def test_rows_without_ids_are_named_by_file_and_row(tmp_path):
  rows = [{"q": "a", "gold": 1.5}, {"q": ""}, {"q": "b", "gold": "x"}]
  path = write(tmp_path / "gsm.jsonl", rows)
  task, _ = files.load(path, verifiers.exact, prompt="q", answer="gold")
  assert [task.problem(i).id for i in range(2)] == [
    "gsm.jsonl/0",
    "gsm.jsonl/2",
  ]
  assert task.problem(0).answer == "1.5"


def test_parquet_reads_as_jsonl_does(tmp_path):
  rows = [
    {"prompt": f"{i}?", "answer": str(i), "big": "x" * 100} for i in range(50)
  ]
  table = pyarrow.Table.from_pylist([*rows, {"prompt": None, "answer": "1"}])
  parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
  task, report = files.load(tmp_path / "a.parquet", verifiers.exact)
  assert report == files.Report(51, 50, {"missing prompt": 1})
  assert task.problem(49) == Problem("a.parquet/49", "49?", "49")


@pytest.mark.parametrize("bad", ["a\ud800b", "\udfff", "x\ud83d"])
@pytest.mark.parametrize("field", ["id", "prompt", "answer"])
def test_text_that_no_tokenizer_takes_is_dropped(tmp_path, field, bad):
  row = {"id": "a", "prompt": "b", "answer": "c"}
  path = write(tmp_path / "a.jsonl", [row | {field: bad}, row])
  task, report = files.load(path, verifiers.exact)
  assert report == files.Report(2, 1, {f"{field} is not valid Unicode": 1})
  assert task.problem(0) == Problem("a", "b", "c")
  path = write(tmp_path / "b.jsonl", [row | {"prompt": "\ud83d\ude00"}])
  assert files.load(path, verifiers.exact)[0].problem(0).prompt == "😀"


@pytest.mark.parametrize(
  ("column", "written"),
  [
    (pyarrow.array([0.1, 5, 2.5e-7], pyarrow.float32()),
     ["0.1", "5", "0.00000025"]),
    (pyarrow.array([0.1, 5, -1e20]), ["0.1", "5", "-100000000000000000000"]),
    (pyarrow.array([1, 10, -3]), ["1", "10", "-3"]),
    (pyarrow.array([decimal.Decimal("5.00"), decimal.Decimal("100"),
                    decimal.Decimal("0.10")]), ["5", "100", "0.1"]),
    (pyarrow.array(["5.0", "0.10", "1e3"]), ["5.0", "0.10", "1e3"]),
  ],
)  # fmt: skip
def test_numbers_are_written_the_shortest_way(tmp_path, column, written):
  table = pyarrow.table({"prompt": ["a", "b", "c"], "answer": column})
  parquet.write_table(table, tmp_path / "a.parquet")
  task, report = files.load(tmp_path / "a.parquet", verifiers.exact)
  assert report.kept == 3
  assert [task.problem(i).answer for i in range(3)] == written


@pytest.mark.parametrize("start", [4, 10, 40])
def test_a_corrupt_parquet_page_is_named(tmp_path, start):
  path = tmp_path / "broken.parquet"
  rows = [{"prompt": f"{i}?" * 9, "answer": str(i)} for i in range(50)]
  parquet.write_table(pyarrow.Table.from_pylist(rows), path)
  data = bytearray(path.read_bytes())
  data[start : start + 20] = b"\xff" * 20
  path.write_bytes(data)
  with pytest.raises(ValueError, match=r"broken\.parquet: row group 0"):
    files.load(path, verifiers.exact)


def test_unusable_files_are_one_clear_error(tmp_path):
  load = functools.partial(files.load, verifier=verifiers.exact)
  write(tmp_path / "a.jsonl", ROWS[:1])
  with pytest.raises(FileNotFoundError, match=r"b\.jsonl.*a\.jsonl"):
    load(tmp_path / "b.jsonl")
  with pytest.raises(FileNotFoundError, match="nor is there a folder"):
    load(tmp_path / "no" / "b.jsonl")
  with pytest.raises(ValueError, match=r"\.jsonl.*\.parquet"):
    load(tmp_path / "a.csv")
  with pytest.raises(ValueError, match=r"no column 'q'.*'answer', 'id'"):
    load(tmp_path / "a.jsonl", prompt="q")
  table = pyarrow.Table.from_pylist([{"question": "a", "answer": "b"}])
  parquet.write_table(table, tmp_path / "a.parquet")
  with pytest.raises(ValueError, match=r"no column 'prompt'.*'question'"):
    load(tmp_path / "a.parquet")
  (tmp_path / "bad.parquet").write_text("not parquet")
  with pytest.raises(ValueError, match=r"bad\.parquet: not a Parquet"):
    load(tmp_path / "bad.parquet")
  with pytest.raises(ValueError, match="'one' stands in two rows"):
    load(write(tmp_path / "twice.jsonl", ROWS[:1] * 2))
  with pytest.raises(ValueError, match=r"no usable row out of 1.*empty"):
    load(write(tmp_path / "empty.jsonl", ROWS[2:3]))


# reasoning-gym ---------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["leg_counting", "countdown", "propositional_logic", "arc_agi",
             "prime_factorization", "fraction_simplification"]
)  # fmt: skip
def test_gym_pays_all_or_nothing(name):
  task = gym.make(name, size=4, seed=5)
  assert task.name == f"reasoning_gym/{name}"
  problem = task.problem(3)
  assert problem.id == f"reasoning_gym/{name}/5/3"
  assert problem == gym.make(name, size=4, seed=5).problem(3)
  check = pickle.loads(pickle.dumps(task.verify.check))
  for junk in ("junk", "-", "I would say it is unknowable"):
    assert check(junk, problem).reward == 0.0
  assert check("<answer></answer>", problem) == verify.UNPARSED
  if problem.answer:
    assert check(problem.answer, problem) == verify.CORRECT
    tagged = f"well <answer>{problem.answer}</answer>"
    assert check(tagged, problem) == verify.CORRECT


@pytest.mark.parametrize(
  ("form", "outcome"),
  [
    ("**{}**", "correct"),
    ("`{}`", "correct"),
    ("${}$", "correct"),
    ("\\boxed{{{}}}", "correct"),
    ("First, 3 + 4.\n\nThe answer is {}", "correct"),
    ("so\n#### {}", "correct"),
    ("It is \\boxed{{{}}} <answer>5</answer>", "wrong"),
    ("{} <answer></answer>", "unparsed"),
    ("The answer is {}1", "wrong"),
  ],
)
def test_gym_finds_the_answer_that_is_marked(form, outcome):
  task = gym.make("basic_arithmetic", size=1)
  problem = task.problem(0)
  got = task.verify.check(form.format(problem.answer), problem)
  assert got.outcome.value == outcome


def test_gym_takes_a_whole_text_that_holds_a_mark():
  """A task whose answer is itself spelt like a marked one."""
  problem = gym.make("letter_jumble", size=1).problem(0)
  problem.extra["entry"]["answer"] = "the answer is five"
  check = gym.make("letter_jumble", size=1).verify.check
  assert check("the answer is five", problem) == verify.CORRECT


def test_gym_does_not_score_what_memory_ran_out_on(monkeypatch):
  """A bad answer is no answer; a machine that failed says nothing of it."""
  task = gym.make("leg_counting", size=1)
  data = gym._dataset(*task.verify.check.args[:2])

  def fail(error, answer, entry):
    raise error

  for error, want in [(MemoryError(), "error"), (KeyError(), "unparsed")]:
    monkeypatch.setattr(data, "score_answer", functools.partial(fail, error))
    got = verify.grade(task.verify.check, "5", task.problem(0))
    assert got.outcome.value == want


def test_gym_scores_in_processes():
  task = gym.make("leg_counting", {"max_animals": 4}, size=3)
  problems = [task.problem(i) for i in range(3)]
  with verify.Pool(task.verify, 1) as pool:
    items = [(problem.answer, problem) for problem in problems]
    items.append(("nothing", problems[0]))
    rewards = [verdict.reward for verdict in pool.score(items)]
  assert rewards == [1.0, 1.0, 1.0, 0.0]


def test_gym_refuses_a_scorer_that_takes_junk():
  with pytest.raises(ValueError, match=r"game_of_life_halting.*be trusted"):
    gym.make("game_of_life_halting")


@pytest.mark.parametrize(
  ("name", "config", "message"),
  [
    ("leg_countin", None, r"'leg_countin'.*leg_counting"),
    ("leg_counting", {"max_animal": 4}, "leg_counting.*max_animal"),
    ("composite", None, "composite.*at least one dataset"),
  ],
)
def test_gym_refuses_unknown_names(name, config, message):
  with pytest.raises(ValueError, match=message):
    gym.make(name, config)


def test_gym_refuses_impossible_sizes():
  with pytest.raises(ValueError, match=r"size.*got 0"):
    gym.make("leg_counting", size=0)
  with pytest.raises(ValueError, match="seed must be 0 or more, got -1"):
    gym.make("leg_counting", seed=-1)
  with pytest.raises(ValueError, match=r"threshold.*got 0"):
    gym.make("leg_counting", threshold=0.0)
