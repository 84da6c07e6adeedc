"""The loop: every policy generates, answers are verified, every policy learns.

A round is one pass of that, with an exchange of records in between where a
recipe listens for one. A run is a function of its configuration: killed at
any point and started again in the same folder, it repeats the rounds since
the last checkpoint and leaves the same logs and parameters, bit for bit.
"""

import collections
import signal
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mrl_jax import config as config_lib
from mrl_jax.exchange import store
from mrl_jax.parallel import lease
from mrl_jax.tasks import dataset, verify
from mrl_jax.train import (
  checkpoint,
  executor,
  metrics,
  placement,
  report,
  rounds,
  turn,
)
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
  run_ = turn.Run(
    config,
    list(policies),
    states,
    order,
    pool,
    rounds.exchange(config, policies, store_, partition.cancelled),
    executor.inline if inline else partition,
    lease.Devices([device.id for device in jax.devices()]),
    hooks,
  )
  cursor, log_state = _restore(run_, checkpoints)
  for policy in policies:  # of a run that was killed later than saved
    store_.forget(cursor.round, policy.name)
  log = log_for(log_state)
  measured: dict[str, list[dict[str, float]]] = collections.defaultdict(list)
  with _Interrupt(hooks) as interrupt:
    while cursor.round < config.rounds and not interrupt.asked:
      cursor, seconds = _round(run_, log, cursor)
      for name, phases in seconds.items():
        measured[name].append(phases)
      every = config.replan_every
      more = cursor.round < config.rounds
      if more and every and cursor.round % every == 0:
        cursor = _replan(run_, measured, cursor)
      last = cursor.round == config.rounds or interrupt.asked
      every = config.save_every
      if last or (every and cursor.round % every == 0):
        hooks.phase("", "save")
        host = {"cursor": cursor._asdict(), "log": log.state()}
        checkpoints.save(cursor.round, run_.states, host)
  log.close()
  for policy in run_.policies:
    turn.fetch(run_, policy)
  return run_.states, cursor.round >= config.rounds


def _restore(
  run_: turn.Run, checkpoints: checkpoint.Checkpoints
) -> tuple[rounds.Cursor, dict[str, int] | None]:
  latest = checkpoints.latest()
  if latest is None:
    return rounds.Cursor(), None
  targets = {
    p.name: state_lib.abstract(run_.states[p.name], p.shardings)
    for p in run_.policies
  }
  run_.states, host = checkpoints.restore(latest, targets)
  cursor = rounds.Cursor(**host["cursor"])
  if cursor.shares:
    _move(run_, cursor.shares)
  run_.hooks.message(f"resumed after round {cursor.round - 1}")
  return cursor, host["log"]


def _replan(run_: turn.Run, measured, cursor: rounds.Cursor) -> rounds.Cursor:
  """New shares from the rounds since the last plan, without the first."""
  seconds = {}
  for name, phases in measured.items():
    used = phases[1:] or phases  # the first one compiles
    seconds[name] = {
      key: sum(p[key] for p in used) / len(used) for key in used[0]
    }
  plan = placement.plan(run_.config, run_.policies, run_.states, seconds)
  old = tuple(policy.mesh.size for policy in run_.policies)
  shown = ", ".join(
    f"{policy.name} {share}"
    for policy, share in zip(run_.policies, plan.devices, strict=True)
  )
  if plan.mode != "partition" or tuple(plan.devices) == old:
    run_.hooks.message(f"round {cursor.round}: shares stay; {plan.reason}")
    return cursor
  measured.clear()
  try:
    _move(run_, plan.devices)
  except config_lib.ConfigError as error:
    run_.hooks.message(f"round {cursor.round}: cannot move: {error}")
    return cursor
  run_.hooks.message(f"round {cursor.round}: devices {shown}; {plan.reason}")
  return cursor._replace(shares=tuple(plan.devices))


def _move(run_: turn.Run, shares: Sequence[int]) -> None:
  run_.policies, run_.states = placement.move(
    run_.config, run_.policies, run_.states, shares
  )


def _round(run_: turn.Run, log: metrics.Log, cursor: rounds.Cursor):
  """One round of all policies; returns the cursor and the phases' seconds."""
  problems, contexts, cursor = rounds.take(
    run_.config, run_.policies, run_.order, cursor
  )
  number = cursor.round
  works = {policy.name: turn.Work(policy) for policy in run_.policies}

  def act(name: str) -> None:
    turn.act(run_, works[name], problems, contexts[name], number)

  def study(name: str) -> None:
    turn.study(run_, works[name], problems)

  run_.execute(list(works), (act, study))
  shown = {}
  for name, work in works.items():
    values = {**work.values, "dropped_prompts": cursor.dropped}
    times = report.timings(work.round, work.seconds)
    times["devices"] = len(work.devices)
    log.metrics(name, number, values)
    log.timings(name, number, times)
    log.exchange(work.decisions)
    if run_.config.save_rollouts:
      log.rollouts(report.rollouts(work.round))
    shown[name] = {**values, **times}
  run_.hooks.round(number, shown)
  seconds = {name: work.seconds for name, work in works.items()}
  return cursor._replace(round=number + 1), seconds


class _Interrupt:
  """Turns the first SIGTERM or SIGINT into a request; the second ends."""

  def __init__(self, hooks: turn.Hooks):
    self._hooks = hooks
    self._old: dict[int, Any] = {}
    self.asked = False

  def __enter__(self) -> "_Interrupt":
    for number in (signal.SIGTERM, signal.SIGINT):
      try:
        self._old[number] = signal.signal(number, self._ask)
      except ValueError:  # not the main thread: the caller handles signals
        break
    return self

  def _ask(self, number, frame) -> None:
    del frame
    self.asked = True
    signal.signal(number, self._old[number])
    self._hooks.message("stopping after this round; again to stop at once")

  def __exit__(self, *unused) -> None:
    for number, handler in self._old.items():
      signal.signal(number, handler)
