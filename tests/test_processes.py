"""A run over several processes is the run of one, whatever befalls them."""

import shutil
import signal
import socket
import sys
import time

import pytest

from mrl_jax.train import metrics
from tests import runs

_LIMIT = 120.0  # seconds, of what takes a few: a test that hangs has failed
# A stage in parts and updates, saved in its middle, on four devices.
FLAGS = {
  "task_args": '{"max_operations": 1}',
  "rounds": 3,
  "prompts": 4,
  "samples": 2,
  "updates": 2,
  "part": 2,
  "rescore": True,
  "save_updates": 1,
  "save_every": 1,
  "mesh": "1,2,2",
  "remat": "none",
}


def port() -> int:
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return free.getsockname()[1]


def program(name, count, folder):
  """Runs a function of `process_program` in several processes."""
  address = str(port())
  arguments = [sys.executable, "-m", "tests.process_program", name, address]
  started = [
    runs.start([*arguments, str(count), str(index), str(folder)])
    for index in range(count)
  ]
  return ended(started)


def start(workdir, policies, environments=({}, {}), **flags):
  """Starts a run in two processes of two devices."""
  address, started = f"127.0.0.1:{port()}", []
  for index, extra in enumerate(environments):
    values = {"coordinator": address, "processes": 2, "process_id": index}
    arguments = runs.command(
      workdir, policies, **FLAGS | flags | values | {"cpu_devices": 2}
    )
    started.append(runs.start(arguments, **extra))
  return started


def ended(started) -> tuple[list[int], list[str]]:
  """Exit codes and outputs, without what the transport says of itself."""
  outputs = []
  try:
    for process in started:
      output, _ = process.communicate(timeout=_LIMIT)
      lines = output.splitlines(keepends=True)
      outputs.append("".join(x for x in lines if not x.startswith("[Gloo]")))
  finally:
    for process in started:
      process.kill()
      process.communicate()
  return [process.returncode for process in started], outputs


def until(started, condition) -> None:
  end = time.monotonic() + _LIMIT
  while not condition():
    over = time.monotonic() > end
    if over or any(process.poll() is not None for process in started):
      for process in started:
        process.kill()
      pytest.fail("".join(ended(started)[1]))
    time.sleep(0.01)


def test_what_processes_agree_on(tmp_path):
  codes, outputs = program("primitives", 4, tmp_path)
  assert codes == [0] * 4, "".join(outputs)


def test_one_that_fails_ends_the_others(tmp_path):
  codes, outputs = program("one_fails", 2, tmp_path)
  assert all(codes), codes
  assert "process 1 fell over" in outputs[1]


def test_what_fails_in_all_ends_with_its_own_status(tmp_path):
  codes, outputs = program("all_fail", 2, tmp_path)
  assert codes == [2, 2], "".join(outputs)


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
  return [runs.policy(tmp_path_factory.mktemp("policy") / "char", "char")]


def alone(workdir, policies, **flags):
  """The same run in one process of four devices."""
  arguments = runs.command(
    workdir, policies, **FLAGS | flags | {"cpu_devices": 4}
  )
  done = runs.run(arguments)
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory, policies):
  workdir = tmp_path_factory.mktemp("whole") / "run"
  alone(workdir, policies)
  return workdir


def test_killed_with_all_disks_lost_it_goes_on_from_the_bucket(
  policies, whole, tmp_path
):
  """Two processes end as one process that was never killed."""
  workdir, bucket = tmp_path / "run", tmp_path / "bucket"
  started = start(workdir, policies, bucket=bucket)
  until(started, (bucket / "checkpoints" / "1000001").exists)
  for process in started:
    process.kill()
  ended(started)
  assert (workdir / "process_1" / "rounds" / "1").exists()
  shutil.rmtree(workdir)
  codes, outputs = ended(start(workdir, policies, bucket=bucket))
  assert codes == [0, 0], "".join(outputs)
  assert "resumed after round" in outputs[0]
  assert "resumed after round" not in outputs[1]  # one of them speaks
  runs.same(workdir, whole)
  assert not (workdir / "process_1").exists()
  assert not (workdir / "checkpoints").exists()


def test_groups_dropped_on_one_host_and_a_signal_to_one_host(
  policies, tmp_path
):
  """One group of host 0 teaches nothing and three of host 1."""
  workdir = tmp_path / "run"
  started = start(
    workdir,
    policies,
    [{"ALL_WRONG": "1"}, {"ALL_WRONG": "3"}],
    verifier="tests.process_program:check",
    verifier_workers=1,
    drop_degenerate=True,
    prompts=8,
    part=0,
    save_updates=0,
    save_every=0,
    rounds=1000,
  )
  log = workdir / "metrics.jsonl"
  until(started, lambda: log.exists() and log.read_bytes().count(b"\n") >= 2)
  started[1].send_signal(signal.SIGTERM)
  codes, outputs = ended(started)
  assert codes == [0, 0], "".join(outputs)
  made = metrics.read(log)
  assert {record["dropped_groups"] for record in made} == {4}
  assert {record["skipped"] for record in made} == {0}
  assert len(metrics.read(workdir / "updates.jsonl")) == 2 * len(made)
  (saved,) = (workdir / "checkpoints").iterdir()
  assert saved.name == str(len(made) * 10**6)
