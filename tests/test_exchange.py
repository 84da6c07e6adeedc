"""From one policy's rollouts to another's rows, across tokenizers."""

import math

import numpy as np
import pytest

from mrl_jax import collate, records
from mrl_jax.exchange import publish, receive
from mrl_jax.types import Source
from tests import factories


@pytest.fixture(scope="module")
def members():
  names = ("char", "merged", "operator")
  return {name: factories.member(name) for name in names}


def rollout(member, prompt_id, sample, text, right, finished=True, ids=None):
  tokenizer = member.tokenizer
  ids = tokenizer.encode(text) if ids is None else ids
  ids = np.asarray([*ids, *tokenizer.eos_ids[:1]] if finished else ids)
  rng = np.random.default_rng(sample)
  return records.Rollout(
    prompt_id=prompt_id,
    sample=sample,
    prompt=f"text of {prompt_id}",
    context=(3, 4),
    tokens=ids.astype(np.int32),
    logprobs=-rng.exponential(size=len(ids)).astype(np.float32),
    entropies=np.ones(len(ids), np.float32),
    finished=finished,
    text=tokenizer.decode(ids),
    answer="",
    reward=float(right),
    outcome="correct" if right else "wrong",
  )


def round_of(member, rows, number=0):
  """A round from (prompt, text, right) triples, numbered per prompt."""
  seen, own = {}, []
  for prompt, text, right in rows:
    sample = seen[prompt] = seen.get(prompt, -1) + 1
    own.append(rollout(member, prompt, sample, text, right))
  return records.Round(member.policy, number, tuple(own))


def told(round_, member, *kinds):
  return tuple(publish.publish(round_, member, 7, kinds)[0])


ROWS = [("p", "12,34", True), ("p", "5", False), ("q", "6", True)]


def test_a_round_is_told_as_the_peers_ask(members):
  source = round_of(members["merged"], ROWS, number=3)
  every = told(source, members["merged"], *records.KINDS)
  kinds = [record.header.kind for record in every]
  assert kinds.count("values") == 2
  assert kinds.count("trajectory") == 3
  assert kinds.count("success") == 2
  assert len({record.header.id for record in every}) == len(every)
  assert {record.header.round for record in every} == {3}
  assert {record.header.version for record in every} == {7}
  first = next(r for r in every if isinstance(r, records.Values))
  assert (first.count, first.total, first.square) == (2, 1.0, 1.0)
  assert told(source, members["merged"]) == ()
  again = told(source, members["merged"], *records.KINDS)
  assert [r.header for r in again] == [r.header for r in every]


def test_what_cannot_be_told_is_withheld_by_reason(members):
  member = members["char"]
  unscored = rollout(member, "p", 0, "1", False)._replace(reward=math.nan)
  cut = rollout(member, "p", 1, "12", True, finished=False)
  pad = rollout(member, "p", 2, "1", True, ids=[member.tokenizer.pad_id])
  nothing = rollout(member, "p", 3, "", True)
  round_ = records.Round("char", 0, (unscored, cut, pad, nothing))
  made, withheld = publish.publish(round_, member, 0, ("trajectory", "success"))
  reasons = {r.record.split("/")[0] + " " + r.reason for r in withheld}
  assert reasons == {
    "trajectory unscored",
    "success unfinished",
    "trajectory control",
    "success empty",
  }
  assert {r.peer for r in withheld} == {"char"}
  assert [r.header.kind for r in made] == ["trajectory", "trajectory"]


def test_rollouts_of_a_peer_keep_their_mass_on_own_tokens(members):
  source = round_of(members["char"], [("p", "12+3,45", True)] * 2)
  inbox = told(source, members["char"], "trajectory")
  own = round_of(members["merged"], [("p", "7", False)] * 2)
  found = receive.rollouts(members["merged"], 2)(own._replace(inbox=inbox))
  assert found.own == own.own
  assert found.slots == 2
  for row, record in zip(found.extra, inbox, strict=True):
    assert members["merged"].tokenizer.decode(row.tokens) == record.text
    assert row.tokens[-1] in members["merged"].tokenizer.eos_ids
    assert row.reward == record.reward
  batch = collate.batch(found.own, found.extra, found.slots)
  assert batch.source.tolist() == [Source.OWN] * 2 + [Source.PEER] * 2
  assert batch.group.tolist() == [0, 0, 0, 0]
  assert batch.trace.logprobs.shape[0] == 4
  assert not batch.trace.logprobs[:2].any()


def test_peers_take_turns_until_the_slots_are_full(members):
  own = round_of(members["merged"], [("p", "7", False)])
  texts = [("p", str(i), False) for i in range(3)]
  inbox = [
    *told(round_of(members["char"], texts), members["char"], "trajectory"),
    *told(
      round_of(members["operator"], texts), members["operator"], "trajectory"
    ),
  ]
  found = receive.rollouts(members["merged"], 3)(
    own._replace(inbox=tuple(inbox))
  )
  assert [(row.peer, row.text) for row in found.extra] == [
    ("char", "0"),
    ("operator", "0"),
    ("char", "1"),
  ]


def test_a_twin_is_read_token_by_token(members):
  """Even where its tokens are not the ones that re-encoding would give."""
  member = members["merged"]
  ids = [*member.tokenizer.encode("1"), *member.tokenizer.encode("2")]
  assert ids != member.tokenizer.encode("12")
  source = records.Round(
    "twin", 0, (rollout(member, "p", 0, "", True, ids=ids),)
  )
  twin = member._replace(policy="twin")
  (record,) = told(source, twin, "trajectory")
  row = receive.read_trajectory(member, record)
  np.testing.assert_array_equal(row.tokens, source.own[0].tokens)
  np.testing.assert_array_equal(row.logprobs, source.own[0].logprobs)
  tokens = np.asarray([ids[0], ids[0], record.tokens[-1]], np.int32)
  drifted = record._replace(tokens=tokens)
  assert receive.read_trajectory(member, drifted) == "drift"


