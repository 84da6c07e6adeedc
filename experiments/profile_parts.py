"""Which part of a step an instruction of a compiled program belongs to.

The text of a program says of most instructions which functions the source
was in when they were traced, the backward pass included: it carries the
frames of the forward pass. So a part is a list of places in the source, and
no scope has to be written there. An instruction that the compiler made of
several is told by its matrix product, else by its own frames, else by those
of what it was made of. One without frames, as a copy into another layout,
goes with what takes its result, or else with what it takes.
"""

import collections
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from mrl_jax.parallel import costs, hlo

FORWARD, AGAIN, BACKWARD = "forward", "again", "backward"
REST = "the rest"
_ATTENTION, _FEED, _PROJECT = "attention", "feed-forward", "projections"
_LOGITS = "unembedding and softmax"
_LOSS = "losses and diagnostics"
# The first that holds for any frame counts: (file, function, part).
_PLACES = (
  ("kernels/logprobs.py", "", _LOGITS),
  ("kernels/lookup.py", "", "embedding"),
  ("sampling/draws.py", "", "drawing"),
  ("kernels/support.py", "", "drawing"),
  ("model/attention.py", "", _ATTENTION),
  ("model/flash.py", "", _ATTENTION),
  ("model/flash_decode.py", "", _ATTENTION),
  ("model/rope.py", "", "norm and rope"),
  ("model/layers.py", "rms_norm", "norm and rope"),
  ("model/layers.py", "_project", _PROJECT),
  ("model/layers.py", "Block.qkv", "norm and rope"),
  ("model/layers.py", "Block.finish", _FEED),
  ("model/transformer.py", "_decode.<locals>.write", "cache"),
  ("model/cache.py", "", "cache"),
  ("model/transformer.py", "_unembedding", _LOGITS),
  ("model/transformer.py", "_unstack", "cast and slice of weights"),
  ("model/transformer.py", "", "layer loop"),
  ("sampling/slots.py", "", "drawing"),
  ("optax/", "", "optimiser"),
  ("transforms/", "", _LOSS),
  ("mrl_jax/losses.py", "", _LOSS),
  ("mrl_jax/diagnostics.py", "", _LOSS),
  ("kernels/", "", _LOSS),
  ("train/update.py", "make.<locals>.update", "optimiser"),
)
PARTS = (*dict.fromkeys(part for *_, part in _PLACES), _FEED, REST)
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_PRODUCTS = ("dot", "convolution")
# What holds arrays of several parts together.
_JOINTS = ("tuple", "while", "conditional", "get-tuple-element", "parameter")


class Frame(NamedTuple):
  """A function that was running when an instruction was traced."""

  file: str
  function: str


class Place(NamedTuple):
  """Where an instruction belongs, and its matrix products' operations."""

  part: str
  run: str  # FORWARD, AGAIN or BACKWARD
  flops: int


def stacks(text: str) -> dict[int, tuple[Frame, ...]]:
  """The frames, innermost first, by the number that instructions name."""
  tables: dict[str, dict[int, str]] = {}
  current = None
  for line in text.splitlines():
    if re.fullmatch(r"\w+(Names|Locations|Frames)", line):
      current = tables.setdefault(line, {})
    elif current is not None and (row := re.match(r"(\d+) (.*)", line)):
      current[int(row.group(1))] = row.group(2)
    else:
      current = None
  files, functions = (
    {number: row.strip('"') for number, row in tables.get(name, {}).items()}
    for name in ("FileNames", "FunctionNames")
  )
  where = {
    number: Frame(
      files[_number("file_name_id", row)],
      functions[_number("function_name_id", row)],
    )
    for number, row in tables.get("FileLocations", {}).items()
  }
  frames = tables.get("StackFrames", {})
  return {number: tuple(_walk(number, frames, where)) for number in frames}


def _number(name: str, row: str) -> int:
  return int(re.search(rf"\b{name}=(\d+)", row).group(1))


def _walk(number, frames, where) -> Iterator[Frame]:
  """A frame and its callers; the text counts parents from 1 and 1 is none."""
  while number in frames:
    yield where[_number("file_location_id", frames[number])]
    number = _number("parent_frame_id", frames[number]) - 1


