"""The ExTra study: its arms differ as they say, its tables add up."""

import dataclasses
import json

import pytest

from experiments import warmstart
from experiments.studies import extra, extra_report
from mrl_jax.tasks import countdown
from mrl_jax.train import turn
from tests import runs

PHASES = dict.fromkeys(turn.PHASES, 1.0) | {"explore": 5.0}


def run(task, seed, arm, gain):
  more = {}
  if arm != extra.START:
    explored = {"explore/novelty": 0.5} if arm == "novelty" else {}
    more = {"cpu": PHASES, "cpu_late": PHASES, "explored": explored}
  level = 0.2 + 0.01 * seed + gain
  return {
    "task": task,
    "seed": seed,
    "arm": arm,
    "pass@1": level,
    "pass@4": level + 0.2,
    "pass@16": level + 0.4,
    "distinct_right": 2.0,
    "entropy": None if arm == extra.START else 0.3,
    "explored": {},
    "by_difficulty": {
      "3": {"problems": 9, "pass@1": level + 0.1},
      "10": {"problems": 9, "pass@1": level - 0.1},
    },
    **more,
  }


@pytest.fixture
def results():
  gains = {extra.START: -0.1, "grpo": 0.0, "novelty": 0.05, "restart": -0.01}
  found = [
    run(task, seed, arm, gain)
    for task in extra.TASKS
    for seed in range(3)
    for arm, gain in gains.items()
  ]
  return {"tasks": {task: {} for task in extra.TASKS}, "runs": found}


def rows(markdown):
  lines = markdown.splitlines()
  return [[w.strip() for w in line.split("|")[1:-1]] for line in lines]


def flags(words):
  pairs = [
    word.removeprefix("--").split("=", 1) for word in words if word[:2] == "--"
  ]
  return {pair[0]: pair[-1] for pair in pairs}


@pytest.mark.parametrize("task", extra.TASKS)
def test_arms_share_all_but_how_they_explore(task, tmp_path):
  lanes = {
    arm: extra.pipeline(tmp_path, task, 2, arm)
    for arm in extra.ARMS
    if arm != extra.START
  }
  given = {arm: flags(lane[1].words) for arm, lane in lanes.items()}
  own = ("regenerate", "novelty_weight")
  exploring = {
    (words["recipe"], *(words.pop(name, "") for name in own))
    for words in given.values()
  }
  assert len(exploring) == len(given)
  for arm, words in given.items():
    assert words.pop("workdir").endswith(f"{task}/seed2/{arm}")
    words.pop("recipe")
    assert words == given["grpo"], arm
  starts = [lane[0].words for lane in lanes.values()]
  assert "--seed=2" in starts[0]
  assert all(start == starts[0] for start in starts)


def test_the_start_is_scored_as_it_is_on_the_task_of_the_others(tmp_path):
  made, score = extra.pipeline(tmp_path, "countdown", 1, extra.START)
  trained = extra.pipeline(tmp_path, "countdown", 1, "both", ["--lr=1"])[1]
  words = flags(score.words)
  assert words["policies"] == str(made.made.parent)
  for name in ("task", "task_args", "completion_limit", "seed"):
    assert words[name] == flags(trained.words)[name]
  assert trained.words[-1] == "--lr=1"


@pytest.mark.parametrize("arm", ["both", "highest", "restart"])
def test_the_flags_of_an_arm_are_accepted(arm, tmp_path):
  """Everything but the run itself: the flags are parsed and checked."""
  words = extra.pipeline(tmp_path, "countdown", 0, arm)[1].words
  done = runs.run([*words, "--policies=/no/such/directory"])
  assert done.returncode == 2
  assert "--policies" in done.stderr


def test_the_table_pairs_seeds(results):
  cells = {tuple(row[:2]): row[2:] for row in rows(extra_report.table(results))}
  assert len(cells) == 2 + 2 * 4
  grpo = cells["chain", "GRPO"]
  assert grpo[0].startswith("0.210 ±")
  assert grpo[1] == ""
  assert cells["countdown", "novelty"][1] == "+0.050 ± 0.000"
  assert cells["countdown", "novelty"][5] == "+0.050 ± 0.000"
  assert cells["chain", "control: no prefix"][3] == "-0.010 ± 0.000"
  assert cells["chain", "the warm start"][-1] == ""


