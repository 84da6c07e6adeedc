"""What a policy takes from its peers, whatever they do."""

import json
import threading
import time

import numpy as np
import pytest

from mrl_jax import records
from mrl_jax.exchange import codec, inbox
from mrl_jax.exchange import store as store_lib

PROMPTS = {name: codec.prompt_hash(name) for name in ("p0", "p1")}


def header(kind, round, policy, prompt, sample, **changes):
  made = records.Header(
    id=codec.record_id(kind, round, policy, prompt, sample),
    kind=kind,
    schema=records.SCHEMA,
    round=round,
    policy=policy,
    version=round * 4,
    prompt_id=prompt,
    prompt_hash=codec.prompt_hash(prompt),
    tokenizer="t0",
    verifier="exact",
  )
  return made._replace(**changes)


def success(round=5, policy="char", prompt="p0", sample=0, **changes):
  head = header("success", round, policy, prompt, sample, **changes)
  return records.Success(head, f"{prompt} {round}")


def values(round=5, policy="char", prompt="p0"):
  return records.Values(header("values", round, policy, prompt, 0), 2, 1.0, 1.0)


def trajectory(round=5, policy="char", prompt="p0", sample=0):
  return records.Trajectory(
    header("trajectory", round, policy, prompt, sample),
    "ab",
    np.array([1, 2, 0], np.int32),
    np.array([1, 2, 2], np.int32),
    np.array([-1, -2, -0.5], np.float32),
    1.0,
    True,
    True,
  )


def publish(store, *made, policy="char", round=5):
  store.put(policy, round, codec.pack(policy, round, made))


def take(store, peers=("char",), round=5, **changes):
  options = {"deadline": 0.0} | changes
  return inbox.take(store, "merged", round, peers, PROMPTS, "exact", **options)


def reasons(found):
  return [refusal.reason for refusal in found.refused]


def ids(found):
  return [record.header.id for record in found.records]


class Clock:
  """A time that passes only while somebody sleeps."""

  def __init__(self, at=None):
    self.now, self.slept, self.at = 100.0, 0, dict(at or {})

  def clock(self):
    return self.now

  def sleep(self, seconds):
    assert 0 < seconds <= 0.1
    self.now, self.slept = self.now + seconds, self.slept + 1
    for when in [t for t in self.at if t <= self.now]:
      self.at.pop(when)()

  @property
  def options(self):
    return {"clock": self.clock, "sleep": self.sleep}


@pytest.fixture(params=["memory", "directory"])
def store(request, tmp_path):
  if request.param == "memory":
    return store_lib.Memory()
  return store_lib.Directory(tmp_path)


# Waiting.


def test_what_is_there_is_taken_at_once(store):
  made = [trajectory(), values(), success(prompt="p1"), success()]
  publish(store, *made)
  clock = Clock()
  found = take(store, deadline=60.0, **clock.options)
  assert ids(found) == [record.header.id for record in made]
  assert found.refused == () and found.published == {"char": 4}
  assert clock.slept == 0
  np.testing.assert_array_equal(found.records[0].logprobs, made[0].logprobs)


@pytest.mark.parametrize(("late", "reason"), [(9.9, []), (10.2, ["late"])])
def test_both_sides_of_the_deadline(store, late, reason):
  clock = Clock({100 + late: lambda: publish(store, success())})
  found = take(store, deadline=10.0, **clock.options)
  assert reasons(found) == reason and len(found.records) == 1 - len(reason)
  assert clock.now <= 110.0 + 1e-6


def test_one_deadline_for_all_the_peers(store):
  clock = Clock(
    {104.0: lambda: publish(store, success(policy="b"), policy="b")}
  )
  found = take(store, ("a", "b", "c", "d"), deadline=10.0, **clock.options)
  assert found.refused == tuple(records.Refusal(p, "late") for p in "acd")
  assert clock.now == pytest.approx(110.0)
  assert found.published == {"a": 0, "b": 1, "c": 0, "d": 0}
  assert len(found.records) == 1


