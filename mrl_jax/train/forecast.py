"""What a compiler says of a policy's programs: memory, time, and what limits.

Each program is compiled for its mesh and read. Memory is exact: the compiler
places every buffer. Time is an estimate, and says what it is made of: the
compiler's cycles for what it compiled, hand-written kernels at half the peak,
and the wire as if nothing hid it.
"""

import re
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from jax.errors import JaxRuntimeError

from mrl_jax.parallel import chips, costs, hlo
from mrl_jax.train import ahead

_KERNEL_SHARE = 0.5  # of the peak, that we grant to hand-written kernels
_FULL = re.compile(
  r"([\d.]+)([KMGT]?)\)? ?(?:of ([\d.]+)([KMGT]?) hbm|exceeds available HBM)"
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Memory(NamedTuple):
  """Bytes on one device while a program runs."""

  arguments: int
  temporaries: int  # activations, gathered weights, gradients
  results: int  # that do not take an argument's place
  code: int
  beside: int  # what is there and not used

  @property
  def total(self) -> int:
    """All of it together."""
    return sum(self)


class Forecast(NamedTuple):
  """One program on one device; times are seconds of one call."""

  program: ahead.Program
  chip: chips.Chip
  devices: int
  memory: Memory
  cost: costs.Cost
  compiling: float  # seconds that it took here

  @property
  def model_flops(self) -> float:
    """The model's own arithmetic on this device."""
    return self.program.flops / self.devices

  @property
  def flops(self) -> float:
    """What is computed; of hand-written kernels by formula."""
    return self.cost.flops + self.program.kernels / self.devices

  @property
  def ratio(self) -> float:
    """What is computed over the model's own arithmetic."""
    return self.flops / self.model_flops

  @property
  def ideal(self) -> float:
    """Of the model's own arithmetic at the chip's peak."""
    return self.model_flops / self.chip.flops

  @property
  def bound(self) -> float:
    """The roofline: arithmetic, HBM or wire, whichever takes longest."""
    traffic = self.cost.bytes / self.chip.traffic
    return max(self.flops / self.chip.flops, traffic, self.wire)

  @property
  def wire(self) -> float:
    """Of what is received from other devices."""
    return self.cost.wire / self.chip.wire

  @property
  def seconds(self) -> float:
    """The estimate; never below the roofline."""
    kernels = self.program.kernels / self.devices
    kernels /= _KERNEL_SHARE * self.chip.flops
    cycles = self.cost.cycles / self.chip.clock
    return max(cycles + kernels + self.wire, self.bound)

  @property
  def limit(self) -> str:
    """What the roofline is made of."""
    traffic = self.cost.bytes / self.chip.traffic
    sides = {
      "arithmetic": self.flops / self.chip.flops,
      "HBM": traffic,
      "wire": self.wire,
    }
    return max(sides, key=sides.get)


class TooLarge(Exception):
  """A program does not fit; `bytes` is what it asks for on one device."""

  def __init__(self, program: ahead.Program, asked: int, message: str):
    super().__init__(message)
    self.program, self.bytes = program, asked


def compile(program: ahead.Program, chip: chips.Chip, devices: int) -> Forecast:
  """Compiles a program and reads the result.

  Raises:
    TooLarge: it needs more than the devices have.
  """
  start = time.monotonic()
  try:
    compiled = program.lower().compile()
  except JaxRuntimeError as error:
    message = str(error)
    if "RESOURCE_EXHAUSTED" not in message:
      raise
    raise TooLarge(program, _asked(message), message) from None
  seconds = time.monotonic() - start
  found = compiled.memory_analysis()
  memory = Memory(
    found.argument_size_in_bytes,
    found.temp_size_in_bytes,
    found.output_size_in_bytes - found.alias_size_in_bytes,
    found.generated_code_size_in_bytes,
    program.beside,
  )
  cost = costs.measure(hlo.parse(compiled.as_text()), devices)
  forecast = Forecast(program, chip, devices, memory, cost, seconds)
  if memory.total > chip.memory:
    raise TooLarge(program, memory.total, "beside what it does not use")
  return forecast


def compile_all(
  policy: ahead.Policy,
  chip: chips.Chip,
  devices: int,
  wanted: Collection[str] | None = None,
  tell: Callable[[str], None] = lambda _: None,
) -> list[Forecast | TooLarge]:
  """Every program compiled, or what it asked for in vain.

  Args:
    policy: whose programs.
    chip: each of its devices.
    devices: how many.
    wanted: the programs' names; None is all.
    tell: hears what is being compiled.
  """
  out: list[Forecast | TooLarge] = []
  for program in policy.programs:
    if wanted is not None and program.name not in wanted:
      continue
    tell(f"compiling {policy.name} {program.name} ...")
    try:
      out.append(compile(program, chip, devices))
    except TooLarge as error:
      out.append(error)
  return out


def _asked(message: str) -> int:
  """Bytes on one device that a program asked for, from the refusal; 0: none.

  The compiler names them in binary units.
  """
  found = _FULL.search(message)
  return round(float(found.group(1)) * _UNITS[found.group(2)]) if found else 0
