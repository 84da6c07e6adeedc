"""Files of right and wrong responses, and which tasks are held out."""

import json
import subprocess
import sys

import numpy as np
import pytest

from mrl_jax.shaping import pairs
from mrl_jax.tasks import files

PAIR = pairs.Pair("sums/small", "1+1=", "2", "3")
OTHER = pairs.Pair(
  "märchen", "Wie heißt „es“?\n", "Rapunzel", "🐸", 2.5, -1, 0.1
)


def lines(path, *rows):
  """Writes rows as they are, dicts as JSON."""
  texts = [r if isinstance(r, str) else json.dumps(r) for r in rows]
  path.write_text("\n".join(texts) + "\n", encoding="utf-8")
  return path


def test_write_and_read_are_inverse(tmp_path):
  path = tmp_path / "folder" / "pairs.jsonl"
  pairs.write(path, [PAIR, OTHER, PAIR])
  found, told = pairs.read(path)
  assert found == [PAIR, OTHER, PAIR]
  assert told == files.Report(rows=3, kept=3, dropped={})
  assert [p.name for p in path.parent.iterdir()] == ["pairs.jsonl"]


def test_what_ends_a_write_leaves_the_old_file(tmp_path, monkeypatch):
  path = tmp_path / "pairs.jsonl"
  pairs.write(path, [PAIR])

  def full(*paths):
    raise OSError("no space left")

  monkeypatch.setattr(pairs.os, "replace", full)
  with pytest.raises(OSError, match="no space"):
    pairs.write(path, [OTHER])
  assert pairs.read(path)[0] == [PAIR]


def test_optional_fields_have_defaults(tmp_path):
  row = {"task": "a", "prompt": "b", "chosen": "c", "rejected": "d", "x": 1}
  found, _ = pairs.read(lines(tmp_path / "a.jsonl", row))
  assert found == [pairs.Pair("a", "b", "c", "d", 1.0, 0.0, 0.5)]


@pytest.mark.parametrize(
  ("change", "reason"),
  [
    ({"task": None}, "missing task"),
    ({"prompt": " \n"}, "empty prompt"),
    ({"chosen": 2}, "chosen is not text"),
    ({"rejected": ""}, "empty rejected"),
    ({"rejected": "2"}, "chosen and rejected are the same"),
    ({"chosen": "\ud800"}, "chosen is not valid Unicode"),
    ({"share": 1.1}, r"share is not in [0, 1]"),
    ({"share": "0.5"}, "share is not a finite number"),
    ({"share": True}, "share is not a finite number"),
    ({"chosen_reward": float("nan")}, "chosen_reward is not a finite number"),
    ({"chosen_reward": 10**400}, "chosen_reward is not a finite number"),
    ({"rejected_reward": None}, "rejected_reward is not a finite number"),
    (
      {"chosen_reward": 0.0},
      "chosen_reward is not above rejected_reward",
    ),
    (
      {"chosen_reward": -2.0, "rejected_reward": -1.0},
      "chosen_reward is not above rejected_reward",
    ),
  ],
)
def test_a_row_that_cannot_be_used_is_counted(tmp_path, change, reason):
  bad = {**PAIR._asdict(), **change}
  path = lines(tmp_path / "a.jsonl", PAIR._asdict(), bad, "", bad)
  found, told = pairs.read(path)
  assert found == [PAIR]
  assert told == files.Report(rows=3, kept=1, dropped={reason: 2})


def test_lines_that_are_not_objects_are_counted(tmp_path):
  path = tmp_path / "a.jsonl"
  lines(path, PAIR._asdict(), "{", "[1]", "[" * 100_000, '"text"')
  with path.open("ab") as file:
    file.write(b'{"task": "\xff"}\n')
  _, told = pairs.read(path)
  assert told.dropped == {"not JSON": 3, "not a JSON object": 2}


def test_files_that_cannot_be_used_are_errors(tmp_path):
  with pytest.raises(FileNotFoundError, match="no such file"):
    pairs.read(tmp_path / "none.jsonl")
  path = lines(tmp_path / "a.jsonl", {"task": "a"}, "{")
  with pytest.raises(ValueError, match=r"out of 2: .*'missing prompt': 1"):
    pairs.read(path)


TASKS = [f"task/{n}" for n in range(20)]


def test_a_share_of_the_tasks_is_drawn_by_the_seed_alone():
  found = pairs.held_out(TASKS, 0.25, seed=3)
  assert len(found) == 5 and found < set(TASKS)
  assert found == pairs.held_out(TASKS[::-1] * 2, 0.25, seed=3)
  assert found != pairs.held_out(TASKS, 0.25, seed=4)


def test_tasks_are_held_out_by_how_their_names_begin():
  tasks = ["a/x/1", "a/x/2", "a/y/1", "b"]
  assert pairs.held_out(tasks, ["a/x/", "b"]) == {"a/x/1", "a/x/2", "b"}
  with pytest.raises(ValueError, match="no task begins with 'c'"):
    pairs.held_out(tasks, ["a", "c"])


@pytest.mark.parametrize("share", [-0.5, 0.0, 1.0, float("nan"), float("inf")])
def test_a_share_lies_between_none_and_all(share):
  with pytest.raises(ValueError, match=rf"\(0, 1\), got {share}"):
    pairs.held_out(TASKS, share)


@pytest.mark.parametrize("chosen", [0.01, ["task/"]])
def test_tasks_are_left_on_either_side(chosen):
  with pytest.raises(ValueError, match="on either side"):
    pairs.held_out(TASKS, chosen)


def test_rewards_are_standardised_per_task():
  some = [
    PAIR._replace(chosen_reward=3.0, rejected_reward=1.0),
    PAIR._replace(chosen_reward=10.0, rejected_reward=2.0),
    PAIR._replace(task="other", chosen_reward=0.3, rejected_reward=0.1),
  ]
  std = np.std([3.0, 1.0, 10.0, 2.0])
  expected = [2 / std, 8 / std, 2.0]
  np.testing.assert_allclose(pairs.standardised(some), expected, rtol=1e-12)


def test_pairs_need_no_jax():
  code = "import mrl_jax.shaping.pairs, sys; sys.exit('jax' in sys.modules)"
  assert subprocess.run([sys.executable, "-c", code]).returncode == 0