def test_real_threads_before_and_past_the_deadline(store):
  over = threading.Event()

  def quick():
    time.sleep(0.05)
    publish(store, success(policy="quick"), policy="quick")

  def slow():
    over.wait(60)
    publish(store, success(policy="slow"), policy="slow")

  threads = [threading.Thread(target=work) for work in (quick, slow)]
  for thread in threads:
    thread.start()
  start = time.monotonic()
  found = take(store, ("slow", "quick"), deadline=1.0)
  took = time.monotonic() - start
  over.set()
  for thread in threads:
    thread.join()
  assert 1.0 <= took < 10.0
  assert found.refused == (records.Refusal("slow", "late"),)
  assert [r.header.policy for r in found.records] == ["quick"]
  assert take(store, ("slow",)).refused == ()


def test_a_wait_that_is_cancelled_is_over(store):
  publish(store, success())
  clock = Clock()
  found = take(
    store,
    ("gone", "char"),
    deadline=1e9,
    cancelled=lambda: clock.now > 103,
    **clock.options,
  )
  assert clock.now < 103.2
  assert reasons(found) == ["late"] and len(found.records) == 1


def test_nobody_to_listen_to(store):
  assert take(store, (), deadline=60.0) == inbox.Inbox((), (), {})


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"peers": ("char", "merged")}, "'merged' receives itself"),
    ({"peers": ("a", "b", "a")}, "'a' is there twice"),
    ({"round": -1}, "round: -1"),
    ({"staleness": -1}, "staleness: -1"),
    ({"deadline": float("nan")}, "deadline: nan"),
    ({"deadline": float("inf")}, "deadline: inf"),
    ({"deadline": -0.1}, "deadline: -0.1"),
  ],
)
def test_arguments_that_make_no_sense(changes, message):
  with pytest.raises(ValueError, match=message):
    take(store_lib.Memory(), **changes)


# Admission.


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("age", range(-2, 5))
def test_both_sides_of_the_staleness_bound(staleness, age):
  record = success(round=5 - age)
  reason = inbox.admit(
    record,
    receiver="merged",
    peer="char",
    round=5,
    prompts=PROMPTS,
    verifier="exact",
    staleness=staleness,
  )
  assert reason == (None if 0 <= age <= staleness else "stale")
  store = store_lib.Memory()
  publish(store, record)  # in this round's shipment
  assert reasons(take(store, staleness=staleness)) == [reason] * bool(reason)


@pytest.mark.parametrize(("staleness", "taken"), [(0, 0), (1, 1), (2, 2)])
def test_shipments_of_earlier_rounds(store, staleness, taken):
  for age, prompt in ((1, "p0"), (2, "p1"), (3, "p1")):
    made = [success(5 - age, prompt=prompt), success(5 - age, prompt="other")]
    publish(store, *made, round=5 - age)
  publish(store, success(6, prompt="p0"), round=6)
  found = take(store, staleness=staleness)
  assert found.refused == (records.Refusal("char", "late"),)
  expected = [success(4).header.id, success(3, prompt="p1").header.id]
  assert ids(found) == expected[:taken]


def test_an_old_record_in_a_newer_shipment_is_stale(store):
  publish(store, success(3), success(4, sample=1), round=4)
  publish(store, success(4, prompt="p1"))
  assert reasons(take(store, staleness=0)) == ["stale"]
  found = take(store, staleness=1)
  assert found.refused == (
    records.Refusal("char", "stale", success(3).header.id),
  )
  assert ids(found) == [
    success(4, prompt="p1").header.id,
    success(4, sample=1).header.id,
  ]


