"""What one policy remembers between rounds, and what it tries again.

Before a round an `Explorer` says which prefixes to continue; after its
verdicts it says how new every rollout is, and queues the prompts that stay
hard. A `State` never changes: `observe` returns the next one, which is kept
once the round is over, so a round that is resumed sees what it saw before.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mrl_jax import records
from mrl_jax.explore import draft as draft_lib
from mrl_jax.explore import memory as memory_lib
from mrl_jax.explore import novelty as novelty_lib
from mrl_jax.explore import prefixes as prefixes_lib
from mrl_jax.explore import queue as queue_lib
from mrl_jax.explore import report
from mrl_jax.model import encoder
from mrl_jax.tasks import dataset


class State(NamedTuple):
  """What is remembered; a part without a rule is None or empty."""

  mean: np.ndarray | None = None  # [E], of the first round's embeddings
  seen: memory_lib.Memory | None = None  # embeddings of rollouts
  cuts: memory_lib.Memory | None = None  # of prefixes, their entropy behind
  queue: queue_lib.Queue = queue_lib.Queue()


class Slot(NamedTuple):
  """What one group of a round is about."""

  problem: dataset.Problem
  position: int  # in the task's order
  context: tuple[int, ...]  # ids that the policy is to continue
  item: queue_lib.Item | None = None  # the prefix among them, if any


class Found(NamedTuple):
  """What a round's rollouts are to the explorer."""

  novelty: np.ndarray | None  # [B] f32; None without the rule
  values: dict[str, int | float]  # metrics


class Explorer(NamedTuple):
  """How one policy explores."""

  policy: str
  samples: int  # G
  seed: int
  decode: Callable[[Sequence[int]], str]
  embedder: encoder.Embedder | None
  novelty: novelty_lib.Rule | None = None
  prefixes: prefixes_lib.Rule | None = None

  def start(self) -> State:
    """The state before the first round."""
    rule, cuts = self.prefixes, None
    if rule and rule.embeds:
      cuts = memory_lib.Memory(rule.size, rule.prompts)
    seen = self.novelty.memory(self.samples) if self.novelty else None
    return State(seen=seen, cuts=cuts)

  def fill(
    self, state: State, number: int, slots: Sequence[Slot]
  ) -> tuple[list[Slot], State]:
    """The round's slots, the last ones displaced by what is tried again."""
    if self.prefixes is None or number < self.prefixes.warmup:
      return list(slots), state
    most = min(self.prefixes.slots, len(slots))
    items, queue = state.queue.pop(most)
    again = [Slot(i.problem, i.position, i.whole, i) for i in items]
    kept = list(slots[: len(slots) - len(again)])
    return kept + again, state._replace(queue=queue)

  def observe(
    self, state: State, round_: records.Round, slots: Sequence[Slot]
  ) -> tuple[Found, State]:
    """Looks at a round's verified rollouts, the groups of `slots`.

    Args:
      state: as `fill` left it.
      round_: whose own rows are looked at.
      slots: as `fill` gave them.
    """
    rows = list(round_.own)
    shape = (len(slots), self.samples)
    correct = np.asarray([r.outcome == "correct" for r in rows]).reshape(shape)
    scored = np.isfinite([r.reward for r in rows]).reshape(shape)
    values: dict[str, int | float] = {}
    embeddings = None
    first = self._centred and state.mean is None
    if self.novelty or first:
      embeddings = self.embedder.embed([_response(row) for row in rows])
    if first:
      mean = embeddings.mean(0, dtype=np.float64).astype(np.float32)
      state = state._replace(mean=mean)
    novelty = None
    if self.novelty:
      roots = [row.root or row.prompt_id for row in rows[:: self.samples]]
      directions = novelty_lib.unit(embeddings, state.mean)
      found, seen = novelty_lib.score(
        state.seen, roots, directions.reshape(*shape, -1), correct, self.novelty
      )
      warm = state.seen.holding(roots, self.samples)
      values.update(report.novelty(found, correct, warm, seen))
      novelty, state = found.reshape(-1), state._replace(seen=seen)
    if self.prefixes:
      hard = prefixes_lib.hard(correct, scored)
      drafts, counts = self._drafts(rows, slots, hard, round_.number)
      items, cuts = self._cut(state, drafts, round_.number)
      queue = state.queue.push(items, self.prefixes.queue)
      state = state._replace(cuts=cuts, queue=queue)
      values.update(counts)
      tried = [slot.item for slot in slots]
      values.update(report.regenerated(tried, correct))
      values.update(report.waiting(queue, len(items), round_.number))
    return Found(novelty, values), state

  @property
  def _centred(self) -> bool:
    return self.embedder is not None and self.embedder.centre

  def _drafts(self, rows, slots, hard, number):
    """What the hard groups leave to be cut, and counts of them."""
    names = ("too_deep", "no_entropy", "no_cut")
    counts = {"explore/hard": int(hard.sum())}
    counts.update({f"explore/{name}": 0 for name in names})
    drafts = []
    for group in np.flatnonzero(hard).tolist():
      slot = slots[group]
      draft = draft_lib.make(
        rows[group * self.samples : (group + 1) * self.samples],
        slot.problem,
        slot.position,
        number,
        slot.item,
        self.prefixes,
        self.decode,
      )
      if isinstance(draft, str):
        counts[f"explore/{draft}"] += 1
      else:
        drafts.append(draft)
    return drafts, counts

  def _cut(self, state, drafts, number):
    """The drafts' items, and the memory of prefixes."""
    rule = self.prefixes
    if rule.choice == "restart":
      return [draft.cut(0) for draft in drafts], state.cuts
    if rule.choice == "random":
      words = (self.seed, self.policy, number)
      return [draft.cut(draft.random(words)) for draft in drafts], state.cuts
    if not drafts:
      return [], state.cuts
    embeddings = self.embedder.embed([r for d in drafts for r in d.responses()])
    ends = np.cumsum([len(draft.places) for draft in drafts])
    parts = np.split(novelty_lib.unit(embeddings, state.mean), ends[:-1])
    items, pushed = [], []
    for draft, rows in zip(drafts, parts, strict=True):
      root = draft.like.root
      earlier = state.cuts.entries.get(root, np.zeros((0,), np.float32))
      entropies = prefixes_lib.prefix_entropies(draft.entropies, draft.places)
      best = prefixes_lib.choose(rows, entropies, earlier, rule)
      items.append(draft.cut(draft.places[best]))
      pushed.append((root, np.column_stack([rows, entropies])))
    return items, state.cuts.push(pushed)


