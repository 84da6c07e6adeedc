"""The log survives a kill: bit-identical files, clear errors, no NaN."""

import enum
import json
import struct

import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax.train import metrics

NAN = float("nan")


def _play(log, rounds):
  """Writes rounds whose contents depend on the round number alone."""
  for i in rounds:
    rng = np.random.default_rng(i)
    for policy in ("char", "merged"):
      log.rollouts(
        {"policy": policy, "round": i, "completion": f"é\n{i}", "reward": r}
        for r in rng.random(3)
      )
      log.metrics(policy, i, {"reward": rng.random(), "pass@1": np.float32(0)})
      log.updates(policy, i, [{"update": 0, "loss": rng.random()}])
      log.timings(policy, i, {"seconds": 1.0})
      log.exchange([{"policy": policy, "round": i, "peer": "other"}])


def _bytes(workdir):
  return {n: (workdir / f"{n}.jsonl").read_bytes() for n in metrics.FILES}


def _events(directory):
  """Reads (step, is_session_start, {tag: value}) from the event files."""
  events = []
  for path in sorted(directory.glob("events*")):
    data = path.read_bytes()
    while data:
      size = struct.unpack("<Q", data[:8])[0]
      event = metrics.tensorboardX.proto.event_pb2.Event()
      event.ParseFromString(data[12 : 12 + size])
      start = event.HasField("session_log")
      values = {v.tag: v.simple_value for v in event.summary.value}
      events.append((event.step, start, values))
      data = data[16 + size :]
  return events


@pytest.mark.parametrize("resumes", [(0,), (4,), (2, 3, 7)])
def test_killed_and_resumed_files_equal_uninterrupted(tmp_path, resumes):
  with metrics.Log(tmp_path / "whole") as log:
    _play(log, range(8))
  state, done = None, 0
  for stop in resumes:
    with metrics.Log(tmp_path / "cut", state=state) as log:
      _play(log, range(done, stop))
      state, done = log.state(), stop
      _play(log, range(stop, stop + 2))  # lost: after the checkpoint
    with open(tmp_path / "cut" / "metrics.jsonl", "ab") as file:
      file.write(b'{"policy": "ch')  # and a line cut short by the kill
  state = json.loads(json.dumps(state))  # as a checkpoint keeps it
  assert state["round"] == done - 1
  with metrics.Log(tmp_path / "cut", state=state) as log:
    _play(log, range(done, 8))
  assert _bytes(tmp_path / "cut") == _bytes(tmp_path / "whole")


def test_no_state_starts_afresh(tmp_path):
  for _ in range(2):
    with metrics.Log(tmp_path) as log:
      _play(log, range(2))
  assert len(metrics.read(tmp_path / "metrics.jsonl")) == 4


def test_state_is_what_is_on_disk(tmp_path):
  with metrics.Log(tmp_path) as log:
    assert log.state()["round"] == -1
    _play(log, range(3))
    state = log.state()
    for name, data in _bytes(tmp_path).items():
      assert state[name] == len(data) > 0
    assert state["round"] == 2


@pytest.mark.parametrize("damage", ["short", "gone", "other"])
def test_changed_files_are_refused_and_left_alone(tmp_path, damage):
  with metrics.Log(tmp_path) as log:
    _play(log, range(3))
    state = log.state()
  path = tmp_path / "rollouts.jsonl"
  if damage == "short":
    path.write_bytes(path.read_bytes()[:-5])
  elif damage == "gone":
    path.unlink()
  else:
    path.write_bytes(b"x" * (state["rollouts"] + 100))
  with open(tmp_path / "metrics.jsonl", "ab") as file:
    file.write(b"tail")
  before = (tmp_path / "metrics.jsonl").read_bytes()
  with pytest.raises(ValueError, match=r"rollouts\.jsonl.*file was changed"):
    metrics.Log(tmp_path, state=state)
  assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_incomplete_state_is_named(tmp_path):
  with pytest.raises(ValueError, match="'timings' is missing"):
    metrics.Log(tmp_path, state={"round": 1, "metrics": 0})


