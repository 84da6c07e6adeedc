"""Trains one or several policies: the main command.

  python -m experiments.run --flagfile=experiments/flagfiles/quickstart.flags

Started again in the same --workdir it continues from the last checkpoint.
The folder then holds metrics.jsonl, rollouts.jsonl, timings.jsonl, plots,
TensorBoard events, run.flags, and each policy as a Hugging Face directory.
"""

import contextlib
import dataclasses
import json
import os
import pathlib

import jax

from experiments import flags as flags_lib
from experiments import (
  models,
  plots,
  progress,
  samplers,
  stores,
  summary,
  tasks,
)
from mrl_jax import config as config_lib
from mrl_jax import config_files
from mrl_jax.model import hf
from mrl_jax.tasks import dataset
from mrl_jax.train import checkpoint, loop, metrics, placement, turn
from mrl_jax.train import policy as policy_lib


def main() -> int:
  config = flags_lib.config()
  workdir = pathlib.Path(config.workdir).expanduser().absolute()
  config = models.located(dataclasses.replace(config, workdir=str(workdir)))
  _claim(config, workdir)
  if config.cpu_devices:
    jax.config.update("jax_num_cpu_devices", config.cpu_devices)
  shares = placement.shares(config, jax.device_count())
  meshes = placement.meshes(config, shares)
  task = tasks.load(config)
  sampler = samplers.load(config)
  built = [_build(config, n, mesh, sampler) for n, mesh in enumerate(meshes)]
  policies = [policy for policy, _ in built]
  states = {policy.name: state for policy, state in built}
  del built
  order = dataset.Order(task, config.seed)
  tasks.check_prompts(config, task, order, policies)
  finished = False
  with contextlib.ExitStack() as stack:
    pool = stack.enter_context(tasks.pool(config, task))
    checkpoints = stack.enter_context(
      checkpoint.Checkpoints(workdir / "checkpoints", config.keep)
    )
    display = stack.enter_context(
      progress.Progress(
        config.rounds,
        [policy.name for policy in policies],
        mode=config.progress,
        start=checkpoint.round_of(checkpoints.latest() or 0),
      )
    )
    states, finished = loop.run(
      config,
      policies,
      states,
      order,
      pool,
      stores.make(config),
      lambda state: metrics.Log(workdir, state=state),
      checkpoints,
      turn.Hooks(display.phase, display.round, display.message),
    )
  _finish(config, workdir, policies, states, finished)
  return 0


def _claim(config: config_lib.Config, workdir: pathlib.Path) -> None:
  """Writes the configuration, or compares it with the one that is there."""
  path = workdir / "config.json"
  if path.exists() and (workdir / "checkpoints").exists():
    saved = config_files.from_dict(json.loads(path.read_text()))
    config_files.check_resume(saved, config)
  workdir.mkdir(parents=True, exist_ok=True)
  part = path.with_suffix(".part")
  part.write_text(json.dumps(config_files.to_dict(config), indent=2) + "\n")
  os.replace(part, path)
  flags_lib.save(config, workdir / "run.flags")


def _build(config, number, mesh, sampler):
  try:
    return policy_lib.build(config, number, mesh, sampler)
  except (ValueError, OSError) as error:
    if isinstance(error, config_lib.ConfigError):
      raise
    raise config_lib.ConfigError(
      "policies", config.policies[number], str(error)
    ) from None


def _finish(config, workdir, policies, states, finished) -> None:
  if finished and config.export:
    for policy in policies:
      target = workdir / "export" / policy.name
      hf.save(
        policy.actor.model,
        states[policy.name].params,
        target,
        source_directory=policy.actor.directory,
      )
      print(f"{policy.name}: exported to {target}")
  records = metrics.read(workdir / "metrics.jsonl")
  if not records:
    return
  paths = plots.plot(workdir)
  if config.updates > 1:
    paths += plots.plot(workdir, updates=True)
  for path in paths:
    print(f"plot: {path}")
  summary.table(summary.summary(workdir))
  summary.exploration(workdir)
  summary.phases(workdir)


if __name__ == "__main__":
  flags_lib.define()
  flags_lib.run(main)
