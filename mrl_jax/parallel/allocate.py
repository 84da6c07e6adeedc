"""How many devices each policy gets: the planner of policies that share them.

Policies that learn from each other meet once a round, so a round takes as
long as its slowest policy. From the measured seconds of each, `plan` divides
the devices so that the slowest is as fast as it can be (`partition`: every
policy has its own). Where there are too few devices for that, or too little
memory on them, the policies take turns on all of them (`inline`).
"""

from collections.abc import Sequence
from typing import NamedTuple

Choice = tuple[int, float]  # a number of devices, the seconds on them
Division = tuple[tuple[float, ...], tuple[int, ...]]  # times, devices


class Cost(NamedTuple):
  """What one round of one policy costs, as measured."""

  name: str
  generate: float  # seconds
  score: float  # seconds
  update: float  # seconds
  devices: int = 1  # on how many the seconds were measured
  tensor: int = 1  # its number of devices is a multiple of this
  resident_bytes: int = 0  # parameters and optimiser state, over all devices
  working_bytes: int = 0  # largest transient of a phase, over all devices
  rows: int = 0  # rows its data axes must divide evenly; 0: any number


class Allocation(NamedTuple):
  """Which policy runs on how many devices."""

  mode: str  # "partition" | "inline"
  devices: tuple[int, ...]  # per policy, in the order of the costs
  seconds: float  # predicted, of a round
  reason: str  # one line for people
  offload: bool = False  # inline: idle policies must leave the devices


def predict(cost: Cost, devices: int, serial: float = 0.0) -> float:
  """Seconds of a round on another number of devices.

  T(g) = (generate + score + update) (serial + (1 - serial) measured / g)

  Amdahl 1967, https://doi.org/10.1145/1465482.1465560.
  """
  total = cost.generate + cost.score + cost.update
  return total * serial + total * (1 - serial) * cost.devices / devices


def plan(
  costs: Sequence[Cost],
  devices: int,
  memory_bytes_per_device: int | None = None,
  serial: float = 0.0,
  even: bool = False,
) -> Allocation:
  """Devices per policy, such that the slowest policy is the fastest it can be.

  Exact: among all divisions that fit, the one with the smallest largest
  time, then the smallest second largest, and so on; then the one with the
  fewest devices; then the one that favours names that sort first. So the
  order of `costs` does not matter. A partition is taken wherever one fits.

  Args:
    costs: One for each policy; names are unique.
    devices: How many there are.
    memory_bytes_per_device: A limit on each policy's resident and working
      bytes, spread evenly over its devices; None for no limit.
    serial: The share of a round that more devices do not speed up.
    even: Only shares that divide the devices: a TPU's compiler takes no
      others.

  Raises:
    ValueError: for a field out of range, and where a policy does not even
      fit alone on all devices.
  """
  _check(costs, devices, memory_bytes_per_device, serial)
  choices = [
    _choices(cost, devices, memory_bytes_per_device, serial, even)
    for cost in costs
  ]
  least = [options[0][0] for options in choices]
  turns = sum(options[-1][1] for options in choices)
  if sum(least) > devices:
    return _inline(costs, devices, memory_bytes_per_device, choices)
  order = sorted(range(len(costs)), key=lambda i: costs[i].name)
  found = _divide([choices[i] for i in order], devices)
  given = [0] * len(costs)
  for i, count in zip(order, found, strict=True):
    given[i] = count
  times = [
    predict(cost, count, serial)
    for cost, count in zip(costs, given, strict=True)
  ]
  slowest = max(order, key=lambda i: times[i])
  reason = (
    f"partition: {_listed(costs, given)} of {devices} devices; "
    f"{costs[slowest].name} is slowest, {times[slowest]:.3g} s a round "
    f"({turns:.3g} s if they took turns)"
  )
  return Allocation("partition", tuple(given), times[slowest], reason)


