"""Records as lines: exact, checked, and never an exception for a reader."""

import hashlib
import json
import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl_jax import records
from mrl_jax.exchange import codec

TINY = settings(max_examples=60, deadline=None)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NAME = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9)
COUNT = st.integers(0, 2**53)
REAL = st.floats(allow_nan=False, allow_infinity=False)


def header(kind="trajectory", **changes):
  made = records.Header(
    id=codec.record_id(kind, 3, "char", "p7", 1),
    kind=kind,
    schema=records.SCHEMA,
    round=3,
    policy="char",
    version=40,
    prompt_id="p7",
    prompt_hash=codec.prompt_hash("1+1="),
    tokenizer="t0",
    verifier="exact",
  )
  return made._replace(**changes)


def trajectory(**changes):
  made = records.Trajectory(
    header=header(),
    text="é1\n",
    tokens=np.array([7, 8, 9, 2], np.int32),
    ends=np.array([2, 3, 4, 4], np.int32),
    logprobs=np.array([-0.1, -1e-30, 0.0, -3.25], np.float32),
    reward=1.0,
    success=True,
    finished=True,
  )
  return made._replace(**changes)


def values(count=3, total=2.0, square=2.0):
  return records.Values(header("values"), count, total, square)


def success(text="42"):
  return records.Success(header("success"), text)


SAMPLES = [trajectory(), values(), success()]


def content(record):
  return json.loads(codec.encode(record))["content"]


def sealed(fields):
  """A line as another program would write it, whatever the fields hold."""
  body = json.dumps(fields, sort_keys=True, separators=(",", ":"))
  checksum = hashlib.sha256(body.encode()).hexdigest()
  return f'{{"checksum":"{checksum}","content":{body}}}\n'.encode()


def same(left, right):
  """Equal to the bit: arrays, NaN and the sign of zero too."""
  if type(left) is not type(right):
    return False
  if isinstance(left, np.ndarray):
    return left.dtype == right.dtype and left.tobytes() == right.tobytes()
  if isinstance(left, float):
    return struct.pack("d", left) == struct.pack("d", right)
  if isinstance(left, tuple):
    return len(left) == len(right) and all(map(same, left, right))
  return left == right


@st.composite
def headers(draw, kind):
  return records.Header(
    id=draw(NAME),
    kind=kind,
    schema=records.SCHEMA,
    round=draw(COUNT),
    policy=draw(NAME),
    version=draw(COUNT),
    prompt_id=draw(TEXT),
    prompt_hash=draw(TEXT),
    tokenizer=draw(TEXT),
    verifier=draw(TEXT),
  )


@st.composite
def trajectories(draw):
  text, finished = draw(TEXT), draw(st.booleans())
  size = len(text.encode())
  ends = sorted(draw(st.lists(st.integers(0, size), max_size=12)))
  if size or ends:
    ends.append(size)
  ends += [size] * finished
  tokens = [draw(st.integers(0, 2**31 - 1)) for _ in ends]
  lp = st.floats(max_value=2**-14, width=32, allow_infinity=False) | st.just(
    0.0
  )
  return records.Trajectory(
    header=draw(headers("trajectory")),
    text=text,
    tokens=np.array(tokens, np.int32),
    ends=np.array(ends, np.int32),
    logprobs=np.array([draw(lp) for _ in ends], np.float32),
    reward=draw(REAL | st.just(math.nan)),
    success=draw(st.booleans()),
    finished=finished,
    advantage=draw(st.none() | REAL),
  )


@st.composite
def sums(draw):
  rewards = draw(st.lists(st.floats(-1e9, 1e9), max_size=8))
  return records.Values(
    draw(headers("values")),
    len(rewards),
    math.fsum(rewards),
    math.fsum(r * r for r in rewards),
  )


# One record.


@given(
  trajectories() | sums() | st.builds(records.Success, headers("success"), TEXT)
)
@TINY
def test_what_was_written_is_read_to_the_bit(record):
  line = codec.encode(record)
  assert line.endswith(b"}\n") and line.count(b"\n") == 1
  back = codec.decode(line)
  assert same(back, record)
  assert codec.encode(back) == line
  assert same(codec.decode(line[:-1]), record)  # without the newline too


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8))
@TINY
def test_every_finite_float32_survives(patterns):
  logprobs = np.array(patterns, np.uint32).view(np.float32)
  logprobs = np.where(np.isfinite(logprobs), -np.abs(logprobs), np.float32(-1))
  count = len(patterns)
  record = trajectory(
    text="x" * count,
    tokens=np.arange(count, dtype=np.int32),
    ends=np.arange(1, count + 1, dtype=np.int32),
    logprobs=logprobs,
    finished=False,
  )
  back = codec.decode(codec.encode(record))
  assert back.logprobs.tobytes() == logprobs.tobytes()


