"""One policy's turn in a round: generate, tell, listen, score, update.

The two phases are what an executor schedules; the second may come in slices,
so that the run can be saved inside a round. Each device phase takes all of
the policy's devices at once; between the phases the state may rest in host
memory.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mrl_jax import config as config_lib
from mrl_jax import diagnostics, records
from mrl_jax.explore import explorer
from mrl_jax.parallel import lease, offload
from mrl_jax.shaping import scale as shaping_lib
from mrl_jax.tasks import dataset, verify
from mrl_jax.train import executor, report, rounds, spill
from mrl_jax.train import policy as policy_lib
from mrl_jax.train import stage as stage_lib
from mrl_jax.train import state as state_lib
from mrl_jax.types import Source

States = dict[str, state_lib.TrainState]
# What is timed; switch: moving the state, planning the updates.
PHASES = (
  *("generate", "verify", "explore", "exchange"),
  *("score", "update", "switch"),
)


class Hooks(NamedTuple):
  """What a display hears of; each may do nothing."""

  phase: Callable[[str, str], None]  # policy, name of the phase
  round: Callable[[int, Mapping[str, Mapping[str, float]]], None]
  message: Callable[[str], None]


@dataclasses.dataclass
class Run:
  """What the rounds of a run work on; policies and states may move."""

  config: config_lib.Config
  policies: list[policy_lib.Policy]
  states: States
  explored: dict[str, explorer.State]  # of the policies that explore
  order: dataset.Order
  pool: verify.Pool
  exchange: rounds.Exchange
  execute: executor.Execute
  devices: lease.Devices
  hooks: Hooks
  folder: pathlib.Path  # of what a round keeps until it is over
  stopping: Callable[[], bool]  # whether to stop where it is safe


class Work:
  """One policy's round, as far as it is.

  Args:
    policy: the policy.
    slots: what its groups are about.
    explored: what its explorer remembers, if it has one.
    folder: where its rollouts and scores wait.
    reports: of the updates it has made already, if the round is resumed.
    scale: what its potential is divided by, after earlier rounds.
  """

  def __init__(
    self,
    policy: policy_lib.Policy,
    slots: Sequence[explorer.Slot],
    explored: explorer.State | None,
    folder: pathlib.Path,
    reports: Sequence[dict[str, Any]] = (),
    scale: float | None = None,
  ):
    self.policy = policy
    rule = policy.recipe.shaping
    self.scale = shaping_lib.first(rule) if rule and scale is None else scale
    self.slots = slots
    self.explored = explored
    self.devices = [device.id for device in policy.mesh.devices.flat]
    self.shelf = spill.Shelf(folder)
    self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    self.cpu_seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    self.generated = 0  # tokens, by this process
    self.values: dict[str, float] = {}
    self.decisions: list[dict[str, Any]] = []
    self.reports = list(reports)
    self.round: records.Round | None = None
    self.stage: stage_lib.Stage | None = None

  def clock(self, phase: str) -> "_Clock":
    return _Clock(self, phase)


def act(run_: Run, work: Work, number: int) -> None:
  """Generate and verify, part by part; look for what is new; publish.

  Parts that are on disk are not generated again. Where the run is to stop,
  it stops between two parts, and `work.round` stays None.
  """
  policy, config = work.policy, run_.config
  problems = [slot.problem for slot in work.slots]
  size = config.part or len(problems)
  there = work.shelf.parts()
  for part, start in enumerate(range(0, len(problems), size)):
    if part in there:
      continue
    if work.reports:
      raise FileNotFoundError(
        f"part {part} of the rollouts of round {number} is missing from "
        f"{work.shelf.folder}, and updates were made with it: restore it, or "
        "start in a new workdir"
      )
    if part and run_.stopping():
      return
    chosen = slice(start, start + size)
    rows = _generate(run_, work, work.slots[chosen], number)
    run_.hooks.phase(policy.name, "verify" + _of(part, len(problems) // size))
    with work.clock("verify"):
      rows = rounds.judge(
        run_.pool, rows, problems[chosen], policy.samples, policy.actor
      )
    work.shelf.put(part, rows)
  work.round = records.Round(policy.name, number, work.shelf.rows())
  _explore(run_, work)
  with work.clock("exchange"):
    version = work.round.own[0].version
    told = rounds.tell(run_.exchange, policy, work.round, version)
  work.values.update(told)


def _explore(run_: Run, work: Work) -> None:
  """What the policy's explorer makes of the round, if it has one."""
  policy = work.policy
  if policy.explorer is None:
    return
  run_.hooks.phase(policy.name, "explore")
  own = policy.mesh.local_devices[0]  # not another policy's: see the lease
  with (
    run_.devices.lease(work.devices),
    work.clock("explore"),
    jax.default_device(own),
  ):
    found, work.explored = policy.explorer.observe(
      work.explored, work.round, work.slots
    )
  if found.novelty is not None:
    rows = work.round.own.with_novelty(found.novelty)
    work.round = work.round._replace(own=rows)
  work.values.update(found.values)


