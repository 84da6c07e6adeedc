"""What is compiled is counted, and a run stops compiling."""

import jax
import jax.numpy as jnp

from mrl_jax import config as config_lib
from mrl_jax.exchange import store
from mrl_jax.train import compilations, metrics
from tests import runs


def test_a_program_is_counted_once_for_each_shape():
  @jax.jit
  def doubled(x):
    return 2 * x

  before = len(compilations.names())
  inputs = [jax.device_put(jnp.ones(size)) for size in (3, 4)]
  made = compilations.names()[before:]
  for _ in range(2):
    for x in inputs:
      doubled(x)
  after = list(compilations.names()[before + len(made) :])
  assert after == ["jit(doubled)"] * 2


def train(workdir, paths):
  """A short run; what each of its rounds compiled."""
  config = config_lib.Config(
    workdir=str(workdir),
    policies=tuple(paths),
    task_args='{"min_operations": 3, "max_operations": 3}',
    rounds=3,
    prompts=2,
    samples=(2,),
    shares=(1,) * len(paths),
    completion_limit=8,
    lr=(0.001,),
  )
  runs.train(config, store.Memory())
  counts = {}
  for row in metrics.read(workdir / "timings.jsonl"):
    counts.setdefault(row["round"], set()).add(row["compilations"])
  return [counts[number] for number in range(config.rounds)]


def test_a_run_compiles_in_its_first_round_alone(tmp_path):
  paths = [runs.policy(tmp_path / "char", "char")]
  first, *later = train(tmp_path / "run", paths)
  assert min(first) > 0
  assert later == [{0}] * len(later)
