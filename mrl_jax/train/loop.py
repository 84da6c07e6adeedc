"""The loop: every policy generates, answers are verified, every policy learns.

A round is one pass of that, with an exchange of records in between where a
recipe listens for one; how many prompts and updates it has makes it a step
of on-policy GRPO or a stage of Mu-GRPO. A run is a function of its
configuration: killed at any point and started again in the same folder, it
goes on from the last checkpoint, which may be inside a round, reads the
rollouts that are on disk, and leaves the same logs and parameters, bit for
bit. Of several processes each runs the same rounds, with the rollouts on its
own disk; where to stop, and from what to go on, they agree on.
"""

import collections
import functools
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from mrl_jax import config as config_lib
from mrl_jax.exchange import store
from mrl_jax.explore import explorer
from mrl_jax.parallel import lease, processes
from mrl_jax.tasks import dataset, verify
from mrl_jax.train import (
  checkpoint,
  compilations,
  executor,
  metrics,
  replan,
  report,
  rounds,
  stage,
  turn,
)
from mrl_jax.train import interrupt as interrupt_lib
from mrl_jax.train import policy as policy_lib
from mrl_jax.train import state as state_lib


def run(
  config: config_lib.Config,
  policies: Sequence[policy_lib.Policy],
  states: turn.States,
  order: dataset.Order,
  pool: verify.Pool,
  store_: store.Store,
  log_for: Callable[[dict[str, Any] | None], metrics.Log],
  checkpoints: checkpoint.Checkpoints,
  hooks: turn.Hooks,
) -> tuple[turn.States, bool]:
  """Trains from the last checkpoint, if any, to the last round.

  Args:
    config: the run's configuration.
    policies: built from it, in its order.
    states: their initial states, by name; donated.
    order: the task's prompts.
    pool: verifies completions.
    store_: where the policies exchange records.
    log_for: opens the log, cut back to a state if one is given.
    checkpoints: of this run.
    hooks: the display.

  Returns:
    The final states, and whether the last round was reached: SIGTERM and
    SIGINT finish the round, save and return.

  Raises:
    PolicyError: a policy failed; the message names it.
  """
  partition = executor.Partition()
  inline = config.executor == "inline"
  with interrupt_lib.Interrupt(hooks.message) as interrupt:
    run_ = turn.Run(
      config,
      list(policies),
      states,
      {p.name: p.explorer.start() for p in policies if p.explorer},
      order,
      pool,
      rounds.exchange(config, policies, store_, partition.cancelled),
      executor.inline if inline else partition,
      lease.Devices([device.id for device in jax.devices()]),
      hooks,
      pathlib.Path(config.workdir) / "rounds",
      lambda: processes.some(interrupt()),
    )
    cursor, log_state, reports = _restore(run_, checkpoints)
    for policy in policies:  # of a run that was killed later than saved
      forget = functools.partial(store_.forget, cursor.round, policy.name)
      processes.agreed(forget)
    journal = _Journal(run_, log_for(log_state), checkpoints)
    cursor = _rounds(run_, journal, cursor, reports)
  journal.log.close()
  if cursor.round >= config.rounds:
    checkpoints.wait()
    shutil.rmtree(run_.folder, ignore_errors=True)
  for policy in run_.policies:
    turn.fetch(run_, policy)
  return run_.states, cursor.round >= config.rounds


class _Journal:
  """What a run writes down: its log, and checkpoints of its state."""

  def __init__(
    self,
    run_: turn.Run,
    log: metrics.Log,
    checkpoints: checkpoint.Checkpoints,
  ):
    self._run, self.log, self._checkpoints = run_, log, checkpoints

  def save(
    self, cursor: rounds.Cursor, works: Mapping[str, turn.Work] | None = None
  ) -> None:
    """Starts a checkpoint; `works` are those of a round that is not over."""
    self._run.hooks.phase("", "save")
    reports = {n: stage.to_json(w.reports) for n, w in (works or {}).items()}
    packed = {n: explorer.pack(s) for n, s in self._run.explored.items()}
    host = {
      "cursor": cursor._asdict(),
      "log": self.log.state(),
      "reports": reports,
      "explored": {name: plain for name, (plain, _) in packed.items()},
    }
    number = checkpoint.number(cursor.round, cursor.update)
    arrays = {name: arrays for name, (_, arrays) in packed.items()}
    self._checkpoints.save(number, self._run.states, host, arrays)

  def needed(self) -> int:
    """The round whose rollouts the last complete checkpoint goes on with."""
    return self._checkpoints.needed()


def _rounds(
  run_: turn.Run,
  journal: _Journal,
  cursor: rounds.Cursor,
  reports: Mapping[str, Sequence[dict[str, Any]]],
) -> rounds.Cursor:
  """Rounds until the last one, or until the run is to stop."""
  config = run_.config
  measured: dict[str, list[dict[str, float]]] = collections.defaultdict(list)
  stop = run_.stopping()
  while cursor.round < config.rounds and not stop:
    before = cursor
    _forget(run_.folder, {cursor.round, journal.needed()})
    cursor, seconds = _round(run_, journal, cursor, reports)
    if cursor.round == before.round:  # stopped inside it
      return cursor
    reports = {}
    for name, phases in seconds.items():
      measured[name].append(phases)
    every = config.replan_every
    more = cursor.round < config.rounds
    if more and every and cursor.round % every == 0:
      cursor = replan.shares(run_, measured, cursor)
    stop = run_.stopping()  # asked once: what ends the loop is saved
    every = config.save_every
    if stop or not more or (every and cursor.round % every == 0):
      journal.save(cursor)
  return cursor


