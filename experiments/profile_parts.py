"""Which part of a step an instruction of a compiled program belongs to.

The text of a program says of most instructions which functions the source
was in when they were traced, the backward pass included: it carries the
frames of the forward pass. So a part is a list of places in the source, and
no scope has to be written there. An instruction that the compiler made of
several is told by its matrix product, else by its own frames, else by those
of what it was made of.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from mrl_jax.parallel import costs, hlo

FORWARD, AGAIN, BACKWARD = "forward", "again", "backward"
REST = "the rest"
_FEED, _PROJECT = "feed-forward", "projections"
_LOGITS = "unembedding and softmax"
_LOSS = "losses and diagnostics"
# The first that holds for any frame counts: (file, function, part).
_PLACES = (
  ("kernels/logprobs.py", "", _LOGITS),
  ("kernels/lookup.py", "", "embedding"),
  ("sampling/draws.py", "", "drawing"),
  ("kernels/support.py", "", "drawing"),
  ("model/attention.py", "", "attention"),
  ("model/flash.py", "", "attention"),
  ("model/flash_decode.py", "", "attention"),
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
  """A frame and its callers; the outermost is its own parent, or has none."""
  seen = set()
  while number in frames and number not in seen:
    seen.add(number)
    yield where[_number("file_location_id", frames[number])]
    found = re.search(r"parent_frame_id=(\d+)", frames[number])
    number = int(found.group(1)) if found else None


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
    instruction = within[name]
    inner = list(self._inner(instruction))
    made = [(instruction, within), *inner]
    products = [pair for pair in made if pair[0].op in _PRODUCTS]
    flops = sum(costs.products(*pair) for pair in products)
    for found, around in (*products, *made[:1], *reversed(inner)):
      frames = self._frames(found)
      part = part_of(frames)
      if part is not None:
        part = _FEED if self._feeds(found, around, part) else part
        return Place(part, _run(found.text, frames), flops)
    return Place(REST, _run(instruction.text, ()), flops)

  def _inner(self, instruction: hlo.Instruction):
    if instruction.op != "fusion":
      return
    called = re.search(r"calls=%([\w.\-]+)", instruction.text).group(1)
    computation = self._module.computations[called]
    for found in computation.values():
      yield found, computation
      yield from self._inner(found)

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