def test_the_newest_shipment_wins_for_each_prompt_and_kind(store):
  publish(store, success(3), success(3, prompt="p1"), values(3), round=3)
  publish(store, success(4), success(4, sample=1), round=4)
  publish(store, success(5, prompt="p1"), success(5, verifier="odd"))
  found = take(store, staleness=2)
  expected = [
    success(5, prompt="p1"),
    success(4),
    success(4, sample=1),
    values(3),
  ]
  assert ids(found) == [record.header.id for record in expected]
  assert reasons(found) == ["verifier"]


def test_what_is_published_again_is_taken_once(store):
  publish(store, success(4), success(4, sample=1), round=4)
  publish(store, success(4))
  found = take(store, staleness=1)
  assert ids(found) == [success(4).header.id] and found.refused == ()


def test_a_policy_does_not_take_its_own_records():
  reason = inbox.admit(
    success(policy="merged"),
    receiver="merged",
    peer="merged",
    round=5,
    prompts=PROMPTS,
    verifier="exact",
  )
  assert reason == "policy"


def test_the_first_rounds_have_few_before_them(store):
  publish(store, success(0), round=0)
  assert len(take(store, round=0, staleness=3).records) == 1
  assert len(take(store, round=1, staleness=3).records) == 1


@pytest.mark.parametrize(
  ("changes", "reason"),
  [
    ({"schema": records.SCHEMA + 1}, "schema"),
    ({"policy": "third"}, "policy"),
    ({"policy": "merged"}, "policy"),
    ({"round": 4}, "stale"),
    ({"round": 6}, "stale"),
    ({"prompt_id": "p9"}, "prompt"),
    ({"prompt_id": "p1"}, "prompt"),  # with the hash of p0
    ({"prompt_hash": "0"}, "prompt"),
    ({"verifier": "lenient"}, "verifier"),
    ({"id": success(sample=1).header.id}, "duplicate"),
  ],
  ids=str,
)
def test_what_is_not_admitted_costs_itself_only(store, changes, reason):
  first, odd, last = success(sample=1), success(**changes), success(sample=2)
  publish(store, first, odd, last)
  found = take(store)
  assert ids(found) == [first.header.id, last.header.id]
  ((peer, why, name),) = found.refused
  assert (peer, why) == ("char", reason)
  assert name == ("line 2" if reason == "schema" else odd.header.id)
  assert found.published == {"char": 3}
  assert reason == inbox.admit(
    odd,
    receiver="merged",
    peer="char",
    round=5,
    prompts=PROMPTS,
    verifier="exact",
    seen={first.header.id},
  )


def test_a_prompt_that_changed_is_refused_in_an_old_shipment_too(store):
  publish(
    store,
    success(4, prompt="p9"),
    success(4, prompt_hash="0"),
    round=4,
  )
  publish(store)
  found = take(store, staleness=1)
  assert reasons(found) == ["prompt"] and found.records == ()


def test_the_order_is_by_peer_then_as_published(store):
  for policy in ("b", "a"):
    made = [
      success(policy=policy, prompt=p, sample=i)
      for p, i in (("p1", 1), ("p0", 1), ("p1", 0), ("p0", 0))
    ]
    publish(store, *made, policy=policy)
  for peers in (("a", "b"), ("b", "a")):
    found = take(store, peers)
    assert [r.header.policy for r in found.records] == [
      p for p in peers for _ in range(4)
    ]
    places = [(r.header.prompt_id, r.header.id[-1]) for r in found.records]
    assert places == [("p1", "1"), ("p0", "1"), ("p1", "0"), ("p0", "0")] * 2


# Faults on disk.


@pytest.fixture
def disk(tmp_path):
  store = store_lib.Directory(tmp_path)
  publish(store, trajectory(), values(), success(prompt="p1"))
  return store, tmp_path / "char" / "000005.jsonl"