def test_a_line_is_json_with_sorted_keys_that_people_can_read():
  line = codec.encode(trajectory(reward=math.nan))
  outer = json.loads(line)
  assert list(outer) == ["checksum", "content"]
  assert list(outer["content"]) == sorted(outer["content"])
  assert outer["content"]["text"] == "é1\n" and "é1" in line.decode()
  assert outer["content"]["reward"] is None
  assert math.isnan(codec.decode(line).reward)


def test_numpy_numbers_and_lists_are_taken_as_what_they_say():
  plain = trajectory(reward=0.5)
  other = trajectory(
    header=header(round=np.int64(3)),
    tokens=[7, 8, 9, 2],
    ends=np.array([2, 3, 4, 4], np.int64),
    reward=np.float32(0.5),
    success=np.bool_(True),
    advantage=math.nan,
  )
  assert codec.encode(other) == codec.encode(plain)


@pytest.mark.parametrize("record", SAMPLES, ids=lambda r: r.header.kind)
def test_any_damaged_byte_is_noticed(record):
  line = codec.encode(record)
  place = line.index(b'"schema":') + len(b'"schema":')
  for i in range(len(line) - 1):
    for bit in (0x01, 0x10, 0x80):
      broken = bytearray(line)
      broken[i] ^= bit
      reason = codec.decode(bytes(broken))
      assert reason == "corrupt" or (i == place and reason == "schema"), i


@pytest.mark.parametrize("record", SAMPLES, ids=lambda r: r.header.kind)
def test_a_cut_line_is_no_record(record):
  line = codec.encode(record)
  for i in range(len(line) - 1):
    assert codec.decode(line[:i]) in ("corrupt", "malformed")


@given(
  st.binary(max_size=200)
  | st.text().map(lambda s: s.encode("utf-8", "surrogatepass"))
)
@TINY
def test_garbage_raises_nothing(data):
  assert codec.decode(data) in ("malformed", "corrupt")
  assert codec.unpack(data).records == ()


@pytest.mark.parametrize(
  "data",
  [
    b"",
    b"{}",
    b"[]",
    b"1",
    b"null",
    b"NaN",
    b"[" * 10**5,
    b"1" * 10**4,
    b"{}x",
  ],
  ids=range(9),
)
def test_json_that_is_no_record_is_malformed(data):
  assert codec.decode(data) == "malformed"


JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | REAL | TEXT,
  lambda inner: (
    st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2)
  ),
  max_leaves=4,
)


@given(st.sampled_from(SAMPLES), st.data(), JSON)
@TINY
def test_any_field_may_hold_anything_and_nothing_raises(record, data, value):
  fields = content(record)
  name = data.draw(st.sampled_from(sorted(fields)))
  fields[name] = value
  found = codec.decode(codec.seal(fields))
  assert isinstance(found, str | records.Record)
  if not isinstance(found, str):
    assert type(value) in (str, int, float, bool, type(None))


def test_another_schema_is_told_before_any_field_is_looked_at():
  line = codec.encode(trajectory(header=header(schema=records.SCHEMA + 1)))
  assert codec.decode(line) == "schema"
  assert codec.decode(codec.seal({"schema": 0, "words": ["other"]})) == "schema"
  assert codec.decode(b'{"schema": 7}') == "schema"
  fields = content(values()) | {"schema": True}
  assert codec.decode(codec.seal(fields)) == "malformed"


