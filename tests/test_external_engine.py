"""A run on somebody else's engine is a run like any other."""

import pytest

from mrl_jax.train import metrics
from tests import runs

FLAGS = {"rounds": 2, "rescore": True}


@pytest.fixture(scope="module")
def policies():
  return runs.learned("char")


def test_an_engine_that_draws_the_same_trains_the_same(policies, tmp_path):
  found = []
  for name in ("", "tests.external_engine:make"):
    workdir = tmp_path / (name or "own").replace(":", "_")
    arguments = runs.command(workdir, policies, sampler=name, **FLAGS)
    done = runs.run(arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    found.append(
      (
        (workdir / "export/char/model.safetensors").read_bytes(),
        metrics.read(workdir / "metrics.jsonl"),
      )
    )
  (own, told), (other, heard) = found
  assert own == other
  for left, right in zip(told, heard, strict=True):
    assert left["pass@1"] == right["pass@1"]


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("engine", "must be module:function"),
    ("no.such.module:make", "No module named"),
    ("tests.external_engine:mak", "it has ['make'"),
  ],
)
def test_an_engine_that_is_not_there_is_one_error(
  policies, tmp_path, name, message
):
  done = runs.run(runs.command(tmp_path / "run", policies, sampler=name))
  assert done.returncode == 2
  assert message in done.stderr
  assert f"--sampler={name}" in done.stderr
  assert done.stderr.strip().count("\n") == 0