def _generate(run_: Run, work: Work, slots, number: int):
  policy = work.policy
  run_.hooks.phase(policy.name, "generate")
  with run_.devices.lease(work.devices):
    with work.clock("switch"):
      state = fetch(run_, policy)
    with work.clock("generate"):
      rows = policy_lib.sample(
        policy.actor,
        state.params,
        slots,
        number,
        policy.samples,
        int(state.step),
      )
    with work.clock("switch"):
      put(run_, policy, state)
  work.generated += sum(len(row.tokens) for row in rows)
  return rows


def _of(part: int, parts: int) -> str:
  return f" {part + 1}/{parts}" if parts > 1 else ""


def study(run_: Run, work: Work, stop: int) -> None:
  """Listen to the peers, and update until `stop` updates are made."""
  policy, config = work.policy, run_.config
  if work.stage is None:
    _listen(run_, work)
    with work.clock("switch"):
      plan = stage_lib.plan(
        work.round,
        stage_lib.Schedule.of(config),
        policy.samples,
        seed=config.seed,
        shuffle=config.shuffle,
        drop=config.drop_degenerate,
        multiple=config.microbatches * policy.spread,
      )
      folder = work.shelf.folder
      scale = 1.0 if work.scale is None else work.scale
      work.stage = stage_lib.Stage(policy, work.round, plan, folder, scale)
    work.values["dropped_groups"] = plan.dropped
  with run_.devices.lease(work.devices):
    with work.clock("switch"):
      state = fetch(run_, policy)
    state = _update(run_, work, state, stop)
    with work.clock("switch"):
      put(run_, policy, state)


def _listen(run_: Run, work: Work) -> None:
  policy, config = work.policy, run_.config
  if not policy.recipe.needs:
    return
  run_.hooks.phase(policy.name, "exchange")
  problems = [slot.problem for slot in work.slots]
  with work.clock("exchange"):
    work.round, published = rounds.listen(
      run_.exchange, policy, work.round, problems, run_.pool
    )
  peers = {k: v for k, v in run_.exchange.samples.items() if k != policy.name}
  mix = None if config.xgrpo_mix < 0 else config.xgrpo_mix
  work.values.update(
    report.exchanged(work.round, published, policy.recipe.needs, peers, mix)
  )
  work.decisions = list(report.decisions(work.round, published, list(peers)))


def _update(run_: Run, work: Work, state, stop: int) -> state_lib.TrainState:
  """Block by block: score the block where one begins, then its updates."""
  stage, hooks, name = work.stage, run_.hooks, work.policy.name
  total = len(stage.plan.updates)
  block = run_.config.anchor_every or max(total, 1)
  stop = min(stop, total)
  while len(work.reports) < stop:
    done = len(work.reports)
    end = done - done % block + block
    if stage.scored and done % block == 0:
      hooks.phase(name, "score")
      with work.clock("score"):
        stage.score(state.params, range(done, min(end, total)))
    hooks.phase(name, "update" + _of(done, total))
    with work.clock("update"):
      state, reports = stage.learn(state, range(done, min(end, stop)))
    if done % block == 0:
      _check_first(run_.config, work.policy, reports[0])
    work.reports += reports
  return state


_ROUNDING = {"float32": 1e-3, "bfloat16": 0.25}  # of a log-prob, computed twice


def _check_first(config, policy, first) -> None:
  """Nothing has been learned since the scores: all ratios must be 1.

  Raises:
    RuntimeError: they are not.
  """
  own = int(Source.OWN)
  if not config.rescore or not first["tokens"].tokens[own]:
    return
  gap, most = diagnostics.first_gap(first), first["ratio_max"]
  if not (most > 0 and gap <= _ROUNDING[config.dtype]):
    raise RuntimeError(
      f"{policy.name}: the first update after scoring has log-ratios up to "
      f"{gap:.3g} and a greatest ratio of {most:.3g}; 0 and 1 were expected: "
      "the scored log-probs are not of the policy that is being trained"
    )


def scales(works: Mapping[str, Work]) -> dict[str, float]:
  """What potentials are divided by after a round that is over."""
  found = {}
  for name, work in works.items():
    rule = work.policy.recipe.shaping
    if rule is not None:
      rewards = [row.reward for row in work.round.own if not row.root]
      rewards = np.reshape(rewards, (-1, work.policy.samples))
      found[name] = shaping_lib.after(rule, work.scale, rewards)
  return found


def fetch(run_: Run, policy: policy_lib.Policy) -> state_lib.TrainState:
  """The policy's state on its devices; it may have been in host memory."""
  if run_.config.offload:
    state = run_.states[policy.name]
    run_.states[policy.name] = offload.to_device(state, policy.shardings)
  return run_.states[policy.name]


def put(
  run_: Run, policy: policy_lib.Policy, state: state_lib.TrainState
) -> None:
  run_.states[policy.name] = (
    offload.to_host(state) if run_.config.offload else state
  )


class _Clock:
  """Adds a block's wall and CPU seconds to a work's phase.

  CPU seconds are of the whole process: where policies run at once, each is
  told those of all.
  """

  def __init__(self, work: Work, phase: str):
    self._work, self._phase = work, phase

  def __enter__(self) -> None:
    self._start = time.perf_counter(), time.process_time()

  def __exit__(self, *unused) -> None:
    wall, cpu = self._start
    self._work.seconds[self._phase] += time.perf_counter() - wall
    self._work.cpu_seconds[self._phase] += time.process_time() - cpu
