"""What a compiled program costs one device: arithmetic, traffic, wire, cycles.

All four are sums over the program's instructions times how often each runs
(see `hlo.py`). Arithmetic counts matrix products alone, as a model's own
formula does. A hand-written kernel is opaque to the compiler and is counted
by a formula of whoever calls it.
"""

import collections
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from mrl_jax.parallel import hlo

COLLECTIVES = (
  *("all-gather", "all-reduce", "reduce-scatter"),
  *("all-to-all", "collective-permute"),
)
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_NONE = 2**40  # a number this large is the compiler's way of having none
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_TILED = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
# What makes no array of its own.
_FREE = frozenset(
  (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast"),
    *("while", "conditional", "call", "partition-id", "after-all"),
    *("copy-done", "slice-done", "call-done", "collective-permute-done"),
  )
)


class Moved(NamedTuple):
  """An array that a collective moves."""

  kind: str
  shape: hlo.Shape  # the largest that it takes or makes, on one device
  group: int  # devices that take part
  times: int
  bytes: int  # that one device receives, all times together


class Cost(NamedTuple):
  """Of one call of a program, on one device."""

  flops: int  # of matrix products
  bytes: int  # read from and written to HBM
  cycles: int  # the compiler's own estimate
  moved: tuple[Moved, ...]
  kernels: int  # calls of hand-written kernels, which the others leave out

  @property
  def wire(self) -> int:
    """Bytes that one device receives."""
    return sum(moved.bytes for moved in self.moved)

  def by_kind(self) -> dict[str, int]:
    """The same by kind of collective."""
    out: collections.Counter[str] = collections.Counter()
    for moved in self.moved:
      out[moved.kind] += moved.bytes
    return dict(out)


def measure(module: hlo.Module, devices: int, unknown: int = 1) -> Cost:
  """The cost of one call.

  Args:
    module: the compiled program.
    devices: that it runs on, for collectives of all of them.
    unknown: trips of loops whose number only the run can tell.
  """
  flops = traffic = cycles = kernels = 0
  moved: list[Moved] = []
  for step in hlo.read(module, unknown):
    instruction, times = step.instruction, step.times
    within = module.computations[step.computation]
    if instruction.op in ("convolution", "dot"):
      flops += times * products(instruction, within)
    kind = instruction.op.removesuffix("-start")
    if kind in COLLECTIVES:
      moved.append(_moved(kind, instruction, within, devices, times))
    if step.fused:
      continue
    kernels += times * ("tpu_custom_call" in instruction.text)
    found = _CYCLES.search(instruction.text)
    estimate = int(found.group(1)) if found else 0
    cycles += times * estimate if estimate < _NONE else 0
    if instruction.op not in _FREE:
      traffic += times * _traffic(instruction, within, module)
  return Cost(flops, traffic, cycles, tuple(moved), kernels)