def test_ends_that_are_not_of_the_text_are_a_refusal(members):
  source = round_of(members["char"], [("p", "12", True)])
  (record,) = told(source, members["char"], "trajectory")
  bent = record._replace(ends=np.asarray([1, 3, 3], np.int32))
  assert receive.read_trajectory(members["merged"], bent) == "misaligned"


@pytest.mark.parametrize(
  ("text", "limit", "reason"),
  [("1,2,3,4,5,6,7", 12, "long"), ("é", 12, "unknown"), ("", 12, "empty")],
)
def test_a_text_that_does_not_fit_is_refused(members, text, limit, reason):
  member = members["char"]._replace(limit=limit)
  header = records.Header(
    "id", "success", 1, 0, "merged", 0, "p", "h", "other", "v"
  )
  own = round_of(member, [("p", "0", False)])
  inbox = (records.Success(header, text),)
  found = receive.rescue(member)(own._replace(inbox=inbox))
  assert [(r.peer, r.reason) for r in found.refused] == [("merged", reason)]
  assert found.extra == ()
  assert found.slots == 0


def test_only_what_all_own_samples_failed_is_rescued(members):
  member = members["merged"]
  own = round_of(
    member,
    [
      ("solved", "1", True),
      ("solved", "2", False),
      ("failed", "1", False),
      ("failed", "2", False),
      ("hopeless", "1", False),
      ("hopeless", "2", False),
    ],
  )
  texts = [("solved", "9", True), ("failed", "8", True), ("hopeless", "7", 0)]
  inbox = told(round_of(members["char"], texts), members["char"], "success")
  found = receive.rescue(member)(own._replace(inbox=inbox))
  assert [(r.prompt_id, r.text) for r in found.extra] == [("failed", "8")]
  assert found.slots == 1
  batch = collate.batch(found.own, found.extra, found.slots)
  assert batch.tokens.shape[0] == 9
  rescue = batch.source == int(Source.RESCUE)
  assert rescue.tolist() == [False] * 5 + [True] + [False] * 3
  assert batch.weights[rescue].sum() == 2  # the answer and EOS
  blank = [2, 8]
  assert not batch.weights[blank].any()
  assert np.isnan(batch.rewards[blank]).all()


def test_the_rescue_is_drawn_uniformly_over_all_successes(members):
  member, counts = members["merged"], {"1": 0, "2": 0, "3": 0}
  texts = [("p", text, True) for text in counts]
  inbox = told(round_of(members["char"], texts), members["char"], "success")
  for number in range(300):
    own = round_of(member, [("p", "0", False)], number)
    found = receive.rescue(member)(own._replace(inbox=inbox))
    counts[found.extra[0].text] += 1
    again = receive.rescue(member)(own._replace(inbox=inbox))
    assert again.extra[0].record == found.extra[0].record
  assert min(counts.values()) > 70


def test_one_unreadable_success_does_not_cost_the_rescue(members):
  member = members["char"]._replace(limit=4)
  texts = [("p", "1,2,3,4,5", True)] * 3 + [("p", "6", True)]
  inbox = told(round_of(members["merged"], texts), members["merged"], "success")
  refused = 0
  for number in range(20):
    own = round_of(member, [("p", "0", False)], number)
    found = receive.rescue(member)(own._replace(inbox=inbox))
    assert [r.text for r in found.extra] == ["6"]
    assert {r.reason for r in found.refused} <= {"long"}
    refused += len(found.refused)
  assert refused


def test_values_of_several_peers_add(members):
  own = round_of(members["merged"], [("p", "0", False), ("q", "0", True)])
  inbox = [
    *told(round_of(members["char"], ROWS), members["char"], "values"),
    *told(round_of(members["operator"], ROWS), members["operator"], "values"),
  ]
  found = receive.values()(own._replace(inbox=tuple(inbox)))
  assert found.peers["p"] == records.Tally(4.0, 2.0, 2.0)
  batch = collate.batch(found.own, peers=found.peers)
  np.testing.assert_allclose(batch.peers.count, [4, 2])
  np.testing.assert_allclose(batch.peers.mean, [0.5, 1.0])
  np.testing.assert_allclose(batch.peers.variance, [0.25, 0.0])


def test_a_round_without_records_is_a_plain_one(members):
  member = members["char"]
  own = round_of(member, ROWS)
  plain = collate.batch(own.own)
  for transform in (
    receive.rescue(member),
    receive.rollouts(member, 2),
    receive.values(),
  ):
    found = transform(own)
    assert found == own
    batch = collate.batch(found.own, found.extra, found.slots, found.peers)
    assert batch.trace is None
    for name, leaf in batch._asdict().items():
      np.testing.assert_array_equal(leaf, getattr(plain, name), name)


def test_extra_rows_must_have_their_prompt_and_slot(members):
  member = members["merged"]
  own = round_of(member, [("p", "1", False)])
  inbox = told(
    round_of(members["char"], [("p", "2", True)]), members["char"], "success"
  )
  (row,) = receive.rescue(member)(own._replace(inbox=inbox)).extra
  with pytest.raises(ValueError, match="slots=0"):
    collate.batch(own.own, [row], 0)
  with pytest.raises(ValueError, match="elsewhere"):
    collate.batch(own.own, [row._replace(prompt_id="elsewhere")], 1)
