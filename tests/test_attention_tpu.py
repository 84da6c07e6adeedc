"""The TPU's own compiler takes the attention kernels, where there is no TPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from mrl_jax.model import cache as cache_lib
from mrl_jax.model import spec as spec_lib
from mrl_jax.model import transformer
from mrl_jax.parallel import chips, sharding
from mrl_jax.parallel import mesh as mesh_lib

pytest.importorskip("libtpu", reason="libtpu, the TPU's compiler, is absent")

SLOTS, PROMPT, STEPS, GROUP = 8, 8, 40, 2
CONFIG = {
  "model_type": "llama",
  "hidden_size": 128,
  "intermediate_size": 128,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 64,
  "vocab_size": 128,
  "rms_norm_eps": 1e-5,
  "rope_theta": 1e4,
  "tie_word_embeddings": True,
}


@pytest.fixture(autouse=True)
def nothing_kept():
  """Programs for a TPU cannot be read back where there is none."""
  name = "jax_persistent_cache_min_compile_time_secs"
  before = getattr(jax.config, name)
  jax.config.update(name, 1e9)
  yield
  jax.config.update(name, before)


@functools.cache
def mesh():
  return mesh_lib.make(2, 2, 2, devices=chips.devices("v5e:2x4"))


def placed(shape, axes, kind=jnp.int32):
  target = NamedSharding(mesh(), sharding.spec(axes, shape, mesh()))
  return jax.ShapeDtypeStruct(shape, kind, sharding=target)


def model():
  spec = spec_lib.from_config(CONFIG)
  made = transformer.make(
    dataclasses.replace(
      spec, compute_dtype="bfloat16", remat="attention", attention="pallas"
    )
  )
  return made, jax.eval_shape(made.init, jax.random.key(0))


def calls(program):
  return [x for x in program.splitlines() if "tpu_custom_call" in x]


def text(function, *shapes):
  """The compiled program of one device."""
  with jax.set_mesh(mesh()):
    return jax.jit(function).lower(*shapes).compile().as_text()


def test_the_gradient_compiles_and_runs_each_forward_kernel_once():
  made, shapes = model()
  params = jax.tree.map(
    lambda x, axes: placed(x.shape, axes, x.dtype), shapes, made.axes
  )

  def loss(*data):
    return jnp.sum(made.hidden(*data).astype(jnp.float32))

  prompts = SLOTS // GROUP
  program = text(
    jax.grad(loss),
    params,
    placed((prompts, PROMPT), ("batch", None)),
    placed((prompts,), ("batch",)),
    placed((SLOTS, STEPS), ("batch", None)),
  )
  # Of the prompts and of the completions, in the one scan over the layers.
  for phase in ("fwd", "dq", "dkv"):
    found = [x for x in calls(program) if f"splash_mha_{phase}" in x]
    assert len(found) == 2, phase


def test_a_step_of_decoding_compiles():
  made, shapes = model()
  params = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
    jax.eval_shape(made.unstack, shapes),
  )
  kv = (SLOTS, CONFIG["num_key_value_heads"], PROMPT + STEPS, 64)
  layer = placed(kv, ("batch", "kv_heads", None, None), jnp.bfloat16)
  cache = cache_lib.Cache(
    (layer,) * 2,
    (layer,) * 2,
    placed((SLOTS, PROMPT), ("batch", None)),
    placed((SLOTS,), ("batch",)),
    placed((), ()),
  )
  program = text(made.decode, params, placed((SLOTS,), ("batch",)), cache)
  assert (
    sum("/decode" in line for line in calls(program))
    == CONFIG["num_hidden_layers"]
  )
  # It reads the cache where it lies, of which a device has a part.
  part = f"bf16[2,1,{PROMPT + STEPS},64]"
  assert part in program
  assert not [x for x in program.splitlines() if part in x and " copy(" in x]
