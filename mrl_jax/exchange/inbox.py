"""What a policy takes from its peers in one round: waiting and admission.

A receiver waits for its peers until one common deadline and then goes on
with what there is: a peer that is late, gone, damaged or of another schema
costs one counted refusal and no more, and a round without records is a plain
one. What was read is joined on the prompts of the receiver's round, and a
record is admitted only if it is about the same prompt, judged by the same
verifier, and fresh: of the last `staleness` rounds or of this one.
"""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from mrl_jax import records
from mrl_jax.exchange import codec
from mrl_jax.exchange import store as store_lib

_PAUSES = (0.001, 0.1)  # seconds between two looks: the first, the longest


class Mail(NamedTuple):
  """What was read of the peers, before anything is made of it."""

  shipments: dict[tuple[str, int], bytes]  # by peer and round
  unread: dict[str, str]  # by peer: why there is none of this round


class Inbox(NamedTuple):
  """What a policy may use in a round, what it may not, and how much there was.

  The records stand by peer, then as they were published.
  """

  records: tuple[records.Record, ...]
  refused: tuple[records.Refusal, ...]
  published: dict[str, int]  # by peer: records of this round's shipment


def take(
  store: store_lib.Store,
  receiver: str,
  round: int,
  peers: Sequence[str],
  prompts: Mapping[str, str],
  verifier: str,
  *,
  staleness: int = 0,
  deadline: float = 60.0,
  cancelled: Callable[[], bool] = lambda: False,
  clock: Callable[[], float] = time.monotonic,
  sleep: Callable[[float], None] = time.sleep,
) -> Inbox:
  """Waits for the peers' shipments of this round, and reads them.

  Of each peer, prompt and kind only the newest shipment counts that has an
  admitted record. Older shipments add records, not refusals for what is cut
  or damaged in them: those were counted in their own rounds.

  Args:
    store: where the peers publish.
    receiver: the policy that reads; not one of the peers.
    round: the receiver's.
    peers: in the order in which their records are wanted.
    prompts: hash of each prompt of the receiver's round, by prompt id.
    verifier: the identity of the receiver's.
    staleness: rounds by which a record may be older than this one.
    deadline: seconds that all the peers have together.
    cancelled: asked while waiting; if it says yes, the wait is over.
    clock: seconds from anywhere.
    sleep: waits for so many seconds.

  Raises:
    ValueError: An argument that makes no sense. Nothing that a peer does.
  """
  _check_arguments(receiver, round, peers, staleness)
  mail = read(
    store,
    round,
    peers,
    staleness=staleness,
    deadline=deadline,
    cancelled=cancelled,
    clock=clock,
    sleep=sleep,
  )
  return sort(
    mail, receiver, round, peers, prompts, verifier, staleness=staleness
  )


def read(
  store: store_lib.Store,
  round: int,
  peers: Sequence[str],
  *,
  staleness: int = 0,
  deadline: float = 60.0,
  cancelled: Callable[[], bool] = lambda: False,
  clock: Callable[[], float] = time.monotonic,
  sleep: Callable[[float], None] = time.sleep,
) -> Mail:
  """The part of `take` that depends on the clock and on what lies where."""
  if not 0 <= deadline < math.inf:
    raise ValueError(f"deadline: {deadline}: must be seconds, 0 or more.")
  fresh, unread = _wait(
    store, round, peers, clock() + deadline, cancelled, clock, sleep
  )
  found = {(peer, round): data for peer, data in fresh.items()}
  for peer in peers:
    for number in range(round - 1, max(round - staleness, 0) - 1, -1):
      with contextlib.suppress(OSError):
        data = store.get(peer, number)
        if data is not None:
          found[peer, number] = data
  return Mail(found, unread)


