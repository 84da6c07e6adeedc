"""ExTra in whole runs: it resumes to the bit, composes, and reports itself."""

import json

import pytest

from mrl_jax.tasks import countdown, dataset
from mrl_jax.train import checkpoint, metrics
from tests import runs

FLAGS = {
  "recipe": "extra",
  "task": "countdown",
  "task_args": '{"min_numbers": 3, "max_numbers": 5, "size": 8}',
  "completion_limit": 12,
  "lr": 1e-3,
  "rounds": 8,
  "save_every": 3,
  "regenerate_boundary": "tokens",
  "regenerate_gap": 1,
  "regenerate_slots": 1,
  "regenerate_warmup": 1,
}


def finished(arguments):
  done = runs.run(arguments)
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("extra") / "run"
  policies = runs.learned("countdown")
  return workdir, finished(runs.command(workdir, policies, **FLAGS))


def test_both_mechanisms_are_at_work(whole):
  workdir, output = whole
  rounds = metrics.read(workdir / "metrics.jsonl")
  assert not rounds[0]["explore/regenerated"]
  assert sum(r["explore/regenerated"] for r in rounds) >= 4
  assert rounds[0]["explore/warm"] == 0  # of 8 prompts, 4 a round
  assert rounds[-1]["explore/warm"] == 1
  assert max(r.get("explore/novelty", 0) for r in rounds) > 0
  for title in ("novelty", "continued", "queue"):
    assert title in output
  rows = metrics.read(workdir / "rollouts.jsonl")
  again = [row for row in rows if row.get("root")]
  assert len(again) == 4 * sum(r["explore/regenerated"] for r in rounds)
  prompts = {r["prompt_id"]: r["prompt"] for r in rows if not r.get("root")}
  for row in again:
    assert row["prefix"] > 0
    assert row["prompt"] == prompts[row["root"]]
    problem = dataset.Problem("", row["prompt"])
    right = countdown.check(row["completion"], problem)
    assert right == (row["outcome"] == "correct")
    # What was sampled now is the answer without the prefix, and with EOS.
    stop = row["finish"] == "stop"
    text = len(row["completion"]) - row["prefix"]
    assert len(row["tokens"]) == text + stop


def test_what_is_said_of_rewards_is_of_the_tasks_prompts_alone(whole):
  workdir, _ = whole
  rows = metrics.read(workdir / "rollouts.jsonl")
  for record in metrics.read(workdir / "metrics.jsonl"):
    mine = [r for r in rows if r["round"] == record["round"]]
    own = [r["outcome"] == "correct" for r in mine if not r.get("root")]
    assert record["pass@1"] == pytest.approx(sum(own) / len(own))


@pytest.mark.parametrize("rounds", [4, 7])
def test_killed_and_started_again_it_leaves_the_same(rounds, whole, tmp_path):
  workdir = tmp_path / "run"
  arguments = runs.command(workdir, runs.learned("countdown"), **FLAGS)
  process = runs.start(arguments)
  while rounds:
    line = process.stdout.readline()
    assert line
    rounds -= line.startswith("round ")
  process.kill()
  process.wait()
  process.stdout.close()
  finished(arguments)
  runs.same(workdir, whole[0])
  assert state(workdir) == state(whole[0])


def state(workdir):
  """The last checkpoint's memories and queue, as JSON."""
  import orbax.checkpoint as ocp

  with checkpoint.Checkpoints(workdir / "checkpoints") as checkpoints:
    number = checkpoints.latest()
  folder = workdir / "checkpoints" / str(number)
  with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
    host = reader.restore(folder / "host")
  with ocp.StandardCheckpointer() as reader:
    arrays = reader.restore(folder / "memories")
  found = {
    f"{part}/{name}": array.tolist()
    for part, inner in arrays["countdown"].items()
    for name, array in inner.items()
  }
  assert {"seen/rows", "cuts/rows", "mean/mean"} <= set(found)
  assert host["explored"]["countdown"]["queue"]["items"]
  return json.dumps([host["explored"], found])


@pytest.mark.parametrize(
  "flags",
  [
    {"recipe": "extra+sgt"},
    {"recipe": "extra", "embedder": "policy", "novelty_place": "before"},
    {"recipe": "regenerate", "regenerate": "restart"},
    {"recipe": "novelty", "novelty_pool": "correct", "kl_coefficient": 0.01},
  ],
  ids=lambda f: "-".join(map(str, f.values())),
)
def test_each_alone_and_on_top_of_another(flags, tmp_path):
  kinds = ("countdown", "char") if "sgt" in flags["recipe"] else ("countdown",)
  values = {**FLAGS, "rounds": 4, "export": "false", **flags}
  finished(runs.command(tmp_path / "run", runs.learned(*kinds), **values))
  rounds = metrics.read(tmp_path / "run" / "metrics.jsonl")
  for record in rounds:
    assert record["skipped"] == 0
    assert ("explore/warm" in record) == ("regenerate" not in flags["recipe"])
    assert ("explore/queue" in record) == ("novelty" not in flags["recipe"])


def test_on_top_of_mu_grpo_a_stage_killed_in_its_middle_is_the_same(tmp_path):
  values = {
    **FLAGS,
    "rounds": 3,
    "updates": 4,
    "prompts": 8,
    "part": 4,
    "rescore": "true",
    "drop_degenerate": "true",
    "veto": "suffix",
    "clip_low": 0.5,
    "save_every": 1,
    "save_updates": 2,
    "regenerate_slots": 2,
  }
  paths = runs.learned("countdown")
  one, two = tmp_path / "one", tmp_path / "two"
  finished(runs.command(one, paths, **values))
  arguments = runs.command(two, paths, **values)
  process = runs.start(arguments)
  while not process.stdout.readline().startswith("round "):
    pass
  process.kill()
  process.wait()
  process.stdout.close()
  finished(arguments)
  runs.same(one, two)
