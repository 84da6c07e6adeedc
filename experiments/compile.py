"""Compiles a run for a TPU that is not here: does it fit, what does it take?

  python -m experiments.compile --topology=v6e:4x4 --policy=qwen3-8b \\
    --dtype=bfloat16 --mesh=1,16,1 --prompts=64 --samples=8 \\
    --prompt_limit=512 --completion_limit=4096 --microbatches=4

From shapes alone, by the TPU's own compiler (libtpu), on any machine: what
one device holds and does in the update, the scoring, the prefill and one
decoded token of every policy. The flags are those of experiments.run, so a
flagfile of a run can be asked as it is; --policy names published models
instead of directories. --sweep tries meshes, rematerialisation and
microbatches. Several policies are planned together, apart and taking turns.
No number here was measured on a TPU: memory is what the compiler places,
times are estimates and say so.
"""

import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags

from experiments import compile_plan, compile_report, compile_sweep
from experiments import flags as flags_lib
from mrl_jax import config as config_lib
from mrl_jax.model import attention, catalog
from mrl_jax.model import spec as spec_lib
from mrl_jax.parallel import chips
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.train import ahead, forecast, placement

PROGRAMS = ("update", "score", "prefill", "decode")


def main() -> int:
  values = flags.FLAGS
  jax.config.update("jax_platforms", "cpu")
  config = _config(values.policy)
  wanted = _among("programs", values.programs, PROGRAMS)
  topology = slice_of(values.topology)
  run = (
    functools.partial(_sweep, knobs=values.sweep)
    if values.sweep
    else (functools.partial(_compile, wanted=wanted))
  )
  out, fits = run(config, topology)
  if values.out:
    record = {"topology": values.topology, "fits": fits, **out}
    pathlib.Path(values.out).write_text(json.dumps(record, indent=1) + "\n")
  return 0 if fits else 1


def _sweep(config, devices, knobs) -> tuple[dict[str, Any], bool]:
  found = compile_sweep.run(config, spec(config, 0), devices, knobs)
  print(compile_report.sweep(found, chips.of(devices[0])))
  out = [compile_report.candidate(one) for one in found]
  return {"sweep": out}, any(one.fits for one in found)


def _compile(config, devices, wanted) -> tuple[dict[str, Any], bool]:
  """Every policy on the whole slice; several of them planned together."""
  chip, mesh = chips.of(devices[0]), mesh_of(config, devices)
  policies, records, fits = [], [], True
  known: dict[Any, list[compile_report.Result]] = {}  # twins cost nothing
  for number in range(len(config.policies)):
    policy = ahead.plan(config, number, spec(config, number), mesh)
    print(compile_report.head(policy, mesh, chip), flush=True)
    recipe, loss = config.of("recipe", number), config.of("loss", number)
    key = policy.spec, policy.rows, recipe, loss
    if key not in known:
      known[key] = forecast.compile_all(
        policy, chip, len(devices), wanted, _tell
      )
    results = known[key]
    print(compile_report.table(policy, results, chip), flush=True)
    policies.append((policy, results))
    fits &= all(isinstance(r, forecast.Forecast) for r in results)
    records.append(compile_report.record(policy, results, chip))
  out: dict[str, Any] = {"mesh": dict(mesh.shape), "policies": records}
  if len(policies) > 1 and fits:
    plan = compile_plan.make(config, policies, devices, chip, wanted, _tell)
    print(compile_plan.text(plan, chip))
    out["plan"] = compile_plan.record(plan)
    fits = plan.fits
  return out, fits


def _config(names: Sequence[str]) -> config_lib.Config:
  """That of the flags; a run's folder and directories are not needed."""
  if names:
    flags.FLAGS.policies = list(names)
  flags.FLAGS.workdir = flags.FLAGS.workdir or "unused"
  return flags_lib.config()


def _among(field: str, given: Sequence[str], allowed) -> tuple[str, ...]:
  for name in given:
    if name not in allowed:
      raise config_lib.ConfigError(
        field, tuple(given), f"allowed: {', '.join(allowed)}"
      )
  return tuple(given)


def slice_of(topology: str) -> list[jax.Device]:
  """Its devices, or a ConfigError."""
  try:
    return chips.devices(topology)
  except (ValueError, ImportError) as error:
    raise config_lib.ConfigError("topology", topology, str(error)) from None


def mesh_of(
  config: config_lib.Config, devices: Sequence[jax.Device]
) -> jax.sharding.Mesh:
  """That of --mesh on the slice, or a ConfigError."""
  try:
    mesh = mesh_lib.make(*config.mesh, devices=devices)
  except ValueError as error:
    raise config_lib.ConfigError("mesh", config.mesh, str(error)) from None
  placement.check_prompts(config, mesh)
  return mesh


def spec(config: config_lib.Config, number: int) -> spec_lib.Spec:
  """The decoder of one policy, as it would be compiled for a TPU."""
  name = config.policies[number]
  path = pathlib.Path(name).expanduser() / "config.json"
  if name in catalog.names():
    found = catalog.get(name)
  elif path.exists():
    found = spec_lib.from_config(json.loads(path.read_text()))
  else:
    raise config_lib.ConfigError(
      "policy",
      name,
      "is neither a directory with a config.json nor one of "
      + ", ".join(catalog.names()),
    )
  return dataclasses.replace(
    found,
    compute_dtype=config.dtype,
    remat=config.remat,
    attention=attention.chosen(config.attention, "tpu"),
  )


def _tell(message: str) -> None:
  print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
  flags_lib.define()
  flags.DEFINE_string(
    "topology",
    "v5e:2x4",
    "GENERATION:SHAPE of the slice, as v5p:4x4x4; generations are v4, v5e, "
    "v5p, v6e, tpu7x.",
  )
  flags.DEFINE_list(
    "policy",
    [],
    "Published models or directories, in the place of --policies: "
    + ", ".join(catalog.names())
    + ".",
  )
  flags.DEFINE_list("programs", list(PROGRAMS), "Which of these to compile.")
  flags.DEFINE_list(
    "sweep",
    [],
    "What to try, of mesh, remat and microbatches; the update alone is "
    "compiled and ranked.",
  )
  flags.DEFINE_string("out", "", "Also write JSON here.")
  flags_lib.run(main)