def sort(
  mail: Mail,
  receiver: str,
  round: int,
  peers: Sequence[str],
  prompts: Mapping[str, str],
  verifier: str,
  *,
  staleness: int = 0,
) -> Inbox:
  """The other part of `take`: the same mail gives the same inbox."""
  _check_arguments(receiver, round, peers, staleness)
  taken: list[records.Record] = []
  refused: list[records.Refusal] = []
  published = dict.fromkeys(peers, 0)
  seen: set[str] = set()
  for peer in peers:
    if peer in mail.unread:
      refused.append(records.Refusal(peer, mail.unread[peer]))
    newest: dict[tuple[str, str], int] = {}
    for number, shipment in _shipments(mail, peer):
      if number == round:
        published[peer] = shipment.promised
        refused += [records.Refusal(peer, *why) for why in shipment.refused]
      for record in shipment.records:
        header = record.header
        if number < round and (
          header.prompt_id not in prompts or header.id in seen
        ):
          continue  # of a round that is over, and was dealt with there
        reason = admit(
          record,
          receiver=receiver,
          peer=peer,
          round=round,
          prompts=prompts,
          verifier=verifier,
          staleness=staleness,
          seen=seen,
        )
        if reason:
          refused.append(records.Refusal(peer, reason, header.id))
          continue
        seen.add(header.id)
        if newest.setdefault((header.kind, header.prompt_id), number) == number:
          taken.append(record)
  return Inbox(tuple(taken), tuple(refused), published)


def admit(
  record: records.Record,
  *,
  receiver: str,
  peer: str,
  round: int,
  prompts: Mapping[str, str],
  verifier: str,
  staleness: int = 0,
  seen: Collection[str] = (),
) -> str | None:
  """Why a record that can be read may not be used; None: it may.

  Args:
    record: found in a shipment of `peer`; the others are as in `take`.
    receiver: who would use it.
    peer: whose shipment it lies in.
    round: the receiver's.
    prompts: hash of each prompt of the receiver's round, by prompt id.
    verifier: the identity of the receiver's.
    staleness: rounds by which it may be older.
    seen: ids of records that were taken already.
  """
  header = record.header
  if header.schema != records.SCHEMA:
    return "schema"
  if header.policy != peer or header.policy == receiver:
    return "policy"
  if not round - staleness <= header.round <= round:
    return "stale"
  if prompts.get(header.prompt_id) != header.prompt_hash:
    return "prompt"
  if header.verifier != verifier:
    return "verifier"
  return "duplicate" if header.id in seen else None


def _check_arguments(receiver, round, peers, staleness) -> None:
  if receiver in peers:
    raise ValueError(f"peers: {list(peers)}: {receiver!r} receives itself.")
  twice = [name for name, count in Counter(peers).items() if count > 1]
  if twice:
    raise ValueError(f"peers: {list(peers)}: {twice[0]!r} is there twice.")
  for name, value in (("round", round), ("staleness", staleness)):
    if value < 0:
      raise ValueError(f"{name}: {value}: must be at least 0.")


def _wait(
  store, round, peers, end, cancelled, clock, sleep
) -> tuple[dict[str, bytes], dict[str, str]]:
  """This round's shipments, and why the others are missing, by peer."""
  found: dict[str, bytes] = {}
  unread: dict[str, str] = {}
  pause, longest = _PAUSES
  while True:
    over = cancelled() or clock() >= end  # before the last look, not after
    for peer in peers:
      if peer in found or peer in unread:
        continue
      try:
        data = store.get(peer, round)
      except OSError:
        unread[peer] = "gone"
        continue
      if data is not None:
        found[peer] = data
    missing = [p for p in peers if p not in found and p not in unread]
    if over or not missing:
      return found, unread | dict.fromkeys(missing, "late")
    sleep(max(0.0, min(pause, end - clock())))
    pause = min(2 * pause, longest)


def _shipments(mail, peer) -> Iterator[tuple[int, codec.Shipment]]:
  """A peer's shipments that may hold something, by round, newest first."""
  numbers = [number for name, number in mail.shipments if name == peer]
  for number in sorted(numbers, reverse=True):
    yield number, _unpack(mail.shipments[peer, number], peer, number)


def _unpack(data: bytes, peer: str, round: int) -> codec.Shipment:
  """Reads a shipment, which must be the one that its place says."""
  shipment = codec.unpack(data)
  if not shipment.promised and shipment.refused:
    return shipment
  if shipment.policy != peer:
    return codec.Shipment((), (("policy", ""),))
  if shipment.round != round:
    return codec.Shipment((), (("stale", ""),))
  return shipment
