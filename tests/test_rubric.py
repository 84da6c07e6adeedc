"""A reward of weighted criteria: each kind, the rows of a file, a run."""

import json
import math

import pyarrow
import pytest
from pyarrow import parquet

from experiments import tasks
from mrl_jax import config as config_lib
from mrl_jax.tasks import files, rubric, verifiers, verify
from mrl_jax.tasks.dataset import Problem
from tests import runs

CORRECT, WRONG = verify.Outcome.correct, verify.Outcome.wrong
HERE = "tests.test_rubric"


def half(completion, problem):
  """A verifier of one's own: half a point, or what it is told."""
  return {"more": 1.5, "less": -0.5, "right": True}.get(problem.answer, 0.5)


def unsure(completion, problem):
  return verify.GOLD_UNPARSED


def judged(text, *criteria, answer=""):
  """The verdict by criteria, each (kind, value) or (kind, value, weight)."""
  entries = [
    dict(zip(("criterion", "value", "weight"), c, strict=False))
    for c in criteria
  ]
  extra = {"rubric": rubric.read(entries, answer)}
  problem = Problem("id", "prompt", answer, extra)
  return verify.grade(rubric.check, text, problem)


@pytest.mark.parametrize(
  ("kind", "value", "met", "missed"),
  [
    ("contains", "a b", "xa by", "xA by"),
    ("lacks", "a b", "xA by", "xa by"),
    ("matches", r"^\d+$", "42", "42."),
    ("matches", "(?i)yes", "oh YES", "no"),
    ("most_words", 2, " two\nwords ", "here are three"),
    ("most_words", "0", "  ", "one"),
    ("least_words", 3.0, "here are three", "two words"),
    ("exact", "a b", " a  b ", "a c"),
    ("exact", 5.0, "5", "5.0"),
    ("numeric", "1/2", "It is 0.5", "It is 0.6"),
    ("math", "x+1", "\\boxed{1+x}", "\\boxed{x}"),
    (f"{HERE}:half", "right", "", None),
  ],
)
def test_every_kind_is_met_or_missed(kind, value, met, missed):
  assert judged(met, (kind, value)) == verify.CORRECT
  if missed is not None:
    assert judged(missed, (kind, value)) == verify.WRONG


def test_the_reward_is_the_weighted_mean_of_the_scores():
  criteria = (
    ("contains", "yes", 3),
    ("most_words", 2, 0.5),
    (f"{HERE}:half", None, 2),
  )
  assert judged("yes", *criteria) == verify.Verdict(4.5 / 5.5, WRONG)
  assert judged("no it is", *criteria) == verify.Verdict(1 / 5.5, WRONG)
  assert judged("yes", *criteria[:2]) == verify.CORRECT
  found = judged("yes", ("contains", "yes"), ("contains", "no", 0.25))
  assert found.reward == pytest.approx(0.8)
  tenths = [("contains", "y", 0.1)] * 7
  assert judged("y", *tenths) == verify.CORRECT  # 1 to the bit


def test_gold_answers_are_the_values_or_the_rows():
  assert judged("5", ("numeric", None), answer="5") == verify.CORRECT
  assert judged("5", ("numeric", "6"), answer="5") == verify.WRONG
  assert judged("no number", ("numeric", 6)) == verify.WRONG
  found = judged("5", ("contains", "5"), ("numeric", "six"))
  assert found.outcome == verify.Outcome.gold_unparsed


def test_what_one_criterion_cannot_score_nobody_can():
  found = judged("a", ("contains", "a"), (f"{HERE}:unsure", None))
  assert math.isnan(found.reward)
  assert found.outcome == verify.Outcome.gold_unparsed
  for told in ("more", "less"):
    assert judged("a", (f"{HERE}:half", told)) == verify.ERROR
  plain = Problem("id", "prompt", "answer")
  assert verify.grade(rubric.check, "a", plain) == verify.ERROR
  with pytest.raises(ValueError, match="'id' has no rubric"):
    rubric.check("a", plain)


GOOD = {"criterion": "contains", "value": "a"}


@pytest.mark.parametrize(
  ("given", "why"),
  [
    ("{", "not JSON"),
    ("5", "not a list"),
    (GOOD, "not a list"),
    ([], "empty"),
    (["contains"], "a criterion is not an object"),
    ([{"value": "a"}], "a criterion is neither"),
    ([GOOD, GOOD | {"criterion": "has"}], "a criterion is neither"),
    ([GOOD | {"criterion": ["exact"]}], "a criterion is neither"),
    ([GOOD | {"wieght": 2}], "a field is none of criterion, description"),
    ([GOOD | {"weight": 0}], "a weight is not"),
    ([GOOD | {"weight": -1}], "a weight is not"),
    ([GOOD | {"weight": True}], "a weight is not"),
    ([GOOD | {"weight": math.nan}], "a weight is not"),
    ([GOOD | {"weight": 10**400}], "a weight is not"),
    ([GOOD | {"value": None}], "the value of contains is not text"),
    ([GOOD | {"value": ""}], "the value of contains is empty"),
    ([GOOD | {"criterion": "matches", "value": "("}],
     "the value of matches is not a regular expression"),
    ([GOOD | {"criterion": "most_words"}],
     "the value of most_words is not a whole number"),
    ([GOOD | {"criterion": "most_words", "value": 1.5}],
     "the value of most_words is not a whole number"),
    ([GOOD | {"criterion": "least_words", "value": -1}],
     "the value of least_words is not a whole number"),
    ([{"criterion": "exact"}],
     "the value of exact is missing, as is the row's answer"),
    ([{"criterion": "math", "value": " "}], "the value of math is empty"),
    ([{"criterion": "a:b", "value": [1]}],
     "the value of a:b is neither text nor a number"),
  ],
)  # fmt: skip
def test_an_ill_formed_rubric_says_why(given, why):
  with pytest.raises(ValueError, match=f"^{why}"):
    rubric.read(given, "")


