"""Scores: of directories and of a run's checkpoints, the same numbers."""

import json
import sys

import pytest

from experiments import evaluate
from mrl_jax.tasks import dataset
from tests import runs, test_collate


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  root = tmp_path_factory.mktemp("evaluate")
  policy = runs.policy(root / "char", "char")
  done = runs.run(runs.command(root / "run", [policy], rounds=2))
  assert done.returncode == 0, done.stdout + done.stderr
  return root / "run"


def evaluated(tmp_path, *flags):
  out = tmp_path / "out.json"
  done = runs.run(
    [
      *(sys.executable, "-m", "experiments.evaluate", f"--out={out}"),
      *("--problems=6", "--n=4", '--task_args={"max_operations": 1}'),
      *flags,
    ]
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return json.loads(out.read_text())


def test_a_checkpoint_and_its_export_score_the_same(finished, tmp_path):
  run = evaluated(tmp_path, f"--run={finished}", "--names=char")
  export = evaluated(
    tmp_path, f"--policies={finished}/export/char", "--completion_limit=6"
  )
  assert run == export
  result = run["results"]["char"]
  assert result["problems"] == 6
  assert sum(result["outcomes"].values()) == 24
  assert {"pass@1", "pass@4", "maj@4", "avg@4"} <= set(result)
  assert result["by_difficulty"]["1"]["problems"] == 6
  pass_at_1 = result["by_difficulty"]["1"]["pass@1"]
  assert pass_at_1 == pytest.approx(result["pass@1"]["mean"])


def test_more_of_k_than_samples_is_refused_in_one_line(finished):
  done = runs.run(
    [
      *(sys.executable, "-m", "experiments.evaluate", f"--run={finished}"),
      *("--n=4", "--k=8"),
    ]
  )
  assert done.returncode == 2
  assert done.stderr.strip().count("\n") == 0
  assert "n=4" in done.stderr


def test_estimates_are_unbiased_and_leave_unscored_problems_out():
  outcomes = ["correct", "wrong", "wrong", "wrong"]
  rows = [
    test_collate.rollout([1], reward=float(o == "correct"))._replace(
      outcome=o, text=o
    )
    for o in outcomes
  ]
  lost = [row._replace(reward=float("nan"), outcome="timeout") for row in rows]
  found = evaluate.report([*rows, *lost], 4, [1, 4])
  assert found["problems"] == 1
  assert found["problems_left_out"] == 1
  assert found["pass@1"]["mean"] == pytest.approx(0.25)
  assert found["pass@4"]["mean"] == 1.0
  assert found["maj@4"]["mean"] == 0.0


def answered(text, outcome="correct"):
  return test_collate.rollout([1])._replace(outcome=outcome, text=text)


def test_a_right_text_counts_once_in_a_problem_and_a_wrong_one_never():
  rows = [
    *(
      answered("1+2"),
      answered("2+1"),
      answered("1+2"),
      answered("3", "wrong"),
    ),
    *(answered("4", "wrong"), answered("1+2"), answered("5", "wrong")),
    answered("4", "wrong"),
  ]
  assert evaluate.report(rows, 4, [1])["distinct"] == pytest.approx(1.5)


def test_scores_are_told_apart_by_difficulty():
  problems = [
    dataset.Problem("a", "", "", {"difficulty": 3}),
    dataset.Problem("b", "", ""),
    dataset.Problem("c", "", "", {"difficulty": 10}),
    dataset.Problem("d", "", "", {"difficulty": 3}),
  ]
  rights = [(1, 1), (1, 1), (0, 0), (1, 0)]
  rows = [
    answered("x", "correct" if right else "wrong")
    for group in rights
    for right in group
  ]
  found = evaluate.by_difficulty(rows, problems, 2, [1, 2])
  assert list(found) == ["3", "10"]
  assert found == {
    "3": {"problems": 2, "pass@1": 0.75, "pass@2": 1.0},
    "10": {"problems": 1, "pass@1": 0.0, "pass@2": 0.0},
  }
  assert not evaluate.by_difficulty(rows[2:4], problems[1:2], 2, [1])
