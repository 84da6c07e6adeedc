"""What the frozen reference says of right and wrong responses, once.

A potential is trained on a few places of each response, and the states there
never change. So each pair is read by the reference once, its two responses
sharing their prompt, and what is kept is a handful of vectors, which may be
saved: training itself never runs the model.
"""

import functools
import hashlib
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mrl_jax import collate
from mrl_jax.model import transformer
from mrl_jax.parallel import sharding
from mrl_jax.shaping import potential

FRACTIONS = (0.25, 0.5, 0.75)  # of a response's tokens; and all but the last
PLACES = ("1/4", "1/2", "3/4", "whole")
_TOKENS = 1 << 15  # of a call, completion tokens


class Encoded(NamedTuple):
  """A pair in the reference's own tokens."""

  context: Sequence[int]
  chosen: Sequence[int]  # EOS included
  rejected: Sequence[int]


class Features(NamedTuple):
  """Of N pairs, chosen before rejected; at P places, the last prefix last."""

  start: Float[np.ndarray, "N D"]
  means: Float[np.ndarray, "N 2 P D"]
  apart: Bool[np.ndarray, "N P"]  # whether the two prefixes differ


def places(length: int) -> list[int]:
  """Tokens of the prefixes that are looked at; none is the whole response."""
  most = max(length - 1, 0)
  return [min(int(f * length + 0.5), most) for f in FRACTIONS] + [most]


def extract(
  model: transformer.Model,
  params: Any,
  mesh: jax.sharding.Mesh,
  pairs: Sequence[Encoded],
  progress: Callable[[int], None] = lambda done: None,
) -> Features:
  """Reads every pair with the reference.

  Args:
    model: the reference's functions.
    params: its parameters, on the mesh.
    mesh: whose devices share the pairs.
    pairs: in any order.
    progress: told how many are done.
  """
  run = jax.jit(
    functools.partial(_extract, model), out_shardings=sharding.replicated(mesh)
  )
  width, count = model.spec.width, len(FRACTIONS) + 1
  start = np.zeros((len(pairs), width), np.float32)
  means = np.zeros((len(pairs), 2, count, width), np.float32)
  done = 0
  for part, rows in _batches(pairs, mesh):
    leaves = _padded([pairs[i] for i in part], rows)
    with jax.set_mesh(mesh):
      placed = jax.device_put(leaves, sharding.batch(mesh))
      first, later = run(params, *placed)
    start[part] = np.asarray(first)[: len(part)]
    means[part] = np.asarray(later)[: len(part)]
    done += len(part)
    progress(done)
  apart = np.asarray([_apart(pair) for pair in pairs], bool)
  return Features(start, means, apart)


def _extract(
  model: transformer.Model,
  params: Any,
  context: Int[Array, "N P"],
  context_lengths: Int[Array, "N"],
  tokens: Int[Array, "B T"],
  places_: Int[Array, "B places"],
) -> tuple[Float[Array, "N D"], Float[Array, "N 2 places D"]]:
  states = model.hidden(params, context, context_lengths, tokens)
  start, means = potential.summaries(states)
  found = jax.numpy.take_along_axis(means, places_[:, :, None], axis=1)
  return start[::2], found.reshape(-1, 2, *found.shape[1:])


def _batches(pairs, mesh):
  """Numbers of pairs that are padded to the same widths, and of rows."""
  ways = mesh.shape["data"] * mesh.shape["fsdp"]

  def size(pair):
    longest = max(len(pair.chosen), len(pair.rejected))
    return collate.bucket(len(pair.context)), collate.bucket(longest)

  by_size: dict[tuple[int, int], list[int]] = {}
  for number, pair in enumerate(pairs):
    by_size.setdefault(size(pair), []).append(number)
  for (width, steps), numbers in sorted(by_size.items()):
    most = max(_TOKENS // (2 * (steps + width)) // ways, 1) * ways
    for first in range(0, len(numbers), most):
      part = numbers[first : first + most]
      rows = ways * (1 << (-(-len(part) // ways) - 1).bit_length())
      yield part, min(rows, most)


def _padded(pairs: Sequence[Encoded], rows: int):
  full = [pairs[i % len(pairs)] for i in range(rows)]
  context, lengths = collate.left_pad([pair.context for pair in full])
  both = [np.asarray(r, np.int32) for p in full for r in (p.chosen, p.rejected)]
  steps = collate.bucket(max(map(len, both)))
  tokens = collate.right_pad(both, steps, np.int32)
  return context, lengths, tokens, np.asarray([places(len(r)) for r in both])


def _apart(pair: Encoded) -> list[bool]:
  ends = zip(places(len(pair.chosen)), places(len(pair.rejected)), strict=True)
  return [
    tuple(pair.chosen[:one]) != tuple(pair.rejected[:other])
    for one, other in ends
  ]


def digest(pairs: Sequence[Encoded], probe: Float[np.ndarray, "D"]) -> str:
  """What the features of these pairs under this reference are kept as."""
  found = hashlib.sha256(np.round(probe, 3).tobytes())
  found.update(repr(FRACTIONS).encode())
  for pair in pairs:
    found.update(repr([list(map(int, part)) for part in pair]).encode())
  return found.hexdigest()[:16]


def save(found: Features, path: str | os.PathLike[str]) -> None:
  """Writes the features; the file is there whole or not at all."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  new = path.with_suffix(".new.npz")
  np.savez(new, **found._asdict())
  os.replace(new, path)


def load(path: str | os.PathLike[str]) -> Features:
  """Reads what `save` wrote."""
  with np.load(path) as arrays:
    return Features(**arrays)