class Program:
  """A compiled program's instructions by name."""

  def __init__(self, text: str, mlp: int):
    """Takes the program's text and the feed-forward width."""
    self.name = re.match(r"HloModule ([\w.\-]+)", text).group(1)
    self._module, self._stacks, self._mlp = hlo.parse(text), stacks(text), mlp
    self._places: dict[str, Place] = {}
    self._homes = {
      name: home
      for home, computation in self._module.computations.items()
      for name in computation
    }

  def place(self, name: str) -> Place:
    """Of an instruction that runs by itself."""
    if name not in self._places:
      self._places[name] = self._place(name)
    return self._places[name]

  def _place(self, name: str) -> Place:
    home = self._homes.get(name)
    if home is None:
      return Place(REST, FORWARD, 0)
    within = self._module.computations[home]
    flops = sum(
      costs.products(*pair)
      for pair in self._made_of(within[name], within)
      if pair[0].op in _PRODUCTS
    )
    told = (self._told(near, within) for near in self._near(name, within))
    part, run = next(filter(None, told), (REST, FORWARD))
    if flops and self._batched(within[name], within):
      part = _ATTENTION
    return Place(part, run, flops)

  def _batched(self, instruction, within) -> bool:
    """Whether it has products in batches; those with weights are flat."""
    made = self._made_of(instruction, within)
    return any("lhs_batch_dims={0" in found.text for found, _ in made)

  def _near(self, name: str, within) -> Iterator[hlo.Instruction]:
    """The instruction, what takes its result and so on, then what it takes."""
    yield within[name]
    for step in (self._takers(within), lambda found: found.operands):
      waiting, seen = collections.deque([within[name]]), {name}
      while waiting:
        for other in step(waiting.popleft()):
          found = within.get(other)
          if found and other not in seen and found.op not in _JOINTS:
            seen.add(other)
            waiting.append(found)
            yield found

  @staticmethod
  def _takers(within):
    takers = collections.defaultdict(list)
    for name, instruction in within.items():
      for operand in instruction.operands:
        takers[operand].append(name)
    return lambda found: takers[found.name]

  def _told(
    self, instruction: hlo.Instruction, within: Mapping[str, hlo.Instruction]
  ) -> tuple[str, str] | None:
    """Its part and run by the frames that it carries, or what is in it."""
    made = list(self._made_of(instruction, within))
    products = [pair for pair in made if pair[0].op in _PRODUCTS]
    for found, around in (*products, *made[:1], *reversed(made[1:])):
      frames = self._frames(found)
      part = part_of(frames)
      if part is not None:
        part = _FEED if self._feeds(found, around, part) else part
        return part, _run(found.text, frames)
    return None

  def _made_of(self, instruction: hlo.Instruction, within):
    """The instruction itself, then those of its fusion, each with its home."""
    yield instruction, within
    if instruction.op == "fusion":
      called = re.search(r"calls=%([\w.\-]+)", instruction.text).group(1)
      computation = self._module.computations[called]
      for found in computation.values():
        yield from self._made_of(found, computation)

  def _frames(self, instruction: hlo.Instruction) -> tuple[Frame, ...]:
    found = _FRAME.search(instruction.text)
    return self._stacks.get(int(found.group(1)), ()) if found else ()

  def _feeds(self, found, within: Mapping[str, hlo.Instruction], part) -> bool:
    """Whether a projection is one of the feed-forward's."""
    sources = [within[name] for name in found.operands if name in within]
    shapes = [shape for one in (found, *sources) for shape in one.shapes]
    return part == _PROJECT and any(self._mlp in shape.dims for shape in shapes)


def part_of(frames: tuple[Frame, ...]) -> str | None:
  """The part whose place in the source is among the frames."""
  for file, function, part in _PLACES:
    for frame in frames:
      if file in frame.file and function in ("", frame.function):
        return part
  return None


def _run(text: str, frames: tuple[Frame, ...]) -> str:
  found = _OP_NAME.search(text)
  name = found.group(1) if found else ""
  if any(frame.function.startswith("_backward") for frame in frames):
    return BACKWARD
  if "rematted_computation" in name:
    return AGAIN
  return BACKWARD if "transpose(" in name else FORWARD
