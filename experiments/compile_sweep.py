"""Which mesh, rematerialisation and microbatches fit, and which are fastest.

Only the update is compiled. More microbatches never make it faster, so of
each mesh and rematerialisation the fewest that fit are kept.
"""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from mrl_jax import config as config_lib
from mrl_jax.model import spec as spec_lib
from mrl_jax.parallel import chips
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.train import ahead, forecast

KNOBS = ("mesh", "remat", "microbatches")


class Candidate(NamedTuple):
  """One way to compile the update, and what came of it."""

  mesh: tuple[int, ...]
  remat: str
  microbatches: int
  result: forecast.Forecast | forecast.TooLarge

  @property
  def fits(self) -> bool:
    """Whether it does."""
    return isinstance(self.result, forecast.Forecast)


def run(
  config: config_lib.Config,
  spec: spec_lib.Spec,
  devices: Sequence[jax.Device],
  knobs: Sequence[str],
) -> list[Candidate]:
  """Those that fit, fastest first; then those that ask for too much.

  Raises:
    ConfigError: for a knob that there is not, or several policies.
  """
  for knob in knobs:
    if knob not in KNOBS:
      raise config_lib.ConfigError(
        "sweep", tuple(knobs), f"allowed: {', '.join(KNOBS)}"
      )
  if len(config.policies) > 1:
    raise config_lib.ConfigError(
      "sweep", tuple(knobs), "takes one policy at a time"
    )
  chip, found = chips.of(devices[0]), []
  for shape in _meshes(config, spec, len(devices), "mesh" in knobs):
    mesh = mesh_lib.make(*shape, devices=devices)
    for remat in _remats(config, "remat" in knobs):
      for count in _counts(config, mesh, "microbatches" in knobs):
        one = _try(config, spec, mesh, remat, count, chip)
        found.append(one)
        if one.fits:
          break
  return sorted(found, key=lambda c: (not c.fits, _order(c)))


def _order(one: Candidate) -> float:
  return one.result.seconds if one.fits else one.result.bytes


def _try(config, spec, mesh, remat, count, chip) -> Candidate:
  changed = dataclasses.replace(config, remat=remat, microbatches=count)
  policy = ahead.plan(changed, 0, dataclasses.replace(spec, remat=remat), mesh)
  shape = tuple(mesh.shape.values())
  told = f"compiling mesh {shape}, remat {remat}, microbatches {count} ..."
  print(told, file=sys.stderr, flush=True)
  try:
    result = forecast.compile(policy.programs[0], chip, mesh.size)
  except forecast.TooLarge as error:
    result = error
  return Candidate(shape, remat, count, result)


def _meshes(config, spec, count: int, all_: bool) -> Iterator[tuple[int, ...]]:
  """Parameters are never kept twice: data is 1; tensor is at most 8."""
  if not all_:
    given = mesh_lib.sizes(*config.mesh, count)
    yield given
    return
  prompts = config.prompts // config.updates
  for tensor in (1, 2, 4, 8):
    rows = count // tensor
    cut = count % tensor == 0 and spec.kv_heads % tensor == 0
    if cut and prompts % rows == 0:
      yield 1, rows, tensor


def _remats(config, all_: bool) -> tuple[str, ...]:
  return spec_lib.REMAT if all_ else (config.remat,)


def _counts(config, mesh, all_: bool) -> Iterator[int]:
  """Microbatches, fewest first, whose prompts spread over the mesh."""
  if not all_:
    yield config.microbatches
    return
  prompts = config.prompts // config.updates
  rows = mesh.shape["data"] * mesh.shape["fsdp"]
  for count in range(1, prompts // rows + 1):
    if prompts % (rows * count) == 0:
      yield count
