"""Reads a compiled program's text: what runs, and how often.

XLA's own cost analysis looks at the body of a loop once, so of a model whose
layers are scanned it counts one layer. The text of the compiled program has
the trip count in the loop's condition. `read` gives every instruction with
the number of times that it runs, and the arrays that it takes and makes.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_CALL = re.compile(r"^((?:\([^=]*?\)|\S+)) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\](\{[^}]*\})?")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
  r"(?:calls|to_apply|body|true_computation|false_computation|"
  r"called_computations|branch_computations)=(\{[^}]*\}|%[\w.\-]+)"
)
_CONDITION = re.compile(r"condition=%([\w.\-]+)")
_BODY = re.compile(r"body=%([\w.\-]+)")
_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_INDEX = re.compile(r"index=(\d+)")
_BITS = re.compile(r"\d+")


class Shape(NamedTuple):
  """One array: its element type, its dimensions, where it lies."""

  kind: str  # bf16, f32, s32, pred ...
  dims: tuple[int, ...]
  fast: bool  # on-chip memory, not HBM

  @property
  def size(self) -> int:
    """Elements."""
    return math.prod(self.dims)

  @property
  def bytes(self) -> int:
    found = _BITS.search(self.kind)
    bits = int(found.group()) if found else 8
    return -(-self.size * bits // 8)


class Instruction(NamedTuple):
  """One operation of a computation."""

  name: str
  op: str
  shapes: tuple[Shape, ...]  # what it makes; several for a tuple
  operands: tuple[str, ...]
  text: str  # the whole line


class Module(NamedTuple):
  """A program: its computations by name, each in order."""

  entry: str
  computations: Mapping[str, Mapping[str, Instruction]]


class Step(NamedTuple):
  """An instruction where it runs."""

  instruction: Instruction
  computation: str
  times: int  # how often it runs in one call of the program
  fused: bool  # inside a fusion: its result may never reach a memory


def parse(text: str) -> Module:
  """Reads the text of an HLO module.

  Raises:
    ValueError: for a text without an entry computation.
  """
  entry, current = "", None
  computations: dict[str, dict[str, Instruction]] = {}
  for line in text.splitlines():
    head = _HEAD.match(line)
    if head:
      current = computations.setdefault(head.group(2), {})
      entry = head.group(2) if head.group(1) else entry
    elif current is not None:
      found = _instruction(line)
      if found is not None:
        current[found.name] = found
  if not entry:
    raise ValueError("the text of the program has no ENTRY computation")
  return Module(entry, computations)


def _instruction(line: str) -> Instruction | None:
  found = _LINE.match(line)
  if found is None:
    return None
  name, rest = found.groups()
  call = _CALL.match(re.sub(r"/\*.*?\*/", "", rest))
  if call is None:
    return None
  made, op, tail = call.groups()
  inside = tail[: _close(tail)]
  operands = tuple(_OPERAND.findall(inside))
  return Instruction(name, op, shapes(made), operands, line)


def _close(text: str) -> int:
  """Where the parenthesis closes that was open before the text."""
  depth = 1
  for index, letter in enumerate(text):
    depth += (letter == "(") - (letter == ")")
    if depth == 0:
      return index
  return len(text)


def shapes(text: str) -> tuple[Shape, ...]:
  """The arrays that a type names, in order."""
  return tuple(
    Shape(
      kind,
      tuple(int(size) for size in dims.split(",") if size),
      bool(layout and "S(1)" in layout),
    )
    for kind, dims, layout in _ARRAY.findall(text)
  )


def trips(module: Module, loop: Instruction) -> int | None:
  """How often a while loop runs; None where only the run can tell.

  Some backends write the number down. On others the condition of a counted
  loop compares a counter that starts at 0 with a constant, and the body adds
  another one to it: not 1 where the compiler has unrolled the loop.
  """
  known = _KNOWN.search(loop.text)
  if known:
    return int(known.group(1))
  condition = module.computations[_CONDITION.search(loop.text).group(1)]
  compares = [i for i in condition.values() if i.op == "compare"]
  if len(compares) != 1 or "direction=LT" not in compares[0].text:
    return None
  counter, bound = compares[0].operands
  limit = _constant(condition, bound)
  source = condition.get(counter)
  place = source and _INDEX.search(source.text)
  if limit is None or not place:
    return None
  body = module.computations[_BODY.search(loop.text).group(1)]
  return -(-limit // _stride(body, int(place.group(1))))


def _stride(body: Mapping[str, Instruction], place: int) -> int:
  """What a loop's body adds to its counter."""
  root = next(i for i in body.values() if i.text.lstrip().startswith("ROOT "))
  added = body.get(root.operands[place]) if root.op == "tuple" else None
  if added is None or added.op != "add":
    return 1
  found = [_constant(body, name) for name in added.operands]
  return next((step for step in found if step), 1)


def _constant(within: Mapping[str, Instruction], name: str) -> int | None:
  """The value of a scalar, through copies; None if it is no constant."""
  source = within.get(name)
  while source is not None and source.op in ("copy", "bitcast"):
    source = within.get(source.operands[0])
  found = source and re.search(r" constant\((\d+)\)", source.text)
  return int(found.group(1)) if found else None


def read(module: Module, unknown: int = 1) -> Iterator[Step]:
  """Every instruction with how often it runs.

  Args:
    module: the program.
    unknown: trips of a loop whose number only the run can tell.
  """
  yield from _walk(module, module.entry, 1, False, unknown)


def _walk(module, name, times, fused, unknown) -> Iterator[Step]:
  for instruction in module.computations.get(name, {}).values():
    yield Step(instruction, name, times, fused)
    op = instruction.op
    if op == "while":
      count = trips(module, instruction)
      inner = times * (unknown if count is None else count)
      body = _BODY.search(instruction.text).group(1)
      yield from _walk(module, body, inner, fused, unknown)
    elif op in ("fusion", "call", "conditional") or op.endswith("-start"):
      for called in _called(instruction):
        inside = fused or op == "fusion"
        yield from _walk(module, called, times, inside, unknown)


def _called(instruction: Instruction) -> list[str]:
  if instruction.op.startswith("all-reduce"):
    return []  # its sum, not a program
  found = _CALLED.findall(instruction.text)
  return [name for group in found for name in _OPERAND.findall(group)]
