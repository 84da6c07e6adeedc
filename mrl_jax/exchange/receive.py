"""What a policy makes of its peers' records: transforms of a round.

Each takes the records in the round's inbox, re-tokenises what it uses with
the policy's own tokenizer, and adds rows or statistics to the round. A
record that cannot become this policy's tokens exactly is refused, and
counted by reason; what is not there is simply not used, so a round without
records is a plain one. Own rows are never touched.
"""

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from mrl_jax import records
from mrl_jax.exchange import publish
from mrl_jax.exchange.publish import Member
from mrl_jax.text import align


def values() -> records.RoundTransform:
  """XGRPO's part: what the peers' completions of each prompt earned."""

  def apply(round_: records.Round) -> records.Round:
    sums: dict[str, records.Tally] = dict(round_.peers)
    for record in round_.inbox:
      if isinstance(record, records.Values):
        name = record.header.prompt_id
        old = sums.get(name, records.Tally(0.0, 0.0, 0.0))
        sums[name] = records.Tally(
          old.count + record.count,
          old.total + record.total,
          old.square + record.square,
        )
    return round_._replace(peers=sums)

  return apply


def rollouts(member: Member, count: int) -> records.RoundTransform:
  """PRP's part: up to `count` of the peers' rollouts beside each group.

  They are taken from the peers in turn, each in the order of its samples.
  """

  def apply(round_: records.Round) -> records.Round:
    found = _by_prompt(round_, records.Trajectory)
    chosen, refused = [], []
    for name in _prompts(round_):
      taken = 0
      for record in _in_turn(found.get(name, ())):
        if taken == count:
          break
        row = read_trajectory(member, record)
        if isinstance(row, str):
          refused.append(_refusal(record, row))
        else:
          chosen.append(row)
          taken += 1
    return _add(round_, chosen, refused, count)

  return apply


def rescue(member: Member, per_prompt: int = 1) -> records.RoundTransform:
  """SGT's part: successes of peers on prompts that this policy failed.

  The rescue set is {x : no own success and some peer's}. From it `per_prompt`
  are drawn uniformly over all the peers' successes, without replacement, by
  a key that the seed, the policy, the round and the prompt determine.
  """

  def apply(round_: records.Round) -> records.Round:
    found = _by_prompt(round_, records.Success)
    solved = {r.prompt_id for r in round_.own if publish.succeeded(r)}
    chosen, refused = [], []
    for name in _prompts(round_):
      candidates = [] if name in solved else found.get(name, [])
      taken = 0
      for index in _shuffled(len(candidates), member, round_.number, name):
        if taken == per_prompt:
          break
        row = read_success(member, candidates[index])
        if isinstance(row, str):
          refused.append(_refusal(candidates[index], row))
        else:
          chosen.append(row)
          taken += 1
    return _add(round_, chosen, refused, per_prompt)

  return apply


def read_trajectory(
  member: Member, record: records.Trajectory
) -> records.Foreign | str:
  """The peer's rollout in this policy's tokens; a str says why not."""
  if record.header.tokenizer == member.tokenizer.identity:
    told = _as_it_is(member, record)
  else:
    told = align.retokenize(member.tokenizer, record.text, record.finished)
  if isinstance(told, str):
    return told
  reason = _unfit(member, told.tokens)
  if reason:
    return reason
  if record.header.tokenizer == member.tokenizer.identity:
    alignment = _one_to_one(len(told.tokens))
  else:
    try:
      alignment = align.align(record.ends, told.ends, record.finished)
    except ValueError:
      return "misaligned"
  return records.Foreign(
    prompt_id=record.header.prompt_id,
    peer=record.header.policy,
    record=record.header.id,
    tokens=told.tokens,
    text=record.text,
    rescue=False,
    reward=record.reward,
    logprobs=record.logprobs,
    alignment=alignment,
  )


def read_success(
  member: Member, record: records.Success
) -> records.Foreign | str:
  """The peer's answer in this policy's tokens; a str says why not."""
  if not record.text:
    return "empty"
  told = align.retokenize(member.tokenizer, record.text, finished=True)
  if isinstance(told, str):
    return told
  reason = _unfit(member, told.tokens)
  if reason:
    return reason
  return records.Foreign(
    prompt_id=record.header.prompt_id,
    peer=record.header.policy,
    record=record.header.id,
    tokens=told.tokens,
    text=record.text,
    rescue=True,
    reward=float("nan"),
  )


def _as_it_is(
  member: Member, record: records.Trajectory
) -> align.Spelling | str:
  """A peer with the same tokenizer: its ids, if they say what it says."""
  told = align.spell(member.tokenizer, record.tokens, record.finished)
  if isinstance(told, str):
    return told
  same = told.text == record.text and np.array_equal(told.ends, record.ends)
  return told if same else "drift"


def _one_to_one(count: int) -> records.Alignment:
  index = np.arange(count, dtype=np.int32)
  one = np.ones(count, np.float32)
  return records.Alignment(
    index, one, index, 0 * one, index, index + 1, byte_share=one
  )


def _unfit(member: Member, tokens: np.ndarray) -> str | None:
  if not len(tokens):
    return "empty"
  if len(tokens) > member.limit:
    return "long"
  beyond = tokens.max() >= len(member.allowed)
  if beyond or not member.allowed[tokens].all():
    return "undecodable"
  return None


def _prompts(round_: records.Round) -> list[str]:
  return list(dict.fromkeys(row.prompt_id for row in round_.own))


def _by_prompt(round_: records.Round, kind: type) -> dict[str, list]:
  found = defaultdict(list)
  for record in round_.inbox:
    if isinstance(record, kind):
      found[record.header.prompt_id].append(record)
  return found


def _in_turn(
  found: Sequence[records.Trajectory],
) -> Iterator[records.Trajectory]:
  """One record of each peer, then the next of each, and so on."""
  by_peer = defaultdict(list)
  for record in found:
    by_peer[record.header.policy].append(record)
  for turn in itertools.zip_longest(*by_peer.values()):
    yield from (record for record in turn if record is not None)


def _shuffled(count: int, member: Member, number: int, prompt: str):
  key = f"{member.seed}/{member.policy}/{number}/{prompt}"
  digest = hashlib.sha256(key.encode()).digest()
  return np.random.default_rng(list(digest)).permutation(count)


def _refusal(record: records.Record, reason: str) -> records.Refusal:
  return records.Refusal(record.header.policy, reason, record.header.id)


def _add(
  round_: records.Round,
  chosen: list[records.Foreign],
  refused: list[records.Refusal],
  slots: int,
) -> records.Round:
  return round_._replace(
    extra=(*round_.extra, *chosen),
    slots=round_.slots + slots if chosen else round_.slots,
    refused=(*round_.refused, *refused),
  )