def vocabulary_arrays(
  cost: Cost, vocab: int, width: int, ways: Iterable[int]
) -> list[Moved]:
  """Collectives that move an array of tokens by vocabulary.

  The embedding itself, [V, D] or a part of it, may move.

  Args:
    cost: of a program.
    vocab: V.
    width: D.
    ways: into how many parts either may be cut.
  """
  cuts = sorted({1, *ways})
  sizes = {vocab // way for way in cuts}
  tables = {width // way for way in cuts}
  return [
    moved
    for moved in cost.moved
    for last in sizes & {*moved.shape.dims}
    if last > width and moved.shape.size // last not in {1, *tables}
  ]


def products(
  instruction: hlo.Instruction, within: Mapping[str, hlo.Instruction]
) -> int:
  """Floating-point operations of a matrix product or convolution.

  2 (output batch x features) (input features) times the pairs of output and
  kernel positions that meet: XLA writes batched products for TPUs as
  convolutions, in which few of those pairs do.
  """
  left, right = (within[name].shapes[0] for name in instruction.operands[:2])
  out = instruction.shapes[0]
  if instruction.op == "dot":
    found = _CONTRACTED.search(instruction.text)
    axes = [int(axis) for axis in found.group(1).split(",") if axis]
    return 2 * out.size * math.prod(left.dims[axis] for axis in axes)
  left_is, right_is, out_is = _LABELS.search(instruction.text).groups()
  total = 2 * out.dims[out_is.index("b")] * out.dims[out_is.index("f")]
  total *= right.dims[right_is.index("i")]
  windows = _windows(instruction.text)
  for axis in filter(str.isdigit, out_is):
    total *= _pairs(
      out.dims[out_is.index(axis)],
      right.dims[right_is.index(axis)],
      left.dims[left_is.index(axis)],
      {name: values[int(axis)] for name, values in windows.items()},
    )
  return total


def _windows(text: str) -> dict[str, list[tuple[int, ...]]]:
  """For each attribute of the window its numbers along each dimension."""
  found = _WINDOW.search(text)
  parts = found.group(1).split() if found else []
  out = {}
  for part in parts:
    name, values = part.split("=")
    if name != "rhs_reversal":
      out[name] = [
        tuple(int(n) for n in value.split("_")) for value in values.split("x")
      ]
  return out


def _pairs(out: int, kernel: int, length: int, window) -> int:
  """Pairs (output, kernel) that meet a real input."""
  stride = window.get("stride", (1,))[0]
  low = window.get("pad", (0, 0))[0]
  grown = window.get("lhs_dilate", (1,))[0]
  spread = window.get("rhs_dilate", (1,))[0]
  last = (length - 1) * grown
  return sum(
    1
    for o, k in itertools.product(range(out), range(kernel))
    for at in (o * stride + k * spread - low,)
    if 0 <= at <= last and at % grown == 0
  )


def _moved(kind, instruction, within, devices, times) -> Moved:
  taken = [
    s for n in instruction.operands if n in within for s in within[n].shapes
  ]
  made = instruction.shapes
  group = _group(instruction.text, devices)
  size_in = sum(shape.bytes for shape in taken)
  rest = (group - 1) / group
  received = {
    "all-gather": size_in * (group - 1),
    "all-reduce": 2 * size_in * rest,
    "reduce-scatter": size_in * rest,
    "all-to-all": size_in * rest,
    "collective-permute": size_in,
  }[kind]
  largest = max((*taken, *made), key=lambda shape: shape.bytes)
  return Moved(kind, largest, group, times, round(received) * times)


def _group(text: str, devices: int) -> int:
  """How many devices take part in a collective, together."""
  if found := _LISTED.search(text):
    return len(found.group(1).split(","))
  if found := _TILED.search(text):
    return int(found.group(1))
  if found := _NAMED.search(text):
    sizes = dict(part.split("=") for part in found.group(1).split(","))
    names = [name.split(":")[0] for name in found.group(2).split(",")]
    return math.prod(int(sizes[name.strip()]) for name in names)
  return devices


def _traffic(instruction, within, module: hlo.Module) -> int:
  """Bytes between HBM and the chip; what is sliced counts as its slice."""
  if instruction.op == "dynamic-update-slice":  # in place
    update = within[instruction.operands[1]]
    return 2 * sum(shape.bytes for shape in update.shapes)
  if instruction.op in ("copy-start", "slice-start"):
    ends = instruction.shapes[:2]  # the source, or its part, and the target
    moved = min(shape.bytes for shape in ends)
    return moved * sum(not shape.fast for shape in ends)
  called = None
  if instruction.op == "fusion":
    name = re.search(r"calls=%([\w.\-]+)", instruction.text).group(1)
    called = module.computations[name]
  total = 0
  for number, name in enumerate(instruction.operands):
    source = within.get(name)
    if source is None or source.op == "tuple":
      continue
    whole = sum(shape.bytes for shape in source.shapes if not shape.fast)
    total += min(whole, _read(called, number)) if called else whole
  if instruction.op in ("dynamic-slice", "slice", "gather"):
    total = 0
  made = sum(shape.bytes for shape in instruction.shapes if not shape.fast)
  return total + (min(made, _written(called)) if called else made)


def _read(called: Mapping[str, hlo.Instruction], number: int) -> int | float:
  """Bytes that a fusion reads of its operand, where it only slices it."""
  for inner in called.values():
    if inner.op == "parameter" and f"parameter({number})" in inner.text:
      users = [u for u in called.values() if inner.name in u.operands]
      if users and all(_slices(user, inner.name) for user in users):
        return sum(_sliced(user, called) for user in users)
  return math.inf


def _slices(user: hlo.Instruction, name: str) -> bool:
  if user.op in ("dynamic-slice", "slice", "gather"):
    return user.operands[0] == name
  return user.op == "dynamic-update-slice" and user.operands[0] == name


def _sliced(user: hlo.Instruction, called) -> int:
  if user.op == "dynamic-update-slice":
    return 0  # written in place
  return sum(shape.bytes for shape in user.shapes)


def _written(called: Mapping[str, hlo.Instruction]) -> int | float:
  """Bytes that a fusion writes, where it only writes slices in place."""
  root = next(
    (i for i in called.values() if i.text.lstrip().startswith("ROOT ")), None
  )
  parts = [root]
  if root is not None and root.op == "tuple":
    parts = [called[name] for name in root.operands]
  if root is None or not any(p.op == "dynamic-update-slice" for p in parts):
    return math.inf
  total = 0
  for part in parts:
    update = part.op == "dynamic-update-slice"
    source = called[part.operands[1]] if update else part
    total += sum(shape.bytes for shape in source.shapes)
  return total
