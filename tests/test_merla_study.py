"""The MeRLa study: its arms differ as they say, its tables add up."""

import numpy as np
import pytest

from experiments.studies import merla, merla_report
from mrl_jax import config as config_lib
from tests.test_extra_study import flags, rows


def run(seed, arm, gain, falls=False):
  curve = np.linspace(0.2, 0.4 + gain, 64) + 0.01 * (np.arange(64) % 2)
  curve = curve[::-1] if falls else curve
  return {
    "seed": seed,
    "arm": arm,
    "pass@1": 0.3 + 0.01 * seed + gain,
    "pass@4": 0.5,
    "pass@16": 0.7 + gain,
    "length": 7.0,
    "curve": curve.tolist(),
    "to_ninety": merla.to_ninety(curve),
    "reward_variance": 1e-4 * (2 if gain else 1),
    "rest_variance": merla.rest_variance(curve),
    "norm_variance": 1.0,
    "norm": 0.5,
  }


@pytest.fixture
def results():
  found = [run(seed, "grpo", 0.0) for seed in range(3)]
  found += [run(seed, "token", 0.05) for seed in range(3)]
  found += [run(seed, "sequence", 0.0, falls=seed > 0) for seed in range(3)]
  start = {"seed": 0, "arm": "start", "pass@1": 0.2, "pass@16": 0.6}
  judged = [
    {
      "seed": seed,
      "potential": "token",
      "cpu_seconds": 70.0,
      "pairs": 9,
      "held_out": {
        place: {"mean": 0.7} for place in ("1/4", "1/2", "3/4", "whole")
      },
    }
    for seed in range(3)
  ]
  return {"runs": [*found, {**start, "length": 7.0}], "potentials": judged}


def _value(kind, text):
  if kind is tuple:
    return (text,)
  return text == "true" if kind is bool else kind(text)


def test_arms_are_runs_that_differ_in_what_they_say(tmp_path):
  seen = {}
  for arm in merla.ARMS:
    if arm == merla.START:
      continue
    train, score = merla.pipeline(tmp_path, 2, arm)
    found = flags(train.words)
    assert score.words[-1] == f"--run={found['workdir']}"
    base = config_lib.Config(workdir="w", policies=("p",))
    values = {
      field: _value(type(getattr(base, field)), text)
      for field, text in found.items()
    }
    values["lr"], values["samples"] = (2e-4,), (16,)
    seen[arm] = config_lib.Config(**values)
  for arm, config in seen.items():
    shaped = arm.split("_")[0] in ("token", "sequence", "bounded")
    assert (config.recipe == ("merla",)) == shaped
    if shaped:
      assert config.shaping == arm.split("_")[0]
      assert (config.shaping_alpha == 0) == arm.endswith("_zero")
      assert ("untrained" in config.potential[0]) == ("untrained" in arm)
    assert config.prompts * config.samples[0] * config.rounds == 65536
  assert seen["grpo"].reduction == seen["token"].reduction == "constant_mean"
  assert seen["ppo"].updates == 4 and seen["dapo"].drop_degenerate


def test_potentials_of_a_mode_are_trained_for_it(tmp_path):
  for name, kind in merla.POTENTIALS.items():
    found = flags(merla.potential(tmp_path, 1, name).words)
    assert found["mode"] == kind.mode and found["seed"] == "1"
    assert (found["steps"] == "0") == name.startswith("untrained")


def test_how_fast_and_how_steady():
  curve = np.minimum(np.arange(64) / 40, 1.0)
  assert 36 <= merla.to_ninety(curve) <= 44
  assert merla.rest_variance(np.arange(64.0)) < 1e-20
  zigzag = np.arange(64) + np.tile([0.1, -0.1], 32)
  assert np.isclose(merla.rest_variance(zigzag), 0.01, rtol=0.1)


def test_tables_compare_with_grpo_of_the_same_seed(results):
  table = {row[0]: row for row in rows(merla_report.table(results))}
  assert table["token, meta-trained"][2] == "+0.050 ± 0.000"
  assert table["GRPO"][2] == ""
  stable = {row[0]: row for row in rows(merla_report.stability(results))}
  assert stable["token, meta-trained"][1] == "0 of 3"
  assert stable["token, meta-trained"][4] == "2.00 [2.00, 2.00]"
  assert stable["sequence, meta-trained"][1] == "2 of 3"
  assert "the warm start" not in stable
  judged = rows(merla_report.potentials(results))
  assert judged[2][1] == "0.700 ± 0.000"


def test_the_figure_is_drawn(results, tmp_path):
  assert merla_report.figure(results, tmp_path / "x.png").stat().st_size > 5000
