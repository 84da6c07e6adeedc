"""A stage that is killed inside itself ends as one that was not."""

import signal
import time

import pytest

from mrl_jax.train import metrics
from tests import runs

# Two stages of eight parts and eight updates; degenerate groups are dropped,
# old log-probs come from disk, a peer is heard, and steps earn their share.
FLAGS = {
  "recipe": "sgt",
  "task_args": '{"max_operations": 2, "process": true}',
  "process": "to_go",
  "completion_limit": 8,
  "rounds": 2,
  "prompts": 16,
  "samples": 8,
  "updates": 8,
  "part": 2,
  "rescore": True,
  "anchor_every": 3,
  "correction": "tis_token",
  "drop_degenerate": True,
  "save_every": 1,
  "save_updates": 2,
  "lr": 1e-3,
}


@pytest.fixture(scope="module")
def policies():
  return runs.learned("char", "merged")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, policies):
  workdir = tmp_path_factory.mktemp("whole") / "run"
  done = runs.run(runs.command(workdir, policies, **FLAGS))
  assert done.returncode == 0, done.stdout + done.stderr
  assert not (workdir / "rounds").exists()
  return workdir


def stop_at(arguments, path, how):
  """Starts a run and sends it a signal once a file is there."""
  process = runs.start(arguments)
  while not path.exists() and process.poll() is None:
    time.sleep(1e-3)
  process.send_signal(how)
  output = process.stdout.read()
  process.stdout.close()
  return process.wait(), output


# While the first policy generates, while the second one does, and between
# the first updates of a stage and its last, at and beside a new anchor.
@pytest.mark.parametrize(
  "path",
  [
    "rounds/1/char/part-000003.arrow",
    "rounds/1/merged/part-000001.arrow",
    "rounds/1/merged/scores-000002.npz",
    "checkpoints/1000004",
  ],
)
def test_a_stage_that_was_killed_inside(policies, whole, tmp_path, path):
  workdir = tmp_path / "run"
  arguments = runs.command(workdir, policies, **FLAGS)
  code, output = stop_at(arguments, workdir / path, signal.SIGKILL)
  assert code == -signal.SIGKILL, output
  again = runs.run(arguments)
  assert again.returncode == 0, again.stdout + again.stderr
  # Of round 0, or inside it where the checkpoint at its end was not complete.
  assert "resumed after round" in again.stdout
  runs.same(workdir, whole)


def test_sigterm_stops_between_two_parts(policies, whole, tmp_path):
  workdir = tmp_path / "run"
  arguments = runs.command(workdir, policies, **FLAGS)
  part = workdir / "rounds/0/char/part-000001.arrow"
  code, output = stop_at(arguments, part, signal.SIGTERM)
  assert code == 0, output
  assert not (workdir / "updates.jsonl").read_bytes()
  kept = part.stat().st_mtime_ns
  again = runs.start(arguments)
  while again.poll() is None and not (workdir / "rounds/1").exists():
    if part.exists():
      assert part.stat().st_mtime_ns == kept  # it was not generated again
    time.sleep(1e-2)
  output = again.stdout.read()
  assert again.wait() == 0, output
  again.stdout.close()
  runs.same(workdir, whole)


def test_updates_are_told_with_how_stale_their_rows_are(whole):
  records = metrics.read(whole / "updates.jsonl")
  for round_ in (0, 1):
    mine = [r for r in records if (r["policy"], r["round"]) == ("char", round_)]
    assert [r["staleness"] for r in mine] == [*range(len(mine))]
    assert len(mine) > 3
    for record in mine:
      assert record["ratio_max"] > 0
      if record["staleness"] % 3 == 0:  # anchored anew
        assert record["log_ratio_max"] < 1e-3
      else:
        assert record["log_ratio_max"] > 1e-3
