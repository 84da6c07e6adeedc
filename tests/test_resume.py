"""A run that is killed and started again equals one that was not."""

import pathlib
import random
import shutil
import signal

import pytest

from experiments import stores
from mrl_jax.exchange import store
from tests import runs

# Policies that learn, and exchange every kind of record.
FLAGS = {
  "recipe": "prp+sgt,xgrpo+sgt",
  "task_args": '{"max_operations": 4}',
  "completion_limit": 8,
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
  return workdir


def same(left, right):
  runs.same(left, right)
  assert shipments(left) == shipments(right)
  assert len(shipments(left)) == 12  # of two policies in six rounds


def shipments(workdir):
  store_ = store.Directory(stores.folder(pathlib.Path(workdir)))
  return {
    (policy, round_): store_.get(policy, round_)
    for policy in store_.policies()
    for round_ in store_.rounds(policy)
  }


def until(process, rounds):
  """Reads the output until so many rounds have been reported."""
  lines = []
  while rounds:
    line = process.stdout.readline()
    assert line, "".join(lines)
    lines.append(line)
    rounds -= line.startswith("round ")


@pytest.mark.parametrize(("rounds", "lost"), [(1, False), (3, True)])
def test_killed_at_a_random_point_and_started_again(
  rounds, lost, policies, whole, tmp_path
):
  """On the same disk, or on an empty one and from a bucket."""
  bucket = tmp_path / "bucket" if lost else ""
  arguments = runs.command(tmp_path / "run", policies, bucket=bucket, **FLAGS)
  process = runs.start(arguments)
  until(process, rounds)
  pause = random.uniform(0, 0.1)
  try:
    process.wait(pause)
  except runs.subprocess.TimeoutExpired:
    process.kill()
  process.wait()
  process.stdout.close()
  if lost:
    shutil.rmtree(tmp_path / "run")
  again = runs.run(arguments)
  assert again.returncode == 0, again.stdout + again.stderr
  assert ("files are those of" in again.stdout) == lost
  same(tmp_path / "run", whole)


def test_sigterm_saves_and_exits_cleanly(policies, whole, tmp_path):
  arguments = runs.command(tmp_path / "run", policies, save_every=0, **FLAGS)
  process = runs.start(arguments)
  until(process, 2)
  process.send_signal(signal.SIGTERM)
  output = process.stdout.read()
  assert process.wait() == 0, output
  process.stdout.close()
  assert not (tmp_path / "run" / "export").exists()
  again = runs.run(arguments)
  assert again.returncode == 0, again.stdout + again.stderr
  assert "resumed after round" in again.stdout
  same(tmp_path / "run", whole)


def test_another_configuration_in_the_same_folder_is_refused(policies, whole):
  done = runs.run(runs.command(whole, policies, seed=5, **FLAGS))
  assert done.returncode == 2
  assert done.stderr.strip().count("\n") == 0
  assert "--seed=5" in done.stderr
  assert "started with 0" in done.stderr


def test_a_finished_run_can_be_continued_on_another_mesh(policies, tmp_path):
  workdir = tmp_path / "run"
  first = runs.command(workdir, policies, rounds=2, prompts=8)
  assert runs.run(first).returncode == 0
  more = runs.command(
    workdir, policies, rounds=3, prompts=8, cpu_devices=8, mesh="2,2,2"
  )
  done = runs.run(more)
  assert done.returncode == 0, done.stdout + done.stderr
  assert "resumed after round 1" in done.stdout
