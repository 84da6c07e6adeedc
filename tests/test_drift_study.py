"""The drift study: a frozen encoder moves nothing, another one does."""

import json
import sys

import jax
import numpy as np
import pytest

from experiments.studies import drift, jobs
from mrl_jax import config as config_lib
from mrl_jax import records
from mrl_jax.model import hf
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.shaping import features, potential
from tests import factories, runs

SAMPLES = 4


@pytest.fixture(scope="module")
def model():
  return factories.decoder()


def rollouts(prompts=3):
  rng = np.random.default_rng(0)
  for number in range(prompts * SAMPLES):
    tokens = rng.integers(11, size=rng.integers(1, 6)).astype(np.int32)
    nothing = np.zeros(len(tokens), np.float32)
    right = bool(rng.integers(2))
    yield records.Rollout(
      prompt_id=str(number // SAMPLES),
      sample=number % SAMPLES,
      prompt="",
      context=(1, 2, 3),
      tokens=tokens,
      logprobs=nothing,
      entropies=nothing,
      finished=True,
      text="",
      answer="",
      reward=float(right),
      outcome="correct" if right else "wrong",
    )


def test_only_another_version_moves_a_potential(model, tmp_path):
  params, other = (model.init(jax.random.key(seed)) for seed in (0, 1))
  spec = potential.Spec(width=8, hidden=8)
  found = potential.Potential(
    spec, potential.init(spec, jax.random.key(2)), np.zeros(8, np.float32)
  )
  rows = list(rollouts())

  def study(*encoders):
    return drift.study(model, encoders, found, rows, SAMPLES)

  same = study((0, params), (4, params))
  assert same["variance"]["phi_over_training"] == 0
  assert same["variance"]["phi"] > 0
  assert same["encoders"][1]["residual"] == same["encoders"][1]["moved"] == 0
  moved = study((0, params), (4, other))
  assert moved["variance"]["phi_over_training"] > 0
  assert moved["variance"]["whole_over_training"] > 0
  assert moved["encoders"][0]["moved"] == 0 < moved["encoders"][1]["moved"]
  # Shaping rewards of which the first half is of one version and the second
  # half of the other add up to the gap between the two, halfway.
  one = drift.read(model, params, found, rows, SAMPLES)
  two = drift.read(model, other, found, rows, SAMPLES)
  gaps = []
  for row in range(len(rows)):
    length = len(rows[row].tokens)
    half = min((length + 1) // 2, length - 1)
    after = [*one[0][row, 1:length], 0.0]
    later = [*two[0][row, 1:length], 0.0]
    added = [after[t] - one[0][row, t] for t in range(half)]
    added += [later[t] - two[0][row, t] for t in range(half, length)]
    gaps.append(abs(sum(added)))
  assert np.isclose(np.mean(gaps), moved["encoders"][1]["residual"], atol=1e-6)
  assert drift.table(moved).count("\n") == 3
  assert drift.variances(moved).count("\n") == 3
  assert drift.figure(moved, tmp_path / "x.png").exists()


def test_accuracy_is_of_pairs_of_one_prompt():
  values = np.asarray([3.0, 1.0, 2.0, 2.0, 9.0, 9.0, 9.0, 9.0])
  right = np.asarray([1, 0, 1, 0, 1, 1, 1, 1], bool)
  assert drift.accuracy(values, right, 4) == (1 + 1 + 1 + 0.5) / 4
  assert drift.accuracy(values[4:], right[4:], 4) is None


def test_a_run_that_is_there_is_not_repeated(tmp_path, monkeypatch):
  def start(job, core, cache):
    raise RuntimeError(f"started {' '.join(job.words)}")

  monkeypatch.setattr(jobs.Job, "start", start)
  made = tmp_path / "run" / "export" / "policy" / "model.safetensors"
  made.parent.mkdir(parents=True)
  made.touch()
  assert drift.train(tmp_path, [str(tmp_path)], []) == tmp_path / "run"
  made.unlink()
  with pytest.raises(RuntimeError, match=r"started .* --rounds=3$"):
    drift.train(tmp_path, [str(tmp_path)], ["--rounds=3"])
  for policies in ([], ["a", "b"]):
    with pytest.raises(config_lib.ConfigError, match="must be one folder"):
      drift.train(tmp_path, policies, [])


def test_the_command_trains_and_measures(tmp_path):
  (policy,) = runs.learned("char")
  mesh = mesh_lib.make(1, 1, 1, devices=jax.devices()[:1])
  model, params = hf.load(policy, mesh)
  width = model.spec.width
  spec = potential.Spec(width=width, hidden=8, reference="char")
  born = potential.sealed(potential.init(spec, jax.random.key(0)), spec.cap)
  found = potential.Potential(spec, born, potential.probe(model, params))
  potential.save(found, tmp_path / "potential", {})
  more = ("--rounds=2", "--save_every=1", "--prompts=4", "--samples=4")
  result = runs.run(
    [
      *(sys.executable, "-m", "experiments.studies.drift"),
      f"--policies={policy}",
      f"--potential={tmp_path / 'potential'}",
      f"--out={tmp_path / 'study'}",
      *("--problems=4", "--n=4"),
      *(f"--more={flag}" for flag in (*more, "--lr=0.01")),
    ]
  )
  assert result.returncode == 0, result.stderr
  results = json.loads((tmp_path / "study" / "drift.json").read_text())
  rounds = [encoder["rounds"] for encoder in results["encoders"]]
  assert rounds == [0, 1, 2]
  moved = [encoder["moved"] for encoder in results["encoders"]]
  assert moved[0] == 0 < min(moved[1:])
  assert results["answers"] == 16 and "0 (frozen)" in result.stdout


def test_an_encoder_s_numbers_are_beside_the_frozen_ones():
  phi = np.asarray([[0.0, 1.0, 2.0], [0.0, -1.0, 0.0]])
  mask = np.asarray([[1, 1, 1], [1, 1, 0]], bool)
  frozen = drift.View(phi, np.asarray([2.0, -1.0]), mask)
  now = drift.View(-phi, np.asarray([3.0, 1.0]), mask)
  found = drift.compare(frozen, now, np.asarray([True, False]), 2)
  assert found["moved"] == pytest.approx(2 * (1 + 2 + 1) / 5)
  assert found["moved_whole"] == pytest.approx((1 + 2) / 2)
  assert found["residual"] == pytest.approx((4 + 2) / 2)
  assert found["radius"] == pytest.approx((3 - 1) / 2)
  assert found["right"] == dict.fromkeys(features.PLACES, 0.0)