def test_a_seed_without_its_grpo_gives_no_difference(results):
  kept = [r for r in results["runs"] if (r["seed"], r["arm"]) != (1, "grpo")]
  gains = extra_report.gains({"runs": kept}, "chain", "novelty", "pass@1")
  assert gains == pytest.approx([0.05, 0.05])


def test_difficulties_stand_in_the_order_of_their_numbers(results):
  first = rows(extra_report.by_difficulty(results))
  assert first[0][1:] == ["3", "10"]
  line = next(row for row in first if row[:1] == ["GRPO"])
  assert [cell[:5] for cell in line[1:]] == ["0.310", "0.110"]


def test_costs_are_told_by_phase_and_as_a_share(results):
  total = 5.0 + len(turn.PHASES) - 1
  (line, _) = rows(extra_report.explored(results))[2:]
  assert line[:3] == ["chain", "novelty", "0.500"]
  assert line[-1] == f"{5 / total:.1%}"
  table = rows(extra_report.phases(results))
  assert len(table) == 2 + 2 * 3  # the start has none
  assert dict(zip(table[0], table[2], strict=True))["explore"] == "5.0"
  assert {row[-1] for row in table[2:]} == {f"{total:.1f}"}


def test_the_figure_is_drawn(results, tmp_path):
  path = extra_report.figure(results, tmp_path / "e.png")
  assert path.stat().st_size > 10_000


def test_what_is_finished_is_collected(tmp_path):
  scores = {f"pass@{k}": {"mean": 0.1 * k} for k in extra.KS}
  scores |= {"distinct": 1.5, "by_difficulty": {"3": {"pass@1": 0.1}}}
  for arm in (extra.START, "both"):
    folder = tmp_path / "chain" / "seed0" / arm
    folder.mkdir(parents=True)
    (folder / "eval.json").write_text(json.dumps({"results": {"char": scores}}))

  def write(name, records):
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / name).write_text(text)

  write(
    "metrics.jsonl",
    [
      {"pass@1": 0.1 * i, "entropy": float(i >= 8), "explore/hard": i}
      for i in range(15)
    ]
    + [{"pass@1": 0.5, "entropy": 1.0, "explore/regenerated_pass": 0.25}],
  )
  times = {f"cpu/{name}": 2.0 for name in turn.PHASES}
  write("timings.jsonl", [{"generated": 7, **times}] * 16)
  found = extra.collect(tmp_path, ["chain"], list(extra.ARMS), 2)["runs"]
  start, both = found
  assert start["arm"] == extra.START
  assert start["pass@4"] == both["pass@4"] == pytest.approx(0.4)
  assert both["distinct_right"] == 1.5
  assert both["explored"] == {
    "explore/hard": 7.0,
    "explore/regenerated_pass": 0.25,
  }
  assert both["entropy"] == 1.0  # of the last eight rounds
  assert both["generated"] == 16 * 7
  assert both["cpu"]["explore"] == 32.0
  assert both["cpu_late"]["explore"] == 16.0


def test_a_warm_start_learns_the_named_tasks_solutions(tmp_path, monkeypatch):
  seen = []
  batch = warmstart._batch

  def spy(problems, tokenizer):
    seen.extend(problems)
    return batch(problems, tokenizer)

  monkeypatch.setattr(warmstart, "_batch", spy)
  recipe = dataclasses.replace(runs.TINY, steps=2, batch=4)
  task = countdown.make(4, 4)
  losses = warmstart.make("char", tmp_path, recipe, task)
  assert len(losses) == 2
  assert len({problem.id for problem in seen}) == 8
  for problem in seen:
    assert problem.extra["difficulty"] == 4
    assert countdown.check(problem.answer, problem)
  assert (tmp_path / "model.safetensors").exists()


def test_a_mistake_in_a_warm_starts_task_is_one_line(tmp_path):
  command = runs.command(tmp_path, [])[:1]
  command += ["-m", "experiments.warmstart", "--task=countdown", "--steps=1"]
  command += [f"--out={tmp_path / 'new'}", '--task_args={"max_numbers": 9}']
  done = runs.run(command)
  assert done.returncode == 2
  assert done.stderr.strip().count("\n") == 0
  assert "max_numbers=9" in done.stderr
