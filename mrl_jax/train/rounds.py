"""The parts of a round: prompts, verdicts, and the talk with the peers.

A round's prompts are the same for all policies, so experience is joined on
the prompt id. A policy publishes what its peers' recipes listen for, and
listens for what its own recipe needs; a policy whose recipe needs nothing
never waits for anybody.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from mrl_jax import config as config_lib
from mrl_jax import records
from mrl_jax.exchange import codec, inbox, publish, store
from mrl_jax.explore import explorer
from mrl_jax.parallel import processes
from mrl_jax.tasks import dataset, verify
from mrl_jax.train import policy as policy_lib
from mrl_jax.train import steps


class Cursor(NamedTuple):
  """Where the run stands: all host state that is not in the logs."""

  round: int = 0  # the next one
  position: int = 0  # of the next prompt in the task's order
  dropped: int = 0  # prompts skipped: over the limit for some policy
  waiting: tuple[int, ...] = ()  # positions put off to the next round
  shares: tuple[int, ...] = ()  # devices of each policy, once planned anew
  update: int = 0  # made in the round already; the rest is of its start
  # What the potentials of policies that are shaped are divided by.
  scales: Mapping[str, float] = {}


def take(
  config: config_lib.Config,
  policies: Sequence[policy_lib.Policy],
  order: dataset.Order,
  cursor: Cursor,
) -> tuple[dict[str, list[explorer.Slot]], Cursor]:
  """The next prompts that fit every policy, as each of them renders them."""
  slots: dict[str, list[explorer.Slot]] = {p.name: [] for p in policies}
  queue, put_off = list(cursor.waiting), []
  position, dropped = cursor.position, cursor.dropped
  seen: set[str] = set()
  while len(seen) < config.prompts:
    if not queue:
      queue, position = [position], position + 1
    at = queue.pop(0)
    problem = order.at(at)
    if problem.id in seen:  # a round across the end of an epoch
      put_off.append(at)
      continue
    ids = {
      p.name: policy_lib.render(p.actor, problem.prompt, config)
      for p in policies
    }
    if any(len(i) > config.prompt_limit for i in ids.values()):
      dropped += 1
      if dropped > 1000 * (len(seen) + 1):
        raise config_lib.ConfigError(
          "prompt_limit", config.prompt_limit, "no prompt of the task fits"
        )
      continue
    seen.add(problem.id)
    for name, row in ids.items():
      slots[name].append(explorer.Slot(problem, at, row))
  waiting = (*queue, *put_off)
  return slots, cursor._replace(
    position=position, dropped=dropped, waiting=waiting
  )


def judge(
  pool: verify.Pool,
  rows: Sequence[records.Rollout],
  problems: Sequence[dataset.Problem],
  samples: int,
  actor: policy_lib.Actor | None = None,
) -> list[records.Rollout]:
  """The rollouts with their rewards and outcomes, each by its own problem.

  With the actor that wrote them, also with what each token earned. Each
  process judges some groups and all have all verdicts: what took too long
  on one machine did so for the others too.
  """
  items = [(row.text, problems[i // samples]) for i, row in enumerate(rows)]
  verdicts = processes.divided(items, pool.score, samples)
  return [
    row._replace(
      reward=float(v.reward),
      outcome=str(v.outcome.value),
      earned=None if actor is None else steps.earned(actor.tokenizer, row, v),
    )
    for row, v in zip(rows, verdicts, strict=True)
  ]


class Exchange(NamedTuple):
  """How the policies of a run tell each other things."""

  store: store.Store
  kinds: Mapping[str, frozenset[str]]  # what each policy publishes
  samples: Mapping[str, int]  # G of each policy
  staleness: int
  deadline: float
  cancelled: Callable[[], bool]


def exchange(
  config: config_lib.Config,
  policies: Sequence[policy_lib.Policy],
  store_: store.Store,
  cancelled: Callable[[], bool],
) -> Exchange:
  """Everyone publishes what the recipes of the others need."""
  kinds = {
    p.name: frozenset(
      kind
      for other in policies
      if other.name != p.name
      for kind in other.recipe.needs
    )
    for p in policies
  }
  samples = {p.name: p.samples for p in policies}
  return Exchange(
    store_, kinds, samples, config.staleness, config.deadline, cancelled
  )


def tell(
  exchange_: Exchange,
  policy: policy_lib.Policy,
  round_: records.Round,
  version: int,
) -> dict[str, int | float]:
  """Publishes the round's records; returns how many, and what was not told."""
  kinds = exchange_.kinds[policy.name]
  if not kinds:
    return {}
  told, withheld = publish.publish(round_, policy.member, version, kinds)
  data = codec.pack(policy.name, round_.number, told)
  name, number = policy.name, round_.number
  processes.agreed(lambda: exchange_.store.put(name, number, data))
  values: dict[str, int | float] = {"exchange/told": len(told)}
  for refusal in withheld:
    key = f"exchange/withheld/{refusal.reason}"
    values[key] = values.get(key, 0) + 1
  return values


def listen(
  exchange_: Exchange,
  policy: policy_lib.Policy,
  round_: records.Round,
  problems: Sequence[dataset.Problem],
  pool: verify.Pool,
) -> tuple[records.Round, dict[str, int]]:
  """The round with what the recipe takes from the peers.

  Returns it, and the records that each peer had published.
  """
  peers = [name for name in exchange_.samples if name != policy.name]
  mail = processes.agreed(
    lambda: inbox.read(
      exchange_.store,
      round_.number,
      peers,
      staleness=exchange_.staleness,
      deadline=exchange_.deadline,
      cancelled=exchange_.cancelled,
    )
  )
  found = inbox.sort(
    mail,
    policy.name,
    round_.number,
    peers,
    {p.id: codec.prompt_hash(p.prompt) for p in problems},
    policy.member.verifier,
    staleness=exchange_.staleness,
  )
  round_ = policy.recipe.receive(
    round_._replace(inbox=found.records, refused=found.refused)
  )
  return _verified(policy, round_, problems, pool), found.published


def _verified(policy, round_, problems, pool) -> records.Round:
  """Drops rescues that this policy's own verifier does not find right.

  What is judged is the text that the policy would learn to write: its own
  tokens, decoded.
  """
  by_id = {problem.id: problem for problem in problems}
  rescues = [row for row in round_.extra if row.rescue]
  texts = [policy.actor.tokenizer.decode(row.tokens) for row in rescues]
  items = [
    (text, by_id[row.prompt_id])
    for text, row in zip(texts, rescues, strict=True)
  ]
  verdicts = processes.divided(items, pool.score)
  wrong = {
    row.record
    for row, verdict in zip(rescues, verdicts, strict=True)
    if verdict.outcome != verify.Outcome.correct
  }
  if not wrong:
    return round_
  kept = tuple(r for r in round_.extra if r.record not in wrong)
  refused = tuple(
    records.Refusal(r.peer, "unverified", r.record)
    for r in round_.extra
    if r.record in wrong
  )
  return round_._replace(
    extra=kept,
    slots=round_.slots if kept else 0,
    refused=(*round_.refused, *refused),
  )