ROWS = [
  {"prompt": "a?", "rubric": [GOOD | {"weight": 2, "description": "says a"}]},
  {"prompt": "b?", "rubric": json.dumps([{"criterion": "exact"}]),
   "answer": 7},
  {"prompt": "c?", "rubric": [{"criterion": "exact"}]},
  {"prompt": "d?", "rubric": []},
  {"prompt": "e?", "rubric": []},
  {"prompt": "f?", "rubric": None, "answer": "f"},
  {"prompt": " ", "rubric": [GOOD]},
]  # fmt: skip
DROPPED = {
  "rubric: the value of exact is missing, as is the row's answer": 1,
  "rubric: empty": 2,
  "missing rubric": 1,
  "empty prompt": 1,
}


def write(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


def load(path, **names):
  return files.load(path, verifiers.resolve("rubric"), **names)


def test_a_file_keeps_good_rubrics_and_counts_bad_ones(tmp_path):
  path = write(tmp_path / "a.jsonl", ROWS)
  task, report = load(path)
  assert report == files.Report(7, 2, DROPPED)
  first, second = map(task.problem, range(2))
  assert first.extra["rubric"] == (rubric.Criterion("contains", "a", 2.0),)
  assert (first.answer, second.answer) == ("", "7")
  assert verify.grade(task.verify.check, "7", second) == verify.CORRECT
  assert not task.verify.quick  # a regular expression may take for ever
  renamed = [{"q": r["prompt"], "judge": r["rubric"]} for r in ROWS[:1]]
  path = write(tmp_path / "b.jsonl", renamed)
  task, _ = load(path, prompt="q", rubric="judge")
  assert task.problem(0).extra == first.extra


def test_parquet_reads_rubrics_as_lists_and_as_text(tmp_path):
  entries = [GOOD, {"criterion": "most_words", "value": "3", "weight": 2.0}]
  found = []
  for name, told in (("lists", entries), ("text", json.dumps(entries))):
    path = tmp_path / f"{name}.parquet"
    row = {"id": "one", "prompt": "a?", "answer": "yes", "rubric": told}
    parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    problem = load(path)[0].problem(0)
    assert (problem.id, problem.answer) == ("one", "yes")
    found.append(problem.extra["rubric"])
  assert found[0] == found[1]
  assert found[0][1] == rubric.Criterion("most_words", 3, 2.0)


def test_what_no_row_can_do_without_is_one_clear_error(tmp_path):
  path = write(tmp_path / "a.jsonl", [{"prompt": "a?", "answer": "a"}])
  with pytest.raises(ValueError, match=r"a\.jsonl: no column 'rubric'.*ans"):
    load(path)
  table = pyarrow.Table.from_pylist([{"prompt": "a?", "answer": "a"}])
  parquet.write_table(table, tmp_path / "a.parquet")
  with pytest.raises(ValueError, match=r"a\.parquet: no column 'rubric'"):
    load(tmp_path / "a.parquet")
  bad = {"prompt": "a?", "rubric": [{"criterion": f"{HERE}:halv"}]}
  path = write(tmp_path / "b.jsonl", [*ROWS, bad])
  with pytest.raises(ValueError, match=r"b\.jsonl: rubric: .*halv.*'half'"):
    load(path)
  # Another verifier does not read it.
  rows = [bad | {"answer": "a"}]
  task, _ = files.load(write(tmp_path / "c.jsonl", rows), verifiers.exact)
  assert task.problem(0).extra == {}
  with pytest.raises(ValueError, match="'rubric'"):
    verifiers.resolve("rubrics")


def test_an_expression_that_never_ends_costs_its_row_alone():
  slow = rubric.read([{"criterion": "matches", "value": "(a+)+$"}], "")
  problem = Problem("id", "prompt", "", {"rubric": slow})
  with verify.Pool(rubric.verifier, 1, deadline_seconds=1.0) as pool:
    found = pool.score([("a" * 40 + "b", problem), ("aa", problem)])
  assert found == [verify.TIMEOUT, verify.CORRECT]


def test_a_run_learns_from_a_files_rubrics(tmp_path):
  rows = [
    {"prompt": f"{i}+1=", "rubric": [
      {"criterion": "contains", "value": str(i + 1), "weight": 3},
      {"criterion": "most_words", "value": 0}]}
    for i in range(8)
  ]  # fmt: skip
  rows.append({"prompt": "9+9=", "rubric": "nothing"})
  path = write(tmp_path / "sums.jsonl", rows)
  done = runs.run(
    runs.command(
      tmp_path / "run",
      [runs.policy(tmp_path / "tiny", "char")],
      task=path,
      task_args="{}",
      verifier="rubric",
      rounds=2,
    )
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert "1 rows dropped: rubric: not JSON" in done.stderr + done.stdout
  lines = (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()
  told = [json.loads(line) for line in lines]
  assert len(told) == 32
  for row in told:
    right = str(int(row["prompt"][0]) + 1) in row["completion"]
    short = not row["completion"].split()
    assert row["reward"] == (3 * right + short) / 4
    assert (row["outcome"] == "correct") == (right and short)
  assert {row["reward"] for row in told} >= {0.0, 0.75}


def test_a_task_that_is_no_file_has_no_rubrics():
  config = config_lib.Config(workdir="w", policies=("p",), verifier="rubric")
  with pytest.raises(config_lib.ConfigError, match="rubric column"):
    tasks.load(config)
