"""The commands answer mistakes with one line, at start."""

import pytest

from experiments import flags as flags_lib
from mrl_jax import config as config_lib
from tests import runs


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
  return [runs.policy(tmp_path_factory.mktemp("policy") / "p", "char")]


@pytest.mark.parametrize(
  ("flags", "parts"),
  [
    ({"loss": "grop"}, ["--loss=grop", "policy_gradient, gspo, cispo"]),
    ({"lss": "gspo"}, ["lss"]),
    ({"rounds": "many"}, ["rounds", "many"]),
    ({"samples": 1}, ["--samples=1", "at least 2"]),
    ({"task": "chain"}, ["--task=chain", "chain_arithmetic"]),
    ({"prompt_limit": 2}, ["--prompt_limit=2", "chain-arithmetic"]),
    ({"policies": "nowhere"}, ["--policies=nowhere", "directory"]),
    ({"verifier": "nope:f"}, ["--verifier=nope:f"]),
    ({"task_args": '{"n": 3}'}, ["--task_args", "'n'"]),
    ({"shares": "many"}, ["--shares=many", "list of int"]),
    ({"shares": "2"}, ["--shares=2", "1 devices"]),
    ({"executor": "partition", "shares": "2"}, ["--shares=2"]),
    ({"mesh": "3,1,1"}, ["--mesh=3,1,1"]),
    ({"mesh": "8,1,1", "cpu_devices": 8}, ["--mesh=8,1,1", "4 prompts"]),
  ],
)
def test_a_mistake_is_one_line(flags, parts, policies, tmp_path):
  done = runs.run(runs.command(tmp_path / "run", policies, **flags))
  assert done.returncode == 2
  lines = done.stderr.strip().splitlines()
  assert len(lines) == 1, done.stderr
  for part in parts:
    assert part in lines[0]


def test_a_missing_tokenizer_file_is_named(policies, tmp_path):
  broken = tmp_path / "broken"
  runs.policy(broken, "char")
  (broken / "tokenizer.json").unlink()
  done = runs.run(runs.command(tmp_path / "run", [str(broken)]))
  assert done.returncode == 2
  assert len(done.stderr.strip().splitlines()) == 1, done.stderr
  assert "tokenizer.json" in done.stderr


def test_help_lists_every_field_and_its_allowed_values():
  text = runs.run([*runs.command("w", [])[:3], "--help"]).stdout
  for field in ("--loss", "--policies", "--mesh", "sequence_mean", "icepop"):
    assert field in text


def test_the_saved_flagfile_gives_the_same_configuration(tmp_path):
  config = config_lib.Config(
    workdir=str(tmp_path),
    policies=("a", "b"),
    lr=(1e-3, 2e-5),
    task_args='{"split": "test"}',
    rescore=True,
    samples=(4, 8),
    executor="partition",
    shares=(1, 2),
  )
  path = tmp_path / "run.flags"
  flags_lib.save(config, path)
  code = (
    "import sys; from absl import flags; from experiments import flags as f;"
    "f.define(); flags.FLAGS(sys.argv); print(repr(f.config()))"
  )
  python = runs.command("w", [])[0]
  done = runs.run([python, "-c", code, f"--flagfile={path}"])
  assert done.stdout.strip() == repr(config), done.stderr
