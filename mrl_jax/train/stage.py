"""A stage: all its rollouts first, then all its updates.

On-policy GRPO and Mu-GRPO (https://arxiv.org/abs/2605.17570) are the same
loop: many stages of one update, or few of many. A stage's groups are split
into its updates once, before the first; the log-probs that its losses
compare with are computed once too, or anew for every block of updates, and
wait on disk. So an update is a function of the stage's start, of its number
and of the state it is given, and a stage can be continued in its middle.
"""

import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mrl_jax import collate, diagnostics, measure, records
from mrl_jax import config as config_lib
from mrl_jax.parallel import processes, sharding
from mrl_jax.sampling import engine
from mrl_jax.train import policy as policy_lib
from mrl_jax.train import state as state_lib
from mrl_jax.train import widths as widths_lib
from mrl_jax.types import Batch, Shaping


class Schedule(NamedTuple):
  """How a run spends its prompts and updates."""

  stages: int
  prompts: int  # of a stage
  updates: int  # of a stage

  @classmethod
  def of(cls, config: config_lib.Config) -> "Schedule":
    return cls(config.rounds, config.prompts, config.updates)


class Plan(NamedTuple):
  """Which groups each update of a stage learns from."""

  updates: tuple[tuple[int, ...], ...]
  size: int  # groups of an update's batch: those beyond its own are blank
  dropped: int  # groups left out


