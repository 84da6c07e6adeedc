"""Tiny policies on disk and whole runs in subprocesses, for tests."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax

from experiments import tasks, tokenizers, warmstart
from mrl_jax import config as config_lib
from mrl_jax.exchange import store
from mrl_jax.model import hf, transformer
from mrl_jax.model import spec as spec_lib
from mrl_jax.tasks import dataset
from mrl_jax.text import tokenizer as tokenizer_lib
from mrl_jax.train import checkpoint, loop, metrics, placement, turn
from mrl_jax.train import policy as policy_lib

ROOT = pathlib.Path(__file__).parent.parent
TINY = dataclasses.replace(
  warmstart.Recipe(), width=16, layers=1, heads=2, kv_heads=1, mlp=32
)


def policy(directory: pathlib.Path, kind: str, seed: int = 0) -> str:
  """A random policy of a few thousand weights, as a directory."""
  tokenizers.write(directory, warmstart.KINDS[kind]())
  tokenizer = tokenizer_lib.load(str(directory))
  config = warmstart.model_config(tokenizer, TINY)
  model = transformer.make(spec_lib.from_config(config))
  params = model.init(jax.random.key(seed))
  hf.save(model, params, str(directory), source_directory=str(directory))
  return str(directory)


def learned(*kinds: str) -> list[str]:
  """The policies that come with the package."""
  return [str(ROOT / "experiments" / "assets" / kind) for kind in kinds]


def same(left: pathlib.Path, right: pathlib.Path) -> None:
  """Two runs left the same logs, but for times, and the same policies."""
  for name in ("metrics", "updates", "rollouts", "exchange"):
    name = f"{name}.jsonl"
    assert (left / name).read_bytes() == (right / name).read_bytes(), name
  policies = sorted(path.name for path in (left / "export").iterdir())
  assert policies == sorted(path.name for path in (right / "export").iterdir())
  for policy in policies:
    name = f"export/{policy}/model.safetensors"
    assert (left / name).read_bytes() == (right / name).read_bytes(), name


def command(workdir: pathlib.Path, paths: list[str], **flags) -> list[str]:
  """The arguments of a short run."""
  values = {
    "workdir": workdir,
    "policies": ",".join(paths),
    "task_args": '{"max_operations": 1}',
    "rounds": 6,
    "prompts": 4,
    "samples": 4,
    "completion_limit": 6,
    "lr": 0.01,
    "save_every": 2,
    "progress": "plain",
    **flags,
  }
  pairs = [f"--{name}={value}" for name, value in values.items()]
  return [sys.executable, "-m", "experiments.run", *pairs]


def environment() -> dict[str, str]:
  """One plain CPU device, whatever this process emulates.

  Runs of one test session share what XLA compiled: the same program is
  compiled once, and most of a short run's time is that.
  """
  return {
    **os.environ,
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
  }


def start(arguments: list[str], **variables: str) -> subprocess.Popen:
  return subprocess.Popen(
    arguments,
    cwd=ROOT,
    env=environment() | variables,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def run(arguments: list[str]) -> subprocess.CompletedProcess:
  return subprocess.run(
    arguments,
    cwd=ROOT,
    env=environment(),
    capture_output=True,
    text=True,
    check=False,
  )


def train(
  config: config_lib.Config, store_: store.Store
) -> tuple[dict[str, list[dict]], turn.States]:
  """A whole run in this process; its metrics by policy, and final states."""
  workdir = pathlib.Path(config.workdir)
  shares = placement.shares(config, jax.device_count())
  meshes = placement.meshes(config, shares)
  task = tasks.load(config)
  built = [policy_lib.build(config, n, mesh) for n, mesh in enumerate(meshes)]
  with (
    tasks.pool(config, task) as pool,
    checkpoint.Checkpoints(workdir / "checkpoints", 1) as checkpoints,
  ):
    states, _ = loop.run(
      config,
      [policy for policy, _ in built],
      {policy.name: state for policy, state in built},
      dataset.Order(task, config.seed),
      pool,
      store_,
      lambda state: metrics.Log(workdir, state=state),
      checkpoints,
      turn.Hooks(*(lambda *_: None,) * 3),
    )
  found: dict[str, list[dict]] = {}
  for record in metrics.read(workdir / "metrics.jsonl"):
    found.setdefault(record["policy"], []).append(record)
  return found, states