def test_a_file_cut_anywhere_costs_one_refusal(disk):
  store, path = disk
  data = path.read_bytes()
  whole = take(store).records
  for cut in range(len(data)):
    path.write_bytes(data[:cut])
    found = take(store)
    assert reasons(found) == ["truncated"]
    assert found.refused[0].record == ""
    assert [r.header for r in found.records] == [
      r.header for r in whole[: max(data[:cut].count(b"\n") - 1, 0)]
    ]


def test_a_flipped_bit_anywhere_costs_one_refusal(disk):
  store, path = disk
  data = bytearray(path.read_bytes())
  for i in range(len(data)):
    data[i] ^= 0x04
    path.write_bytes(data)
    found = take(store)
    assert len(found.refused) == 1, i
    assert found.refused[0].reason in ("corrupt", "schema", "truncated")
    data[i] ^= 0x04


@pytest.mark.parametrize(
  ("content", "reason"),
  [
    (b"", "truncated"),
    (b"hello\nworld\n", "corrupt"),
    (b"\x00" * 5000, "corrupt"),
    (codec.seal({"schema": 99}) + b"anything\n", "schema"),
    (b'{"schema": 99, "who": "char"}\n', "schema"),
    (codec.pack("third", 5, [success()]), "policy"),
    (codec.pack("char", 4, [success()]), "stale"),
  ],
  ids=range(7),
)
def test_a_file_that_is_something_else_costs_one_refusal(disk, content, reason):
  store, path = disk
  path.write_bytes(content)
  found = take(store)
  assert found == inbox.Inbox(
    (), (records.Refusal("char", reason),), {"char": 0}
  )


def test_another_schema_costs_one_refusal(tmp_path, monkeypatch):
  store = store_lib.Directory(tmp_path)
  monkeypatch.setattr(records, "SCHEMA", records.SCHEMA + 1)
  made = [success(schema=records.SCHEMA, sample=i) for i in range(9)]
  publish(store, *made)
  monkeypatch.undo()
  assert reasons(take(store)) == ["schema"]


def test_a_file_that_was_removed_is_late_and_a_locked_one_gone(disk):
  store, path = disk
  path.unlink()
  assert reasons(take(store)) == ["late"]
  path.mkdir()
  clock = Clock()
  found = take(store, deadline=60.0, **clock.options)
  assert found.refused == (records.Refusal("char", "gone"),)
  assert clock.slept == 0
  assert found.published == {"char": 0}


def test_a_damaged_old_shipment_was_counted_in_its_own_round(disk):
  store, path = disk
  path.write_bytes(path.read_bytes()[:-5])
  publish(store, round=6)
  found = take(store, round=6, staleness=1)
  assert found.refused == () and len(found.records) == 2
  (path.parent / "000004.jsonl").mkdir()
  again = take(store, round=6, staleness=2)
  assert (ids(again), again.refused) == (ids(found), ())


def test_a_good_peer_is_heard_beside_bad_ones(tmp_path):
  store = store_lib.Directory(tmp_path)
  for name in ("cut", "odd", "good", "locked"):
    publish(store, success(policy=name), policy=name)
  cut = tmp_path / "cut" / "000005.jsonl"
  cut.write_bytes(cut.read_bytes()[:-1])
  odd = tmp_path / "odd" / "000005.jsonl"
  odd.write_bytes(odd.read_bytes().replace(b"p0 5", b"p0 6"))
  locked = tmp_path / "locked" / "000005.jsonl"
  locked.unlink()
  locked.mkdir()
  found = take(store, ("late", "cut", "odd", "locked", "good"))
  assert ids(found) == [success(policy="good").header.id]
  assert [(r.peer, r.reason) for r in found.refused] == [
    ("late", "late"),
    ("cut", "truncated"),
    ("odd", "corrupt"),
    ("locked", "gone"),
  ]


def test_records_can_be_read_without_this_program(disk):
  _, path = disk
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  assert lines[0]["content"]["records"] == 3
  assert [x["content"]["kind"] for x in lines[1:]] == [
    "trajectory",
    "values",
    "success",
  ]
