"""Small decoders compiled for TPUs that are not here: memory, collectives.

Every number is what the TPU's compiler says of the programs of a run.
"""

import dataclasses
import functools
import importlib.util
import json
import subprocess
import sys

import jax
import pytest

from experiments import compile as compile_lib
from experiments import compile_report, compile_sweep
from mrl_jax import config as config_lib
from mrl_jax.model import catalog
from mrl_jax.parallel import chips, costs
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.train import ahead, forecast

pytestmark = [
  pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, which has the TPU's compiler, is not installed",
  ),
  # A compiler without a TPU cannot read what it has cached.
  pytest.mark.filterwarnings("ignore:Error reading persistent compilation"),
]

TINY = dataclasses.replace(
  catalog.get("qwen3-0.6b"),
  vocab=2048,
  width=256,
  layers=2,
  heads=4,
  kv_heads=2,
  mlp=512,
  compute_dtype="bfloat16",
  attention="pallas",
)


def config(**changes):
  values = {
    "workdir": "unused",
    "policies": ("tiny",),
    "prompts": 8,
    "samples": (4,),
    "prompt_limit": 128,
    "completion_limit": 128,
  }
  return config_lib.Config(**{**values, **changes})


def forecasts(topology, shape, spec=TINY, **changes):
  devices = chips.devices(topology)
  mesh = mesh_lib.make(*shape, devices=devices)
  policy = ahead.plan(config(**changes), 0, spec, mesh)
  chip = chips.of(devices[0])
  found = forecast.compile_all(policy, chip, len(devices))
  return policy, {result.program.name: result for result in found}


# Without rematerialisation and with: what is computed over what must be.
@pytest.mark.parametrize(
  ("topology", "shape", "remat", "most"),
  [("v5e:2x4", (1, 8, 1), "none", 1.15), ("v6e:2x4", (1, 4, 2), "full", 1.40)],
)
def test_training_and_decoding_compile(topology, shape, remat, most):
  # Two microbatches and an unembedding of its own: a sum over devices inside
  # the loop, which not every form of survives the compiler.
  spec = dataclasses.replace(TINY, remat=remat, tied=False)
  policy, found = forecasts(topology, shape, spec, prompts=16, microbatches=2)
  assert set(found) == {"update", "prefill", "decode"}
  tensor = shape[2]
  for result in found.values():
    assert isinstance(result, forecast.Forecast), result
    assert result.memory.total < 2**30
    assert compile_report.logits_that_travel(policy, result) == []
    assert result.seconds >= result.bound >= result.ideal > 0
  update, decode = found["update"], found["decode"]
  assert 0.95 < update.ratio < most
  state = policy.parameter_bytes + policy.optimizer_bytes
  assert update.memory.arguments >= state
  # Parameters and Adam's moments, all of float32, cut as the mesh says.
  assert state == pytest.approx(12 * policy.parameters / 8, rel=0.02)
  assert update.memory.results < 0.1 * state  # the old state is written over
  assert update.cost.kernels > 0
  assert decode.memory.beside == state
  # The weights that decode are whole but for the tensor axis: none is moved.
  moved = sum(decode.cost.by_kind().values())
  assert moved < 2 * policy.parameters / tensor / 10
  assert update.cost.wire < 40 * policy.parameters


def test_what_does_not_fit_says_what_it_asked_for():
  spec = dataclasses.replace(TINY, vocab=2**20, width=4096, tied=False)
  devices = chips.devices("v5e:2x4")
  mesh = mesh_lib.make(8, 1, 1, devices=devices)
  policy = ahead.plan(config(), 0, spec, mesh)
  with pytest.raises(forecast.TooLarge) as refused:
    forecast.compile(policy.programs[0], chips.of(devices[0]), 8)
  assert refused.value.bytes > chips.of(devices[0]).memory