def _forget(folder: pathlib.Path, keep: set[int]) -> None:
  """Removes what other rounds left on disk."""
  for path in folder.iterdir() if folder.exists() else ():
    if path.name not in {str(round_) for round_ in keep}:
      shutil.rmtree(path)


def _restore(
  run_: turn.Run, checkpoints: checkpoint.Checkpoints
) -> tuple[rounds.Cursor, dict[str, int] | None, dict[str, Any]]:
  latest = checkpoints.latest()
  if latest is None:
    return rounds.Cursor(), None, {}
  targets = {
    p.name: state_lib.abstract(run_.states[p.name], p.shardings)
    for p in run_.policies
  }
  run_.states, host, arrays = checkpoints.restore(latest, targets)
  for name, plain in host["explored"].items():
    run_.explored[name] = explorer.unpack(
      run_.explored[name], plain, arrays.get(name, {}), run_.order.at
    )
  cursor = rounds.Cursor(**host["cursor"])
  if cursor.shares:
    replan.move(run_, cursor.shares)
  inside = f", {cursor.update} updates into the next" if cursor.update else ""
  run_.hooks.message(f"resumed after round {cursor.round - 1}{inside}")
  reports = {n: stage.from_json(r) for n, r in host["reports"].items()}
  return cursor, host["log"], reports


def _round(
  run_: turn.Run,
  journal: _Journal,
  cursor: rounds.Cursor,
  reports: Mapping[str, Sequence[dict[str, Any]]],
) -> tuple[rounds.Cursor, dict[str, dict[str, float]]]:
  """One round of all policies, or the rest of one.

  Returns the cursor and the phases' seconds. Where the run is to stop inside
  the round the cursor stays at it, saved as far as it is.
  """
  compiled = len(compilations.names())
  slots, after = rounds.take(run_.config, run_.policies, run_.order, cursor)
  number = cursor.round
  works = {
    policy.name: _work(run_, policy, slots[policy.name], cursor, reports)
    for policy in run_.policies
  }

  def act(name: str) -> None:
    turn.act(run_, works[name], number)

  def study(name: str, stop: int) -> None:
    turn.study(run_, works[name], stop)

  waits = [act]
  if run_.config.part:  # generation may stop between parts
    run_.execute(list(works), waits)
    waits = []
    if any(work.round is None for work in works.values()):
      journal.save(cursor)
      return cursor, {}
  for stop in _stops(run_.config, cursor.update):
    before = {name: len(work.reports) for name, work in works.items()}
    learn = functools.partial(study, stop=stop)
    run_.execute(list(works), [*waits, learn])
    waits = []
    for name, work in works.items():
      first = before[name]
      records = report.updates(work.reports[first:], first)
      journal.log.updates(name, number, records)
    if stop < run_.config.updates:
      cursor = cursor._replace(update=stop)
      journal.save(cursor, works)
      if run_.stopping():
        return cursor, {}
  compiled = len(compilations.names()) - compiled
  _tell(run_, journal.log, after, works, compiled)
  seconds = {name: work.seconds for name, work in works.items()}
  scales = turn.scales(works)
  return after._replace(round=number + 1, update=0, scales=scales), seconds


def _work(run_: turn.Run, policy, slots, cursor, reports) -> turn.Work:
  """A policy's round, some of its slots taken by what it tries again."""
  name, explored = policy.name, run_.explored.get(policy.name)
  if policy.explorer is not None:
    slots, explored = policy.explorer.fill(explored, cursor.round, slots)
  folder = run_.folder / str(cursor.round) / name
  made, scale = reports.get(name, ()), cursor.scales.get(name)
  work = turn.Work(policy, slots, explored, folder, made, scale)
  processes.level(folder)
  return work


def _stops(config: config_lib.Config, done: int) -> list[int]:
  """At how many updates to save inside a round, and its end."""
  every = config.save_updates or config.updates
  stops = range(every, config.updates, every)
  return [stop for stop in stops if stop > done] + [config.updates]


def _tell(
  run_: turn.Run,
  log: metrics.Log,
  cursor: rounds.Cursor,
  works: Mapping[str, turn.Work],
  compiled: int,
) -> None:
  """Writes down a round that is over, and how much all of it compiled."""
  number, shown = cursor.round, {}
  for name, work in works.items():
    if work.explored is not None:
      run_.explored[name] = work.explored
    samples = work.policy.samples
    values = {
      **work.values,
      **report.summarize(work.round, work.reports, samples),
      "dropped_prompts": cursor.dropped,
    }
    times = report.timings(work.seconds, work.cpu_seconds, work.generated)
    times |= {"devices": len(work.devices), "compilations": compiled}
    log.metrics(name, number, values)
    log.timings(name, number, times)
    log.exchange(work.decisions)
    if run_.config.save_rollouts:
      log.rollouts(report.rollouts(work.round))
    shown[name] = {**values, **times}
  run_.hooks.round(number, shown)
