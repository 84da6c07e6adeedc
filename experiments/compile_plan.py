"""Several policies on one slice: apart, and taking turns.

From the estimates of each alone on the whole slice, the planner of the run
divides the devices; each policy is then compiled on its share. Beside it
stands what they take if they take turns, where every device holds the state
of all.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax

from mrl_jax import config as config_lib
from mrl_jax.parallel import allocate, chips
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.train import ahead, forecast

GIB = 2**30


class Turns(NamedTuple):
  """All policies on all devices, one after the other; bytes on one device."""

  resident: int
  transient: int  # the largest of any program
  seconds: float  # of a round

  @property
  def total(self) -> int:
    """At the worst moment."""
    return self.resident + self.transient


class Share(NamedTuple):
  """One policy on its own devices."""

  name: str
  devices: int
  bytes: int  # on one device, at the worst moment; or what was asked for
  seconds: float  # of a round; 0 if it does not fit
  fits: bool


class Plan(NamedTuple):
  """Both ways."""

  turns: Turns
  turns_fit: bool
  allocation: allocate.Allocation
  shares: tuple[Share, ...]  # empty where they cannot be apart

  @property
  def fits(self) -> bool:
    """Whether at least one of them does."""
    apart = bool(self.shares) and all(share.fits for share in self.shares)
    return self.turns_fit or apart


def make(
  config: config_lib.Config,
  policies: Sequence[tuple[ahead.Policy, Sequence[forecast.Forecast]]],
  devices: Sequence[jax.Device],
  chip: chips.Chip,
  wanted: Collection[str] | None = None,
  tell: Callable[[str], None] = lambda _: None,
) -> Plan:
  """Plans from the forecasts of each policy alone on all devices.

  Args:
    config: of the run.
    policies: each with the forecasts of its programs.
    devices: of the slice.
    chip: each of them.
    wanted: the programs that are compiled; None is all.
    tell: hears what is being compiled.
  """
  states = [_resident(policy, results) for policy, results in policies]
  turns = Turns(
    sum(states),
    max(
      r.memory.total - state
      for (_, results), state in zip(policies, states, strict=True)
      for r in results
    ),
    sum(_seconds(results) for _, results in policies),
  )
  costs = [
    _cost(config, policy, results, state, len(devices))
    for (policy, results), state in zip(policies, states, strict=True)
  ]
  allocation = allocate.plan(costs, len(devices), chip.memory, even=True)
  shares = ()
  if allocation.mode == "partition":
    shares = tuple(
      _shares(config, policies, devices, chip, allocation, wanted, tell)
    )
  return Plan(turns, turns.total <= chip.memory, allocation, shares)


def _resident(policy, results) -> int:
  """Parameters, optimiser, and whatever else stays between programs."""
  initial = min(r.memory.beside for r in results)
  return policy.parameter_bytes + policy.optimizer_bytes + initial


def _seconds(results: Sequence[forecast.Forecast]) -> float:
  return sum(r.program.calls * r.seconds for r in results)


def _cost(config, policy, results, state: int, devices: int) -> allocate.Cost:
  seconds = {r.program.name: r.program.calls * r.seconds for r in results}
  working = max(r.memory.total for r in results) - state
  tensor = max(1, config.mesh[2])
  return allocate.Cost(
    name=policy.name,
    generate=seconds.get("prefill", 0.0) + seconds.get("decode", 0.0),
    score=seconds.get("score", 0.0),
    update=seconds.get("update", 0.0),
    devices=devices,
    tensor=tensor,
    resident_bytes=state * devices,
    working_bytes=working * devices,
    rows=config.prompts // config.updates // config.microbatches,
  )


def _shares(config, policies, devices, chip, allocation, wanted, tell):
  start = 0
  for number, ((policy, _), count) in enumerate(
    zip(policies, allocation.devices, strict=True)
  ):
    mine = devices[start : start + count]
    start += count
    tensor = max(1, config.mesh[2])
    mesh = mesh_lib.make(1, -1, tensor, devices=mine)
    planned = ahead.plan(config, number, policy.spec, mesh)
    results = forecast.compile_all(planned, chip, count, wanted, tell)
    done = [r for r in results if isinstance(r, forecast.Forecast)]
    refused = [r for r in results if isinstance(r, forecast.TooLarge)]
    fits = not refused
    most = max((r.memory.total for r in done), default=0)
    asked = max((r.bytes for r in refused), default=most)
    yield Share(
      policy.name, count, asked, _seconds(done) if fits else 0.0, fits
    )


def text(plan: Plan, chip: chips.Chip) -> str:
  """What a reader wants to know."""
  turns, has = plan.turns, chip.memory / GIB
  lines = [
    f"\ntaking turns: all states {turns.resident / GIB:.2f} GiB, and "
    f"{turns.transient / GIB:.2f} GiB of whoever works: "
    f"{turns.total / GIB:.2f} of {has:.2f} GiB on each device, "
    + ("fits" if plan.turns_fit else "does not fit (--offload keeps one state)")
    + f"; {turns.seconds:.3g} s a round (estimate)",
    plan.allocation.reason,
  ]
  for share in plan.shares:
    lines.append(
      f"apart: {share.name} on {share.devices} devices: "
      f"{share.bytes / GIB:.2f} of {has:.2f} GiB, "
      + (
        f"fits; {share.seconds:.3g} s a round (estimate)"
        if share.fits
        else "does not fit"
      )
    )
  return "\n".join(lines)


def record(plan: Plan) -> dict[str, Any]:
  """The same as JSON values."""
  return {
    "turns": {**plan.turns._asdict(), "fits": plan.turns_fit},
    "allocation": plan.allocation._asdict(),
    "shares": [share._asdict() for share in plan.shares],
  }
