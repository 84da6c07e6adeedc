"""The Mu-GRPO study's arms, tables and figure say what its results hold."""

import json

import numpy as np
import pytest

from experiments import bench
from experiments.studies import mu_grpo, mu_grpo_report, mu_grpo_speed
from mrl_jax.train import turn
from tests import runs

PHASES = dict.fromkeys(turn.PHASES, 1.0)


def results():
  found = []
  for seed in range(3):
    for arm in mu_grpo.ARMS:
      gain = 0.1 if arm.startswith("relaxed") else 0.0
      bins = np.linspace(1.0, 0.5, 16).tolist()
      found.append(
        {
          "seed": seed,
          "arm": arm,
          "pass@1": 0.6 + 0.01 * seed + gain,
          "pass@16": 0.9 + 0.01 * seed,
          "binned": {
            key: [None] * 16 if key == "veto" and arm == "on_policy" else bins
            for key in ("entropy", "ess", "clip_low", "clip_high", "veto", "kl")
          },
          "phases": {"seconds": PHASES, "cpu": PHASES},
        }
      )
  return {"runs": found, "stages": 4, "updates": 16}


def test_every_arm_makes_the_same_updates_of_as_many_samples():
  for arm, words in mu_grpo.ARMS.items():
    given = dict(word.removeprefix("--").split("=", 1) for word in words)
    rounds, updates, prompts = (
      int(given[name]) for name in ("rounds", "updates", "prompts")
    )
    assert rounds * updates == 64, arm
    assert rounds * prompts == 4096, arm
  staged = [w for w in mu_grpo.ARMS.values() if "--rounds=4" in w]
  assert len(staged) == len(mu_grpo.ARMS) - 2


def test_a_pipeline_gives_an_arms_flags_to_the_run(tmp_path):
  start, train, score = mu_grpo.pipeline(tmp_path, 3, "open_veto", ["--lr=1"])
  assert str(tmp_path / "seed3" / "char") in " ".join(start.words)
  assert "--seed=3" in train.words
  assert train.words[-1] == "--lr=1"
  assert set(mu_grpo.ARMS["open_veto"]) <= set(train.words)
  assert f"--run={tmp_path}/seed3/open_veto" in score.words


@pytest.mark.parametrize("arm", ["on_policy", "relaxed_cumulative"])
def test_the_flags_of_an_arm_are_accepted(arm, tmp_path):
  """Everything but the run itself: the flags are parsed and checked."""
  words = mu_grpo.pipeline(tmp_path, 0, arm)[1].words
  done = runs.run([*words, "--policies=/no/such/directory"])
  assert done.returncode == 2
  assert "--policies" in done.stderr


def test_the_table_pairs_seeds():
  lines = mu_grpo_report.table(results()).splitlines()
  cells = {
    row[0]: row[1:]
    for row in ([w.strip() for w in line.split("|")[1:-1]] for line in lines)
  }
  assert cells["on-policy"][0].startswith("0.610 ±")
  assert cells["staged, relaxed, veto"][1] == "+0.100 ± 0.000"
  assert cells["staged, standard clip"][1] == "+0.000 ± 0.000"
  assert cells["staged, relaxed, veto: both signs"][4] == "0.500 ± 0.000"
  assert cells["on-policy"][-1] == ""
  assert cells["staged, relaxed, veto"][-1] == "75.0%"


def test_the_phase_table_has_a_line_per_arm():
  lines = mu_grpo_report.phases(results()).splitlines()
  assert len(lines) == len(mu_grpo.ARMS) + 2
  total = float(len(turn.PHASES))  # each takes a second
  assert lines[2].endswith(f"| {total} ({total}) |")


def test_the_figure_is_drawn(tmp_path):
  path = mu_grpo_report.figure(results(), tmp_path / "m.png")
  assert path.stat().st_size > 10_000


def test_what_is_finished_is_collected(tmp_path):
  folder = tmp_path / "seed0" / "relaxed"
  folder.mkdir(parents=True)
  scores = {"pass@1": {"mean": 0.5}, "pass@16": {"mean": 0.9}}
  (folder / "eval.json").write_text(json.dumps({"results": {"char": scores}}))

  def write(name, records):
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / name).write_text(text)

  write("metrics.jsonl", [{"pass@1": 0.1 * i} for i in range(4)])
  write(
    "updates.jsonl",
    [
      {
        "entropy": float(i // 4),
        "staleness": i,
        "log_ratio_max": 0.5 * i,
        "ratio_max": 1.0 + i,
      }
      for i in range(10)
    ],
  )
  times = {f"{kind}/{n}": 2.0 for kind in ("seconds", "cpu") for n in PHASES}
  write("timings.jsonl", [{"generated": 7, **times}] * 4)
  (run,) = mu_grpo.collect(tmp_path, ("relaxed", "open"), 2)["runs"]
  assert run["pass@1"] == 0.5
  assert run["binned"]["entropy"] == [0.0, 1.0, 2.0]
  assert run["binned"]["veto"] == [None, None, None]
  assert run["first_gap"] == 0.0
  assert run["least_ratio_max"] == 1.0
  assert run["generated"] == 28
  assert run["phases"]["cpu"]["update"] == 8.0


def test_amdahls_law_holds_both_ways():
  seconds = {
    "generate_rounds": 6.0,
    "generate_stages": 3.0,
    "score": 1.0,
    "update": 4.0,
  }
  found = mu_grpo_speed.ratios(seconds)
  assert found == {"generation": 2.0, "end to end": 1.25, "share": 0.6}
  # Without scores of its own a stage saves what the law says.
  ends = mu_grpo_speed.ratios({**seconds, "score": 0.0})["end to end"]
  assert mu_grpo_speed.implied_share(2.0, ends) == pytest.approx(0.6, abs=1e-3)
  assert mu_grpo_speed.implied_share(1.82, 1.53) == pytest.approx(
    0.769, abs=1e-3
  )


def test_rounds_and_stages_draw_the_same_rows(monkeypatch):
  monkeypatch.setattr(mu_grpo_speed, "LIMIT", 8)
  monkeypatch.setattr(mu_grpo_speed, "SLOTS", 16)
  monkeypatch.setattr(mu_grpo_speed, "ROUNDS", 4)
  monkeypatch.setattr(mu_grpo_speed, "STAGES", 2)
  shape = bench.Shape(1, 16, 32, 2, 1, 8, 64, prompt_length=5)
  setup = mu_grpo_speed.Setup(shape)
  rounds, stages = setup.draw(4), setup.draw(2)
  left, right = (
    [
      out.tokens[i, :n].tolist()
      for out in calls
      for i, n in enumerate(out.lengths)
    ]
    for calls in (rounds, stages)
  )
  assert left == right
  assert len(left) == 64
