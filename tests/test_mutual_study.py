"""The study's table and figure say what its results hold."""

import json

import numpy as np
import pytest

from experiments.studies import mutual, mutual_report


def results():
  runs = []
  for seed in range(3):
    for method, gain in (("grpo", 0.0), ("sgt", 0.1)):
      for policy, level in (("char", 0.6), ("merged", 0.4)):
        score = level + gain + 0.01 * seed
        runs.append(
          {
            "seed": seed,
            "method": method,
            "policy": policy,
            "curve": np.linspace(level, score, 30).tolist(),
            "pass@1": score,
            "pass@16": score + 0.2,
          }
        )
  return {"runs": runs}


def test_intervals_are_students():
  mean, half = mutual_report.interval([1.0, 2.0, 3.0])
  assert mean == 2.0
  assert half == pytest.approx(4.302653 / np.sqrt(3), rel=1e-5)
  assert np.isnan(mutual_report.interval([1.0])[1])


def test_the_table_pairs_seeds_and_averages_policies():
  lines = mutual_report.table(results()).splitlines()
  cells = {
    tuple(words[:2]): words[2:]
    for words in ([w.strip() for w in line.split("|")[1:-1]] for line in lines)
  }
  assert cells["average", "GRPO"][0].startswith("0.510 ±")
  assert cells["average", "SGT"][0].startswith("0.610 ±")
  assert cells["average", "SGT"][2].startswith("0.810 ±")
  # The seeds differ, the gain of each does not.
  assert cells["char", "SGT"][1] == cells["char", "SGT"][3] == "+0.100 ± 0.000"
  assert cells["char", "GRPO"][1] == ""


def test_the_figure_is_drawn(tmp_path):
  path = mutual_report.figure(results(), tmp_path / "m.png")
  assert path.stat().st_size > 10_000


def test_a_pipeline_trains_every_method_from_the_seeds_warm_starts(tmp_path):
  lanes = {m: mutual.pipeline(tmp_path, 3, m, 7) for m in mutual.METHODS}
  starts = {tuple(str(job.made) for job in lane[:2]) for lane in lanes.values()}
  assert len(starts) == 1
  for method, lane in lanes.items():
    words = lane[2].words
    assert "--seed=3" in words
    assert "--rounds=7" in words
    name, *changes = mutual.METHODS[method]
    assert f"--flagfile=experiments/flagfiles/{name}.flags" in words
    assert set(changes) <= set(words)
    assert f"--policies={tmp_path}/seed3/char,{tmp_path}/seed3/merged" in words


def test_what_is_finished_is_collected(tmp_path):
  root = tmp_path / "seed0" / "sgt"
  root.mkdir(parents=True)
  scores = {"pass@1": {"mean": 0.5}, "pass@16": {"mean": 0.9}}
  (root / "eval.json").write_text(
    json.dumps({"results": {"char": scores, "merged": scores}})
  )
  lines = [
    {"policy": p, "round": r, "pass@1": 0.1 * r, "exchange/used": 2}
    for r in range(3)
    for p in ("char", "merged")
  ]
  text = "".join(json.dumps(line) + "\n" for line in lines)
  (root / "metrics.jsonl").write_text(text)
  found = mutual.collect(tmp_path, ("grpo", "sgt"), 2)["runs"]
  assert [run["policy"] for run in found] == ["char", "merged"]
  assert found[0]["curve"] == [0.0, 0.1, 0.2]
  assert found[0]["exchange/used"] == 6
