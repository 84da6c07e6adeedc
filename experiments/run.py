"""Trains one or several policies: the main command.

  python -m experiments.run --flagfile=experiments/flagfiles/quickstart.flags

Started again in the same --workdir it continues from the last checkpoint.
The folder then holds metrics.jsonl, rollouts.jsonl, timings.jsonl, plots,
TensorBoard events, run.flags, and each policy as a Hugging Face directory.
With --bucket a machine with an empty --workdir continues as well.

Over several processes every host gives the same command, with --coordinator
and, unless that is auto, its own --process_id. The checkpoints must lie where
all see them: in --bucket, or a --workdir that is shared. Process 0 writes the
folder; another keeps the rollouts of its round in --workdir/process_N, which
may be on a disk of its own.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import uuid

import jax

from experiments import (
  compilation,
  models,
  plots,
  progress,
  samplers,
  stores,
  summary,
  tasks,
)
from experiments import flags as flags_lib
from mrl_jax import config as config_lib
from mrl_jax import config_files
from mrl_jax.model import hf
from mrl_jax.parallel import processes
from mrl_jax.tasks import dataset
from mrl_jax.train import bucket as bucket_lib
from mrl_jax.train import checkpoint, loop, metrics, placement, turn
from mrl_jax.train import policy as policy_lib


def main() -> int:
  config = flags_lib.config()
  compilation.keep(config.compilation_cache)
  if config.cpu_devices:
    jax.config.update("jax_num_cpu_devices", config.cpu_devices)
  if config.coordinator:
    processes.start(config.coordinator, config.processes, config.process_id)
  _check_same(config)
  config = models.located(_absolute(config))
  workdir, local = pathlib.Path(config.workdir), _local(config)
  bucket = None
  if config.bucket and processes.leads():
    bucket = bucket_lib.Bucket(config.bucket, workdir)
  _claim(config, workdir, bucket)
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
      checkpoint.Checkpoints(
        bucket_lib.checkpoints(config.bucket, workdir),
        config.keep,
        bucket.push if bucket else lambda *_: None,
      )
    )
    display = stack.enter_context(
      progress.Progress(
        config.rounds,
        [policy.name for policy in policies],
        mode=config.progress if processes.leads() else "none",
        start=checkpoints.needed(),
      )
    )
    states, finished = loop.run(
      local,
      policies,
      states,
      order,
      pool,
      stores.make(config),
      lambda state: _log(workdir, bucket, state),
      checkpoints,
      turn.Hooks(display.phase, display.round, display.message),
    )
  if finished and config.export:
    _export(workdir, policies, states)
  if not processes.leads():
    with contextlib.suppress(OSError):  # where it holds what is not ours
      pathlib.Path(local.workdir).rmdir()
  processes.agreed(lambda: _finish(config, workdir, bucket, finished))
  return 0


def _absolute(config: config_lib.Config) -> config_lib.Config:
  def absolute(path: str) -> str:
    if not path or "://" in path:
      return path
    return os.path.abspath(os.path.expanduser(path))

  return dataclasses.replace(
    config, workdir=absolute(config.workdir), bucket=absolute(config.bucket)
  )


def _local(config: config_lib.Config) -> config_lib.Config:
  """With a folder that no other process writes to, should they share one."""
  if processes.leads():
    return config
  workdir = pathlib.Path(config.workdir) / f"process_{processes.index()}"
  return dataclasses.replace(config, workdir=str(workdir))


def _check_same(config: config_lib.Config) -> None:
  """Processes with other flags would soon wait for each other for ever."""
  others = processes.gathered(lambda: config_files.to_dict(config))
  for name, value in others[0].items():
    if name == "process_id":
      continue
    for number, other in enumerate(others):
      if other[name] != value:
        raise config_lib.ConfigError(
          name, other[name], f"of process {number}; process 0 has {value}"
        )


def _claim(
  config: config_lib.Config,
  workdir: pathlib.Path,
  bucket: bucket_lib.Bucket | None,
) -> None:
  """Writes the configuration, or compares it with the one that is there."""
  found = processes.agreed(lambda: bucket is not None and bucket.fetch())
  if found and processes.leads():
    print(f"the run's files are those of {config.bucket}")
  path = workdir / "config.json"
  saved = processes.agreed(
    lambda: json.loads(path.read_text()) if path.exists() else None
  )
  folder = bucket_lib.checkpoints(config.bucket, workdir)
  if saved is not None:
    saved = config_files.from_dict(saved)
    _check_moved(saved, config, workdir)
    if processes.agreed(folder.exists):
      config_files.check_resume(saved, config)
  processes.agreed(lambda: _write(config, workdir))
  _check_shared(folder)


def _check_moved(saved, config, workdir: pathlib.Path) -> None:
  """Refuses to begin anew where the old checkpoints are in another place."""
  old, new = (
    bucket_lib.checkpoints(c.bucket, workdir) for c in (saved, config)
  )
  there = processes.agreed(
    lambda: [f.exists() and any(f.iterdir()) for f in (old, new)]
  )
  if there == [True, False]:
    raise config_lib.ConfigError(
      "bucket",
      config.bucket,
      f"the checkpoints of the run in --workdir are in {old}; use that, copy "
      f"them to {new}, or use another --workdir",
    )


def _write(config, workdir: pathlib.Path) -> None:
  workdir.mkdir(parents=True, exist_ok=True)
  path = workdir / "config.json"
  part = path.with_suffix(".part")
  part.write_text(json.dumps(config_files.to_dict(config), indent=2) + "\n")
  os.replace(part, path)
  flags_lib.save(config, workdir / "run.flags")


def _check_shared(checkpoints) -> None:
  """All processes must see the checkpoints that they write together."""
  if processes.count() == 1:
    return
  mark = checkpoints.parent / f".seen-{processes.agreed(lambda: uuid.uuid4())}"
  processes.agreed(lambda: mark.parent.mkdir(parents=True, exist_ok=True))
  processes.agreed(mark.touch)
  seen = processes.gathered(mark.exists)
  processes.agreed(mark.unlink)
  if not all(seen):
    raise config_lib.ConfigError(
      "bucket",
      "",
      f"process {seen.index(False)} does not see {checkpoints}, where process "
      "0 writes: name a folder or a URL that all see",
    )


def _log(
  workdir: pathlib.Path,
  bucket: bucket_lib.Bucket | None,
  state: dict[str, int] | None,
) -> metrics.Log:
  if bucket:
    bucket.claim(state)
  return metrics.Log(workdir, state=state, writer=processes.leads())


def _build(config, number, mesh, sampler):
  try:
    return policy_lib.build(config, number, mesh, sampler)
  except (ValueError, OSError) as error:
    if isinstance(error, config_lib.ConfigError):
      raise
    raise config_lib.ConfigError(
      "policies", config.policies[number], str(error)
    ) from None


def _export(workdir: pathlib.Path, policies, states) -> None:
  """All processes send their parts of the parameters; the first writes."""
  for policy in policies:
    target = workdir / "export" / policy.name
    hf.save(
      policy.actor.model,
      states[policy.name].params,
      target,
      source_directory=policy.actor.directory,
    )
    if processes.leads():
      print(f"{policy.name}: exported to {target}")


def _finish(config, workdir, bucket, finished) -> None:
  if bucket and finished:
    bucket.finish()
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
  processes.together(lambda: flags_lib.run(main))
