"""One policy's turn in a round: generate, tell, listen, update.

The two phases are what an executor schedules. Each device phase takes all of
the policy's devices at once; between the phases the state may rest in host
memory.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mrl_jax import config as config_lib
from mrl_jax import records
from mrl_jax.parallel import lease, offload
from mrl_jax.tasks import dataset, verify
from mrl_jax.train import executor, report, rounds
from mrl_jax.train import policy as policy_lib
from mrl_jax.train import state as state_lib

States = dict[str, state_lib.TrainState]


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
  order: dataset.Order
  pool: verify.Pool
  exchange: rounds.Exchange
  execute: executor.Execute
  devices: lease.Devices
  hooks: Hooks


class Work:
  """One policy's round, as far as it is."""

  def __init__(self, policy: policy_lib.Policy):
    self.policy = policy
    self.devices = [device.id for device in policy.mesh.devices.flat]
    self.seconds: dict[str, float] = {}
    self.values: dict[str, float] = {}
    self.decisions: list[dict[str, Any]] = []
    self.round: records.Round | None = None

  def clock(self, phase: str) -> "_Clock":
    return _Clock(self.seconds, phase)


def act(run_: Run, work: Work, problems, contexts, number: int) -> None:
  """Generate, verify, publish."""
  policy = work.policy
  run_.hooks.phase(policy.name, "generate")
  with run_.devices.lease(work.devices), work.clock("generate"):
    state = fetch(run_, policy)
    rows = policy_lib.sample(
      policy.actor, state.params, problems, contexts, number, policy.samples
    )
    version = int(state.step)
    put(run_, policy, state)
  run_.hooks.phase(policy.name, "verify")
  with work.clock("verify"):
    rows = rounds.judge(run_.pool, rows, problems, policy.samples)
  work.round = records.Round(policy.name, number, tuple(rows))
  with work.clock("exchange"):
    told = rounds.tell(run_.exchange, policy, work.round, version)
  work.values.update(told)


def study(run_: Run, work: Work, problems) -> None:
  """Listen to the peers, update."""
  policy, config = work.policy, run_.config
  if policy.recipe.needs:
    run_.hooks.phase(policy.name, "exchange")
    start = work.seconds["exchange"]
    with work.clock("exchange"):
      work.round, published = rounds.listen(
        run_.exchange, policy, work.round, problems, run_.pool
      )
    work.seconds["exchange"] += start
    peers = {k: v for k, v in run_.exchange.samples.items() if k != policy.name}
    mix = None if config.xgrpo_mix < 0 else config.xgrpo_mix
    work.values.update(
      report.exchanged(work.round, published, policy.recipe.needs, peers, mix)
    )
    work.decisions = list(report.decisions(work.round, published, list(peers)))
  run_.hooks.phase(policy.name, "update")
  with run_.devices.lease(work.devices), work.clock("update"):
    state, reports = policy_lib.learn(
      policy, fetch(run_, policy), work.round, config.updates
    )
    put(run_, policy, state)
  work.values.update(report.summarize(work.round, reports, policy.samples))


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
  """Wall seconds of a block, written into a dict."""

  def __init__(self, seconds: dict[str, float], phase: str):
    self._seconds, self._phase = seconds, phase

  def __enter__(self) -> None:
    self._start = time.perf_counter()

  def __exit__(self, *unused) -> None:
    self._seconds[self._phase] = time.perf_counter() - self._start
