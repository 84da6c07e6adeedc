"""What a policy tells its peers about a round: own rollouts to records.

Text, log-probs per token, rewards and verified answers leave; parameters,
objectives and prompts do not. What a policy publishes is decided by who
listens, so the kinds are an argument. A completion that cannot be told
exactly is withheld, and counted by reason.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from mrl_jax import records
from mrl_jax.exchange import codec
from mrl_jax.text import align
from mrl_jax.text import tokenizer as tokenizer_lib

SUCCESS = "correct"  # the outcome of a completion that was verified


class Member(NamedTuple):
  """One policy's side of the exchange."""

  policy: str
  tokenizer: tokenizer_lib.Tokenizer
  allowed: np.ndarray  # [V] bool, ids that the policy may sample
  limit: int  # most tokens of a completion
  verifier: str  # the identity of whoever judges
  seed: int


def publish(
  round_: records.Round,
  member: Member,
  version: int,
  kinds: Collection[str],
) -> tuple[list[records.Record], list[records.Refusal]]:
  """The round's records of the given kinds, and what could not be told.

  Args:
    round_: with its own rows verified.
    member: whose round it is.
    version: optimiser steps the policy had taken when it sampled.
    kinds: of `records.KINDS`.

  Returns:
    Records in the order of the rows, and refusals in the policy's own name.
  """
  told: list[records.Record] = []
  withheld: list[records.Refusal] = []
  for _, group in itertools.groupby(round_.own, lambda row: row.prompt_id):
    rows = tuple(group)
    if rows[0].root:  # what was earned after a prefix says little of the rest
      continue
    if "values" in kinds:
      told.append(_values(round_, member, version, rows))
    for row in rows:
      for kind in ("trajectory", "success"):
        if kind not in kinds or (kind == "success" and not succeeded(row)):
          continue
        header = _header(round_, member, version, row, kind, row.sample)
        made = (_trajectory if kind == "trajectory" else _success)(
          header, member, row
        )
        if isinstance(made, str):
          withheld.append(records.Refusal(member.policy, made, header.id))
        else:
          told.append(made)
  return told, withheld


def succeeded(row: records.Rollout) -> bool:
  """Whether the verifier found the completion right."""
  return row.outcome == SUCCESS


def tally(rewards: Iterable[float]) -> records.Tally:
  """Count, sum and sum of squares of the rewards that are numbers."""
  known = [float(r) for r in rewards if not math.isnan(r)]
  return records.Tally(
    float(len(known)), math.fsum(known), math.fsum(r * r for r in known)
  )


def _header(round_, member, version, row, kind, sample) -> records.Header:
  name = codec.record_id(
    kind, round_.number, round_.policy, row.prompt_id, sample
  )
  return records.Header(
    id=name,
    kind=kind,
    schema=records.SCHEMA,
    round=round_.number,
    policy=round_.policy,
    version=version,
    prompt_id=row.prompt_id,
    prompt_hash=codec.prompt_hash(row.prompt),
    tokenizer=member.tokenizer.identity,
    verifier=member.verifier,
  )


def _values(
  round_, member, version, rows: Sequence[records.Rollout]
) -> records.Values:
  header = _header(round_, member, version, rows[0], "values", 0)
  count, total, square = tally(row.reward for row in rows)
  return records.Values(header, int(count), total, square)


def _trajectory(
  header: records.Header, member: Member, row: records.Rollout
) -> records.Trajectory | str:
  if math.isnan(row.reward):
    return "unscored"
  told = align.spell(member.tokenizer, row.tokens, row.finished)
  if isinstance(told, str):
    return told
  if not len(told.tokens):
    return "empty"
  return records.Trajectory(
    header=header,
    text=told.text,
    tokens=told.tokens,
    ends=told.ends,
    logprobs=row.logprobs[: len(told.tokens)],
    reward=row.reward,
    success=succeeded(row),
    finished=row.finished,
  )


def _success(
  header: records.Header, member: Member, row: records.Rollout
) -> records.Success | str:
  if not row.finished:  # imitating it would teach to stop where it was cut
    return "unfinished"
  text = member.tokenizer.decode_exact(row.tokens)
  if text is None:
    return "undecodable"
  return records.Success(header, text) if text else "empty"