def test_the_command(tmp_path):
  (tmp_path / "model").mkdir()
  spec = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "head_dim": 64,
  }
  (tmp_path / "model" / "config.json").write_text(json.dumps(spec))
  model = str(tmp_path / "model")
  done = subprocess.run(
    [
      *(sys.executable, "-m", "experiments.compile", "--topology=v5e:2x4"),
      *(f"--policy={model},{model}", "--names=a,b", "--mesh=1,-1,1"),
      *("--prompts=16", "--samples=2", "--dtype=bfloat16"),
      *("--prompt_limit=64", "--completion_limit=64"),
      *("--recipe=sgt,prp", f"--out={tmp_path / 'out.json'}"),
      "--programs=prefill,decode",
    ],
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert "taking turns" in done.stdout and "apart: b on 4" in done.stdout
  out = json.loads((tmp_path / "out.json").read_text())
  assert out["fits"] and [s["fits"] for s in out["plan"]["shares"]] == [1, 1]
  rows = [policy["rows"]["samples"] for policy in out["policies"]]
  assert rows == [3, 4]  # a rescue, and as many of a peer's as own ones


def test_a_mistake_is_one_line():
  done = subprocess.run(
    [
      *(sys.executable, "-m", "experiments.compile", "--policy=smollm2-135m"),
      "--topology=v9:2x2",
    ],
    capture_output=True,
    text=True,
  )
  assert done.returncode == 2
  (line,) = [x for x in done.stderr.splitlines() if x.startswith("error:")]
  assert "--topology" in line and "allowed: v5e:2x4" in line


def test_mistakes_name_what_is_allowed():
  with pytest.raises(config_lib.ConfigError, match="compiler refuses"):
    compile_lib.slice_of("v5e:3x3")
  with pytest.raises(config_lib.ConfigError, match=r"one of qwen3-0\.6b"):
    compile_lib.spec(config(policies=("gpt-9",)), 0)
  some = chips.devices("v5e:2x4")
  with pytest.raises(config_lib.ConfigError, match="does not fit 8 devices"):
    compile_lib.mesh_of(config(mesh=(3, 1, 1)), some)
  with pytest.raises(config_lib.ConfigError, match="allowed: mesh, remat"):
    compile_sweep.run(config(), TINY, some, ["lr"])


def test_a_sweep_keeps_the_fewest_microbatches_that_fit(monkeypatch):
  """Temporaries as if they halved with the microbatches."""

  def compile_(program, chip, devices):
    rows = program.lower.keywords["rows"]
    if rows > 8:
      raise forecast.TooLarge(program, rows, "")
    memory = forecast.Memory(0, rows, 0, 0, 0)
    cost = costs.Cost(0, 0, 8 * rows, (), 0)
    return forecast.Forecast(program, chip, devices, memory, cost, 0.0)

  def plan(changed, number, spec, mesh):
    prompts = changed.prompts // changed.microbatches
    lower = functools.partial(int, rows=prompts // mesh.shape["fsdp"])
    program = ahead.Program("update", lower, 1, 0, 0, 0)
    return ahead.Policy("", spec, 0, 0, 0, None, (program,))

  monkeypatch.setattr(forecast, "compile", compile_)
  monkeypatch.setattr(ahead, "plan", plan)
  found = compile_sweep.run(
    config(prompts=32), TINY, chips.devices("v5e:2x4"), ["mesh", "microbatches"]
  )
  tried = [(c.mesh, c.microbatches, c.fits) for c in found]
  # Tensor 4 and 8 would cut two key-value heads.
  assert tried == [
    ((1, 8, 1), 1, True),
    ((1, 4, 2), 1, True),
  ]
  found = compile_sweep.run(
    config(prompts=64), TINY, chips.devices("v5e:2x4"), ["mesh", "microbatches"]
  )
  tried = [(c.mesh, c.microbatches, c.fits) for c in found]
  assert tried == [
    ((1, 8, 1), 1, True),
    ((1, 4, 2), 2, True),
    ((1, 4, 2), 1, False),
  ]


@pytest.mark.parametrize(
  ("topology", "count"),
  [
    ("v4:2x2x2", 8),
    ("v5e:2x4", 8),
    ("v5p:2x2x4", 16),
    ("v6e:4x4", 16),
    ("tpu7x:2x2x1", 8),
  ],
)
def test_devices_are_as_jax_counts_them(topology, count):
  found = chips.devices(topology)
  assert len(found) == count
  assert chips.of(found[0]).name == topology.split(":")[0]
  assert mesh_lib.make(1, -1, 1, found).size == count


def test_the_chips_memory_is_what_the_compiler_says():
  """The table against a refusal, which names it."""
  devices = chips.devices("v6e:2x4")
  mesh = mesh_lib.make(8, 1, 1, devices=devices)
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  huge = jax.ShapeDtypeStruct((2**34,), "float32", sharding=whole)
  with pytest.raises(Exception, match=r"31\.25G"):
    jax.jit(lambda x: (x * 2)[::3]).lower(huge).compile()
  assert chips.of(devices[0]).memory == 31.25 * 2**30
