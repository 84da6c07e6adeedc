"""What a machine left in a bucket is what another one goes on from."""

import dataclasses
import pathlib

import pytest

from experiments import run
from mrl_jax import config as config_lib
from mrl_jax.train import bucket as bucket_lib
from mrl_jax.train import metrics


class Machine:
  """A working directory that a run writes to."""

  def __init__(self, workdir: pathlib.Path, root: pathlib.Path):
    self.workdir = workdir
    self.bucket = bucket_lib.Bucket(root, workdir)
    self.fetched = self.bucket.fetch()
    workdir.mkdir(exist_ok=True)
    for name in ("config.json", "run.flags"):
      (workdir / name).write_text(name)

  def begin(self, log=None) -> None:
    """Opens the logs as a run does: cut back to a checkpoint."""
    self.bucket.claim(log)
    for name in metrics.FILES:
      with self.log(name).open("ab") as file:
        file.truncate(0 if log is None else log[name])

  def log(self, name: str) -> pathlib.Path:
    return self.workdir / f"{name}.jsonl"

  def write(self, text: str) -> None:
    for name in metrics.FILES[:2]:
      with self.log(name).open("a") as file:
        file.write(f"{name} {text}\n")

  def file(self, name: str, text: str) -> None:
    path = self.workdir / "rounds" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)

  def save(self, round_: int, needed: int = 0) -> dict[str, int]:
    state = {n: self.log(n).stat().st_size for n in metrics.FILES}
    host = {"log": state, "cursor": {"round": round_}}
    self.bucket.push(host, needed)
    return state

  def told(self) -> dict[str, str]:
    return {name: self.log(name).read_text() for name in metrics.FILES}


@pytest.fixture
def first(tmp_path):
  """A machine whose second checkpoint was never complete."""
  machine = Machine(tmp_path / "first", tmp_path / "bucket")
  assert not machine.fetched
  machine.begin()
  machine.write("round 0")
  machine.file("1/char/part-0", "rows")
  machine.state = machine.save(1)
  machine.complete = machine.told()
  machine.write("round 1, as it was before the machine died")
  machine.save(2, needed=1)
  return machine


def test_a_new_machine_goes_on_as_if_it_were_the_old_one(first, tmp_path):
  second = Machine(tmp_path / "second", tmp_path / "bucket")
  assert second.fetched and second.told() == first.told()
  second.begin(first.state)
  assert second.told() == first.complete
  second.write("round 1, again")
  second.save(2, 1)
  third = Machine(tmp_path / "third", tmp_path / "bucket")
  assert third.fetched and third.told() == second.told()
  assert "died" not in "".join(third.told().values())


def test_files_of_the_round_come_too_and_those_of_older_ones_go(
  first, tmp_path
):
  rounds = tmp_path / "bucket" / "rounds"
  first.file("2/char/part-0", "more")
  first.save(2, needed=1)  # 2 may never be complete: 1 is still needed
  assert {path.name for path in rounds.iterdir()} == {"1", "2"}
  second = Machine(tmp_path / "second", tmp_path / "bucket")
  assert (second.workdir / "rounds/1/char/part-0").read_text() == "rows"
  assert (second.workdir / "rounds/2/char/part-0").read_text() == "more"
  first.save(2, needed=2)
  assert {path.name for path in rounds.iterdir()} == {"2"}


def test_what_was_half_written_is_no_file(first, tmp_path):
  rounds = tmp_path / "bucket" / "rounds" / "1" / "char"
  (rounds / ".part-1.partial").write_text("ro")
  (tmp_path / "bucket/logs/metrics/.000000000000999.partial").write_text("x")
  second = Machine(tmp_path / "second", tmp_path / "bucket")
  names = [p.name for p in (second.workdir / "rounds/1/char").iterdir()]
  assert names == ["part-0"]
  assert second.told() == first.told()


def test_the_latest_files_are_not_copied_back(first, tmp_path):
  first.write("more than the bucket has")
  again = Machine(first.workdir, tmp_path / "bucket")
  assert not again.fetched
  assert "more than" in again.told()["metrics"]


def test_a_machine_that_was_overtaken_starts_from_the_bucket(first, tmp_path):
  second = Machine(tmp_path / "second", tmp_path / "bucket")
  second.begin(first.state)
  second.write("round 1, on another machine")
  second.save(2)
  first.file("9/char/part-0", "of a round that nobody made")
  again = Machine(first.workdir, tmp_path / "bucket")
  assert again.fetched and again.told() == second.told()
  assert not (again.workdir / "rounds" / "9").exists()


def test_a_run_without_a_checkpoint_begins_again(first, tmp_path):
  second = Machine(tmp_path / "second", tmp_path / "bucket")
  second.begin(None)
  assert not "".join(second.told().values())
  second.write("round 0, again")
  second.save(1)
  third = Machine(tmp_path / "third", tmp_path / "bucket")
  assert third.told() == second.told()


def test_exported_policies_are_copied_and_rounds_removed(first, tmp_path):
  model = first.workdir / "export" / "char" / "model.safetensors"
  model.parent.mkdir(parents=True)
  model.write_bytes(b"\0\1")
  first.bucket.finish()
  copied = tmp_path / "bucket" / "export" / "char" / "model.safetensors"
  assert copied.read_bytes() == b"\0\1"
  assert not (tmp_path / "bucket" / "rounds").exists()


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("to_bucket", [False, True])
def test_checkpoints_in_another_place_are_not_passed_over(
  tmp_path, to_bucket, moved
):
  workdir = tmp_path / "run"
  plain = config_lib.Config(workdir=str(workdir), policies=("p",))
  with_one = dataclasses.replace(plain, bucket=str(tmp_path / "bucket"))
  old, new = (plain, with_one) if to_bucket else (with_one, plain)
  for config in (old, new) if moved else (old,):
    folder = bucket_lib.checkpoints(config.bucket, workdir)
    (folder / "1000000").mkdir(parents=True)
  if moved:
    run._check_moved(old, new, workdir)
  else:
    with pytest.raises(config_lib.ConfigError, match=r"--bucket=.*are in"):
      run._check_moved(old, new, workdir)
