"""Scores: of directories and of a run's checkpoints, the same numbers."""

import json
import sys

import pytest

from experiments import evaluate
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