BAD = {
  "missing": lambda f: f.pop("text"),
  "extra": lambda f: f.update(more=1),
  "no id": lambda f: f.update(id=""),
  "no policy": lambda f: f.update(policy=""),
  "unknown kind": lambda f: f.update(kind="rumour"),
  "kind of list": lambda f: f.update(kind=["success"]),
  "kind of another": lambda f: f.update(kind="values"),
  "id": lambda f: f.update(id=3),
  "surrogate": lambda f: f.update(text="\ud800"),
  "surrogate in the header": lambda f: f.update(verifier="\udfff"),
  "negative round": lambda f: f.update(round=-1),
  "huge round": lambda f: f.update(round=2**60),
  "real round": lambda f: f.update(round=3.0),
  "flag for a number": lambda f: f.update(round=True),
  "number for a flag": lambda f: f.update(success=1),
  "integer reward": lambda f: f.update(reward=1),
  "array as list": lambda f: f.update(tokens=[1, 2, 3, 4]),
  "not base64": lambda f: f.update(tokens="é==="),
  "base64 with spaces": lambda f: f.update(tokens="AAAA AAA="),
  "half an integer": lambda f: f.update(tokens="AAA="),
  "lengths": lambda f: f.update(tokens="AAAAAA=="),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_field_is_malformed(name):
  fields = content(trajectory())
  assert same(codec.decode(sealed(fields)), trajectory())
  BAD[name](fields)
  assert codec.decode(sealed(fields)) == "malformed"


INVALID = {
  "lengths": trajectory(logprobs=np.zeros(3, np.float32)),
  "ends: must rise": trajectory(ends=np.array([3, 2, 4, 4], np.int32)),
  "to the text's 4 bytes": trajectory(ends=np.array([2, 3, 5, 5], np.int32)),
  "rise to": trajectory(ends=np.array([-1, 3, 4, 4], np.int32)),
  "EOS has no bytes": trajectory(ends=np.array([1, 2, 3, 4], np.int32)),
  "tokens: below": trajectory(tokens=np.array([7, -8, 9, 2], np.int32)),
  "tokens: none": trajectory(tokens=[], ends=[], logprobs=[], text=""),
  "32 bits": trajectory(tokens=np.array([2**40, 0, 0, 0])),
  r"shape \(1, 4\)": trajectory(tokens=np.zeros((1, 4), np.int32)),
  "finite and": trajectory(logprobs=[0.0, math.nan, 0.0, 0.0]),
  "logprobs: must": trajectory(logprobs=[-math.inf, 0.0, 0.0, 0.0]),
  "at most 0": trajectory(logprobs=[2e-4, 0.0, 0.0, 0.0]),
  "reward: inf": trajectory(reward=math.inf),
  "advantage: -inf": trajectory(advantage=-math.inf),
  "count: -1": values(count=-1),
  "total: nan": values(total=math.nan),
  "square -2.0": values(square=-2.0),
  "no numbers have": values(count=2, total=3.0, square=2.0),
  "sums: count 0": values(count=0, total=1.0, square=0.0),
  "text: holds half": success("a\ud800"),
  "kind: 'rumour'": success()._replace(header=header("rumour")),
  "fields: ": success()._replace(header=header("values")),
  "prompt_id: 7": success()._replace(header=header("success", prompt_id=7)),
  "record 'trajectory/": trajectory(reward="high"),
}


@pytest.mark.parametrize("message", INVALID)
def test_what_nobody_would_read_is_not_written(message):
  with pytest.raises(ValueError, match=message):
    codec.encode(INVALID[message])


def test_logprobs_may_exceed_0_by_rounding_only():
  record = trajectory(logprobs=np.array([9e-5, 0, 0, 0], np.float32))
  assert same(codec.decode(codec.encode(record)), record)


def test_sums_of_equal_rewards_in_float32_are_read():
  rewards = np.full(7, 0.1, np.float32)
  total, square = float(rewards.sum()), float((rewards * rewards).sum())
  record = values(7, total, square)
  assert same(codec.decode(codec.encode(record)), record)


# Names.


def test_ids_are_readable_and_hold_nothing_odd():
  assert codec.record_id("values", 12, "char", "p7", 0) == "values/12/char/p7/0"
  name = codec.record_id("success", 0, "a/b\n", "é\x1b[2J", 3)
  assert name == "success/0/a%2Fb%0A/%C3%A9%1B%5B2J/3"


@given(st.tuples(NAME, NAME), st.tuples(NAME, NAME))
@TINY
def test_different_things_have_different_ids(left, right):
  names = [codec.record_id("success", 1, *pair, 2) for pair in (left, right)]
  assert (names[0] == names[1]) == (left == right)


def test_prompt_hashes_tell_texts_apart():
  texts = ["", "1+1=", "1+1= ", "é", "e\u0301", "\ud800"]
  assert len({codec.prompt_hash(text) for text in texts}) == len(texts)


# Shipments.


def shipment(count=3):
  made = [
    trajectory(header=header(id=f"r{i}"))
    if i % 2 == 0
    else values()._replace(header=header("values", id=f"r{i}"))
    for i in range(count)
  ]
  return made, codec.pack("char", 3, made)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_shipment_is_read_back(count):
  made, data = shipment(count)
  found = codec.unpack(data)
  assert all(map(same, found.records, made)) and len(found.records) == count
  assert found[1:] == ((), "char", 3, count)
  assert codec.pack("char", 3, found.records) == data


def test_a_cut_costs_one_refusal_and_no_intact_record():
  made, data = shipment()
  ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
  for cut in range(len(data)):
    found = codec.unpack(data[:cut])
    assert found.refused == (("truncated", ""),), cut
    assert len(found.records) == sum(end <= cut for end in ends[1:])
    assert all(map(same, found.records, made))


def test_a_damaged_byte_costs_one_refusal_and_no_other_record():
  made, data = shipment()
  body = data.index(b"\n") + 1
  for i in range(len(data)):
    broken = bytearray(data)
    broken[i] ^= 0x01
    found = codec.unpack(bytes(broken))
    ((reason, name),) = found.refused
    if i == len(data) - 1:  # the last line has no end
      assert reason == "truncated" and len(found.records) == len(made) - 1
    elif i < body:
      assert not found.records and name == ""
      assert reason in ("corrupt", "schema")
    else:
      hurt = data[body:i].count(b"\n")
      assert reason in ("corrupt", "schema") and name == f"line {hurt + 1}"
      joined = data[i] == ord("\n")
      kept = [m for k, m in enumerate(made) if k not in (hurt, hurt + joined)]
      assert all(map(same, found.records, kept))
      assert len(found.records) == len(kept)


def test_damage_and_a_cut_are_two_faults():
  _, data = shipment()
  broken = data.replace(b'"id":"r0"', b'"id":"r9"')[:-1]
  found = codec.unpack(broken)
  assert found.refused == (("corrupt", "line 1"), ("truncated", ""))
  assert len(found.records) == 1


def test_a_byte_that_becomes_a_newline_costs_one_refusal():
  _, data = shipment()
  for i in range(data.index(b"\n") + 1, len(data) - 1):
    broken = data[:i] + b"\n" + data[i + 1 :]
    if broken != data:
      assert len(codec.unpack(broken).refused) == 1


def test_a_malformed_record_is_refused_by_its_id():
  made, _ = shipment()
  fields = content(made[0]) | {"success": 1}
  lines = [sealed(fields), *(codec.encode(record) for record in made[1:])]
  first = {"schema": records.SCHEMA, "policy": "char", "round": 3}
  first |= {"records": 3, "bytes": sum(map(len, lines))}
  found = codec.unpack(codec.seal(first) + b"".join(lines))
  assert found.refused == (("malformed", "r0"),) and len(found.records) == 2


def test_a_shipment_of_another_schema_costs_one_refusal(monkeypatch):
  made, ours = shipment()
  monkeypatch.setattr(records, "SCHEMA", records.SCHEMA + 1)
  _, theirs = shipment()
  assert codec.unpack(ours).refused == (("schema", ""),)
  monkeypatch.undo()
  assert codec.unpack(theirs) == codec.Shipment((), (("schema", ""),))
  mixed = [made[0]._replace(header=header(schema=2)), made[1]]
  found = codec.unpack(codec.pack("char", 3, mixed))
  assert [reason for reason, _ in found.refused] == ["schema"]
  assert len(found.records) == 1


@pytest.mark.parametrize(
  ("change", "reason"),
  [
    ({"records": 4}, "truncated"),  # promises more than there is
    ({"records": 1}, "malformed"),
    ({"bytes": 10}, "truncated"),
    ({"records": -1}, "corrupt"),
    ({"records": 2**70}, "corrupt"),
    ({"round": "3"}, "corrupt"),
    ({"policy": None}, "corrupt"),
    ({"more": 1}, "corrupt"),
  ],
  ids=str,
)
def test_a_first_line_that_lies_costs_one_refusal(change, reason):
  _, data = shipment()
  first = json.loads(data[: data.index(b"\n")])["content"] | change
  found = codec.unpack(codec.seal(first) + data[data.index(b"\n") + 1 :])
  assert [why for why, _ in found.refused] == [reason]


def test_more_than_was_promised_is_not_read():
  _, data = shipment()
  found = codec.unpack(data + codec.encode(success()))
  assert found.refused == (("malformed", ""),) and len(found.records) == 3


@given(st.binary(max_size=300), st.integers(0, 2000))
@TINY
def test_any_bytes_in_a_shipment_raise_nothing(garbage, place):
  made, data = shipment()
  found = codec.unpack(data[:place] + garbage + data[place:])
  assert all(any(same(r, m) for m in made) for r in found.records)
  assert found.refused or not garbage


def test_garbage_for_a_shipment_is_corrupt():
  for data in (b"hello", b"\n", b"\x00" * 100, b"{}\n{}\n"):
    assert codec.unpack(data) == codec.Shipment((), (("corrupt", ""),))