def test_only_the_writer_writes(tmp_path):
  with metrics.Log(tmp_path / "none", writer=False) as log:
    _play(log, range(3))
    offsets = dict.fromkeys(metrics.FILES, 0)
    assert log.state() == {"round": 2, **offsets}
  assert not (tmp_path / "none").exists()


def test_values_are_json_with_sorted_keys(tmp_path):
  class Outcome(enum.StrEnum):
    WRONG = "wrong"

  values = {
    "z": NAN,
    "y": np.float32("inf"),
    "x": np.float64(0.1),
    "w": np.int64(3),
    "v": np.asarray([1.5, NAN]),
    "u": {"b": (1, None), "a": True},
    "t": Outcome.WRONG,
    "s": np.bool_(False),
    "q": jnp.asarray([0.5, NAN], jnp.bfloat16),
    "r": "日本\ud83d\u2028",  # a lone surrogate must not stop a run
  }
  with metrics.Log(tmp_path) as log:
    log.metrics("char", 0, values)
  raw = (tmp_path / "metrics.jsonl").read_bytes()
  assert raw.count(b"\n") == 1 and b"NaN" not in raw and b"Inf" not in raw
  pairs = json.loads(raw, object_pairs_hook=list)
  assert [key for key, _ in pairs] == sorted(key for key, _ in pairs)
  assert b'"x": 0.1}' not in raw and b'"x": 0.1,' in raw
  record = metrics.read(tmp_path / "metrics.jsonl")[0]
  assert record == {
    "policy": "char",
    "round": 0,
    "z": None,
    "y": None,
    "x": 0.1,
    "w": 3,
    "v": [1.5, None],
    "u": {"a": True, "b": [1, None]},
    "t": "wrong",
    "s": False,
    "q": [0.5, None],
    "r": "日本\ud83d\u2028",
  }


@pytest.mark.parametrize("value", [b"bytes", object(), {1, 2}])
def test_what_is_not_json_is_refused(tmp_path, value):
  with metrics.Log(tmp_path) as log, pytest.raises((TypeError, ValueError)):
    log.rollouts([{"x": value}])


def test_floats_read_back_exactly(tmp_path):
  numbers = np.random.default_rng(0).normal(size=100) * 1e-7
  with metrics.Log(tmp_path) as log:
    log.rollouts({"x": x} for x in numbers)
  back = [r["x"] for r in metrics.read(tmp_path / "rollouts.jsonl")]
  assert back == numbers.tolist()


def test_record_keys_cannot_be_overwritten(tmp_path):
  with metrics.Log(tmp_path) as log, pytest.raises(ValueError, match="round"):
    log.metrics("char", 0, {"round": 7})


def test_remote_workdir_is_refused():
  with pytest.raises(ValueError, match="local directory"):
    metrics.Log("gs://bucket/run")


def test_read_leaves_out_a_partial_last_line(tmp_path):
  path = tmp_path / "x.jsonl"
  whole = b'{"a": 1}\n{"a": 2}\n'
  for tail in (b"", b"{", b'{"a": 3', b'{"a": "\xe6\x97'):
    path.write_bytes(whole + tail)
    assert metrics.read(path) == [{"a": 1}, {"a": 2}]
  path.write_bytes(b'{"a": 1}\n{"a"\n{"a": 2}\n')
  with pytest.raises(ValueError, match=r"x\.jsonl:2"):
    metrics.read(path)


def test_tensorboard_forgets_rounds_after_the_checkpoint(tmp_path):
  with metrics.Log(tmp_path) as log:
    _play(log, range(2))
    state = log.state()
    _play(log, range(2, 4))
  with metrics.Log(tmp_path, state=state) as log:  # within the same second
    log.metrics("char", 2, {"reward": 0.5, "kl": NAN})
  events = _events(tmp_path / "tensorboard" / "char")
  assert [step for step, start, _ in events if start] == [0, 2]
  rewards = [(s, v["reward"]) for s, _, v in events if "reward" in v]
  assert [step for step, _ in rewards] == [0, 1, 2, 3, 2]
  assert rewards[-1] == (2, 0.5)
  tags = {tag for _, _, values in events for tag in values}
  assert tags == {"reward", "pass_at_1", "time/seconds"}