def _choices(
  cost: Cost, devices: int, memory: int | None, serial: float, even: bool
) -> list[Choice]:
  """Every number of devices that a policy could run on, fewest first."""
  need = cost.resident_bytes + cost.working_bytes
  found = [
    (count, predict(cost, count, serial))
    for count in range(cost.tensor, devices + 1, cost.tensor)
    if not (even and devices % count)
    and (not cost.rows or cost.rows % (count // cost.tensor) == 0)
    and (memory is None or need <= count * memory)
  ]
  if found:
    return found
  if cost.tensor > devices:
    raise ValueError(
      f"{cost.name}: needs a multiple of tensor={cost.tensor} devices, there "
      f"are {devices}"
    )
  raise ValueError(
    f"{cost.name}: needs {_size(need)} (resident and working bytes), and even "
    f"alone finds at most {_size(memory or 0)} on each of {devices} devices "
    f"(of which it uses a multiple of tensor={cost.tensor}"
    + (f" that divides rows={cost.rows})" if cost.rows else ")")
  )


def _divide(choices: list[list[Choice]], devices: int) -> tuple[int, ...]:
  """The best division, by dynamic programming over policies.

  For each number of devices used so far only the best beginning is kept:
  times compared from the largest down, then the devices given. Adding the
  same policy to two beginnings never turns their order round, so this is
  exact, in O(policies devices^2).
  """
  # Negative counts, so that of equal times the first name's larger share wins.
  best: dict[int, Division] = {0: ((), ())}
  for number, options in enumerate(choices):
    after = sum(later[0][0] for later in choices[number + 1 :])
    grown: dict[int, Division] = {}
    for used, (times, given) in best.items():
      for count, seconds in options:
        total = used + count
        if total + after > devices:
          break
        descending = tuple(sorted((*times, seconds), reverse=True))
        candidate = (descending, (*given, -count))
        if total not in grown or candidate < grown[total]:
          grown[total] = candidate
    best = grown
  _, _, given = min((times, n, given) for n, (times, given) in best.items())
  return tuple(-count for count in given)


def _inline(
  costs: Sequence[Cost],
  devices: int,
  memory: int | None,
  choices: list[list[Choice]],
) -> Allocation:
  """Turns on all devices: each on as many as its tensor axis allows."""
  given = [options[-1][0] for options in choices]
  least = [options[0][0] for options in choices]
  seconds = sum(options[-1][1] for options in choices)
  offload = False
  if memory is not None:
    # Devices that all policies use hold everything that is resident.
    shares = list(zip(costs, given, strict=True))
    resident = sum(cost.resident_bytes / count for cost, count in shares)
    working = max(cost.working_bytes / count for cost, count in shares)
    offload = resident + working > memory
  scarce = "" if memory is None else f", with {_size(memory)} on each"
  reason = (
    f"inline: apart, the policies need at least {sum(least)} devices "
    f"({_listed(costs, least)}), there are {devices}{scarce}; they take turns"
    + (", and the idle ones leave the devices" if offload else "")
    + f", {seconds:.3g} s a round"
  )
  return Allocation("inline", tuple(given), seconds, reason, offload)


def _listed(costs: Sequence[Cost], counts: Sequence[int]) -> str:
  pairs = zip(costs, counts, strict=True)
  return ", ".join(f"{cost.name} {count}" for cost, count in pairs)


def _size(count: int) -> str:
  for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
    if count >= unit:
      return f"{count / unit:.1f} {name}"
  return f"{count} B"


def _check(
  costs: Sequence[Cost], devices: int, memory: int | None, serial: float
) -> None:
  if devices < 1:
    raise ValueError(f"devices={devices} must be at least 1")
  if memory is not None and memory < 1:
    raise ValueError(
      f"memory_bytes_per_device={memory} must be positive, or None"
    )
  if not 0 <= serial <= 1:
    raise ValueError(f"serial={serial} must be in [0, 1]")
  if not costs:
    raise ValueError("costs=() must hold at least one policy")
  names = [cost.name for cost in costs]
  if len(set(names)) < len(names):
    raise ValueError(f"names of costs {names} must differ")
  for cost in costs:
    for field, value in cost._asdict().items():
      least = 1 if field in ("devices", "tensor") else 0
      if field != "name" and not least <= value < float("inf"):
        raise ValueError(
          f"{cost.name}: {field}={value} must be finite and at least {least}"
        )