def plan(
  round_: records.Round,
  schedule: Schedule,
  samples: int,
  *,
  seed: int,
  shuffle: bool,
  drop: bool,
  multiple: int,
) -> Plan:
  """Splits the stage's groups into its updates, as evenly as they go.

  With fewer groups than updates there are as many updates as groups.

  Args:
    round_: the stage.
    schedule: of the run.
    samples: G, rows of a group.
    seed: of the run; the order is a function of it, the policy and the round.
    shuffle: takes the groups in random order; of one update all are one.
    drop: leaves out the groups that teach nothing.
    multiple: what the groups of a batch are a multiple of.
  """
  count = len(round_.own) // samples
  groups = np.arange(count)
  if drop:
    groups = groups[_informative(round_, samples)]
  updates = min(schedule.updates, len(groups))
  if shuffle and updates > 1:
    words = engine.words(seed, round_.policy, round_.number, "groups")
    np.random.default_rng(words).shuffle(groups)
  if not updates:
    return Plan((), 0, count)
  most = -(-len(groups) // updates)
  # Quarters of the full batch: dropping groups adds three shapes to compile.
  full = -(-schedule.prompts // schedule.updates)
  step = multiple * -(-full // (4 * multiple))
  size = step * -(-most // step)
  parts = tuple(
    tuple(part.tolist()) for part in np.array_split(groups, updates)
  )
  return Plan(parts, size if drop else most, count - len(groups))


def _informative(round_: records.Round, samples: int) -> np.ndarray:
  """Which groups have an advantage, a bonus or a peer's rows. [N] bool."""
  pairs = [(row.reward, row.novelty or 0.0) for row in round_.own]
  rewards, novelty = np.asarray(pairs).T
  new = ((rewards > 0) & (novelty > 0)).reshape(-1, samples).any(1)
  spreads = measure.spreads(rewards.reshape(-1, samples))
  heard = {row.prompt_id for row in round_.extra}
  heard |= {name for name, tally in round_.peers.items() if tally.count}
  names = [row.prompt_id for row in round_.own[::samples]]
  return (
    (spreads > measure.TIED) | new | np.asarray([n in heard for n in names])
  )


class Stage:
  """One policy's stage, planned, at any of its updates."""

  def __init__(
    self,
    policy: policy_lib.Policy,
    round_: records.Round,
    plan_: Plan,
    folder: str | os.PathLike[str],
    scale: float = 1.0,
  ):
    """`scale` is what the recipe's potential, if any, is divided by."""
    self.policy, self.round, self.plan = policy, round_, plan_
    self._scale = scale
    self._folder = pathlib.Path(folder)
    self._extra: dict[str, list[records.Foreign]] = {}
    for row in round_.extra:
      self._extra.setdefault(row.prompt_id, []).append(row)
    self._share = policy.samples + round_.slots

  @property
  def scored(self) -> bool:
    """Whether something is to be computed before the first update."""
    policy = self.policy
    return policy.recipe.rescore or policy.compared or bool(policy.reference)

  def score(self, params: Any, numbers: Iterable[int]) -> None:
    """Writes what the policy and the reference say for some updates."""
    place = sharding.batch(self.policy.mesh)
    with jax.set_mesh(self.policy.mesh):
      for number in numbers:
        batch = processes.place(self._rows(number), place)
        found = {}
        if self.policy.recipe.rescore:
          found["old_logprobs"] = self._logprobs(params, batch)
        found |= self._of_reference(batch)
        path = self._path(number)
        np.savez(path.with_suffix(".new.npz"), **processes.fetch(found))
        os.replace(path.with_suffix(".new.npz"), path)

  def _of_reference(self, batch: Batch) -> dict[str, jax.Array]:
    policy = self.policy
    if policy.reference is not None:
      return policy.reference.score(policy.initial, batch, self._share)
    if policy.compared:
      return {"ref_logprobs": self._logprobs(policy.initial, batch)}
    return {}

  def learn(
    self, state: state_lib.TrainState, numbers: Iterable[int]
  ) -> tuple[state_lib.TrainState, list[dict[str, Any]]]:
    """Makes some updates, in order; returns plain reports of each."""
    place = sharding.batch(self.policy.mesh)
    reports, paddings = [], []
    with jax.set_mesh(self.policy.mesh):
      for number in numbers:
        batch, *more = self._cut(self._batch(number))
        paddings.append(_padding(batch, *more[1:]))
        batch = processes.place(batch, place)
        with jax.transfer_guard("disallow"):
          state, report = self.policy.update(state, batch, *more)
        reports.append(report)
    reports = [_plain(report) for report in processes.fetch(reports)]
    for report, padding in zip(reports, paddings, strict=True):
      report["padding"] = padding
    return state, reports

  def _cut(self, batch: Batch) -> tuple[Any, ...]:
    """The batch, its rows of one prompt, and its microbatches' widths."""
    policy = self.policy
    if not policy.pieces:
      return batch, self._share
    found = widths_lib.cut(
      (batch.weights != 0).sum(1),
      self._share,
      policy.microbatches,
      batch.tokens.shape[1],
      policy.pieces,
    )
    batch = jax.tree.map(lambda x: x[found.rows], batch)
    return batch, found.share, found.widths

  def _logprobs(self, params: Any, batch: Batch) -> jax.Array:
    return self.policy.score(params, batch, self._share).logprobs

  def _batch(self, number: int) -> Batch:
    batch = self._rows(number)
    if not self.scored:
      return batch
    with np.load(self._path(number)) as arrays:
      found = dict(arrays)
    values = found.pop("potentials", None)
    if values is not None:
      scale = np.full(len(values), self._scale, np.float32)
      found["shaping"] = Shaping(values, scale)
    return batch._replace(**found)

  def _rows(self, number: int) -> Batch:
    """The rows of an update, filled up with groups of weight 0."""
    samples, groups = self.policy.samples, self.plan.updates[number]
    rows = [
      row
      for group in groups
      for row in self.round.own[group * samples : (group + 1) * samples]
    ]
    here = dict.fromkeys(row.prompt_id for row in rows)
    extra = [row for name in here for row in self._extra.get(name, ())]
    for blank in range(self.plan.size - len(groups)):
      rows += [_blank(rows[0], f"blank/{blank}")] * samples
    return collate.batch(
      rows,
      extra,
      self.round.slots,
      self.round.peers,
      earned=self.policy.recipe.earned,
    )

  def _path(self, number: int) -> pathlib.Path:
    return self._folder / f"scores-{number:06d}.npz"


def _padding(batch: Batch, widths: tuple[int, ...] = ()) -> float:
  """The share of the completion tokens computed that are none."""
  count, whole = batch.tokens.shape
  width = float(np.mean(widths)) if widths else whole
  return 1 - float((batch.weights != 0).sum()) / (count * width)


def _blank(like: records.Rollout, name: str) -> records.Rollout:
  """No completion: its tokens have weight 0 and it has no reward."""
  return like._replace(
    prompt_id=name,
    novelty=None,
    earned=None,
    tokens=np.zeros((0,), np.int32),
    logprobs=np.zeros((0,), np.float32),
    entropies=np.zeros((0,), np.float32),
    reward=float("nan"),
  )


def _plain(report: dict[str, Any]) -> dict[str, Any]:
  """A report in float64 on the host, where JSON gives back the same."""
  return {
    name: _sums(value._asdict())
    if name == "tokens"
    else np.asarray(value).item()
    for name, value in report.items()
  }


def _sums(values: dict[str, Any]) -> diagnostics.Sums:
  arrays = {
    name: None if value is None else np.asarray(value, np.float64)
    for name, value in values.items()
  }
  return diagnostics.Sums(**arrays)


def to_json(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
  """The reports of `learn` as JSON values."""
  return [
    {**report, "tokens": _lists(report["tokens"]._asdict())}
    for report in reports
  ]


def _lists(sums: dict[str, Any]) -> dict[str, Any]:
  return {k: None if v is None else v.tolist() for k, v in sums.items()}


def from_json(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
  """The inverse of `to_json`."""
  return [{**r, "tokens": _sums(r["tokens"])} for r in reports]