def _response(row: records.Rollout) -> encoder.Response:
  """The whole answer, with the part that it continued."""
  start = len(row.context) - row.prefix
  tokens = (*row.context[start:], *row.tokens.tolist())
  return encoder.Response(row.context[:start], tokens, row.text)


def pack(
  state: State,
) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
  """JSON values and arrays from which `unpack` makes the same again."""
  plain: dict = {"queue": state.queue.pack()}
  arrays: dict[str, dict[str, np.ndarray]] = {}
  for name in ("seen", "cuts"):
    memory = getattr(state, name)
    if memory is not None:
      plain[name], arrays[name] = memory.pack()
  if state.mean is not None:
    arrays["mean"] = {"mean": state.mean}
  return plain, {name: part for name, part in arrays.items() if part}


def unpack(
  start: State,
  plain: Mapping[str, Any],
  arrays: Mapping[str, Mapping[str, Any]],
  problem_at: Callable[[int], dataset.Problem],
) -> State:
  """The state that was packed.

  Args:
    start: of the explorer, for the bounds of its memories.
    plain: what `pack` returned,
    arrays: and the arrays.
    problem_at: the task's problem at a position of its order.
  """
  state = start._replace(queue=queue_lib.unpack(plain["queue"], problem_at))
  for name in ("seen", "cuts"):
    memory = getattr(start, name)
    if memory is not None:
      memory = memory.unpack(plain[name], arrays.get(name, {}))
      state = state._replace(**{name: memory})
  if "mean" in arrays:
    state = state._replace(mean=np.asarray(arrays["mean"]["mean"]))
  return state
