"""Attention kernels, interpreted, against attention as matrix products."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax.model import attention, flash, flash_decode, transformer
from mrl_jax.model import cache as cache_lib
from mrl_jax.model import spec as spec_lib
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.parallel import sharding

PROMPT, GROUP, STEPS = 5, 2, 7
LENGTHS = (5, 1, 3, 2)
CONFIG = {
  "model_type": "llama",
  "hidden_size": 16,
  "intermediate_size": 16,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 64,
  "vocab_size": 13,
  "rms_norm_eps": 1e-5,
  "rope_theta": 1e4,
  "tie_word_embeddings": True,
}


@functools.cache
def models(remat="none", windows=(), **changes):
  """The same model with plain attention and with interpreted kernels."""
  layers = len(windows) or 1
  config = {**CONFIG, "num_hidden_layers": layers, **changes}
  spec = dataclasses.replace(
    spec_lib.from_config(config), remat=remat, windows=windows
  )
  other = dataclasses.replace(spec, attention="interpret")
  model = transformer.make(spec)
  params = model.init(jax.random.key(0))
  return (model, transformer.make(other)), params


def rows(seed=0):
  rng = np.random.default_rng(seed)
  context = rng.integers(0, 13, (len(LENGTHS), PROMPT))
  tokens = rng.integers(0, 13, (len(LENGTHS) * GROUP, STEPS))
  return tuple(
    jnp.asarray(x, jnp.int32) for x in (context, np.array(LENGTHS), tokens)
  )


def close(got, want):
  atol = 1e-5 * max(1, np.abs(want).max())
  np.testing.assert_allclose(got, want, atol=atol, rtol=0)


def gradients(model, params, data):
  """States and gradients, where the tokens at the end are padding."""
  return _gradients(model.spec)(params, *data)


@functools.cache
def _gradients(spec):
  model = transformer.make(spec)

  def loss(params, *data):
    counted = jnp.arange(STEPS)[None, :] < 2 + jnp.arange(len(data[2]))[:, None]
    hidden = model.hidden(params, *data)
    return jnp.mean(jnp.sin(3 * hidden) * counted[..., None]), hidden

  return jax.jit(jax.grad(loss, has_aux=True))


@pytest.mark.parametrize(
  ("remat", "windows", "changes"),
  [
    ("none", (), {}),
    ("dots", (3,), {"head_dim": 128}),
    ("attention", (3, 0), {"num_key_value_heads": 1}),
  ],
)
def test_states_and_gradients_are_those_of_plain(remat, windows, changes):
  (plain, kernels), params = models(remat, windows, **changes)
  want, hidden = gradients(plain, params, rows())
  got, states = gradients(kernels, params, rows())
  close(states, hidden)
  assert all(np.abs(g).max() > 1e-3 for g in jax.tree.leaves(want))
  jax.tree.map(close, got, want)


def test_eight_devices_compute_what_one_does():
  # Two devices of the tensor axis read one key-value head, and two the other.
  (plain, kernels), params = models()
  want, hidden = gradients(plain, params, rows())
  mesh = mesh_lib.make(1, 2, 4)
  shapes = jax.eval_shape(lambda: params)
  params = jax.device_put(params, sharding.tree(plain.axes, shapes, mesh))
  data = jax.device_put(rows(), sharding.batch(mesh))
  with jax.set_mesh(mesh):
    got, states = gradients(kernels, params, data)
  close(states, hidden)
  jax.tree.map(close, got, want)


def test_prompts_are_filled_in_as_by_plain():
  (plain, kernels), params = models(windows=(3, 0))
  context, lengths, _ = rows()
  want, prompts = jax.jit(plain.prefill)(params, context, lengths)
  got, filled = jax.jit(kernels.prefill)(params, context, lengths)
  close(got, want)
  real = (prompts.positions >= 0)[None, :, None, :, None]
  close(filled.keys * real, prompts.keys * real)
  close(filled.values * real, prompts.values * real)


def test_a_prompt_without_tokens_is_finite():
  (_, kernels), params = models()
  context, lengths, tokens = rows()
  data = context, lengths.at[1].set(0), tokens
  got, states = gradients(kernels, params, data)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves((got, states)))
  want = gradients(kernels, params, rows())[1]
  kept = np.arange(len(tokens)) // GROUP != 1
  close(states[kept], want[kept])


@pytest.mark.parametrize(
  ("length", "want"),
  [(1, (128, 128)), (129, (256, 256)), (300, (384, 128)), (1000, (1024, 512))],
)
def test_lengths_are_whole_blocks(length, want):
  assert flash.block(length) == want


def test_auto_is_the_kernels_on_tpu():
  assert attention.chosen("auto", "tpu") == "pallas"
  assert attention.chosen("auto", "cpu") == "plain"
  assert attention.chosen("plain", "tpu") == "plain"


def decoded(model, params, spoil=False):
  """States of tokens decoded in slots; the ring holds 4 of them.

  Two rows enter at once and write past the end of the ring; two enter three
  steps later, so that theirs lie around it. `spoil` fills what no row wrote.
  """
  context, lengths, tokens = rows()
  prompts = jax.jit(model.prefill)(params, context, lengths)[1]
  cache = cache_lib.empty(prompts, 4, 4)
  if spoil:
    real = (prompts.positions >= 0)[None, :, None, :, None]
    keys, values = (jnp.where(real, x, jnp.nan) for x in prompts[:2])
    prompts = prompts._replace(keys=keys, values=values)
    nothing = tuple(jnp.full_like(x, jnp.nan) for x in cache.keys)
    cache = cache._replace(keys=nothing, values=nothing)
  decode, parts = jax.jit(model.decode), jax.jit(model.unstack)(params)
  slots, states = jnp.arange(4), []
  for step in range(STEPS - 1):
    if step in (0, 3):
      some = slots[:2] + (2 if step else 0)
      cache = cache_lib.enter(cache, prompts, some, some)
    hidden, cache = decode(parts, tokens[:4, step], cache)
    states.append(hidden[: 4 if step >= 3 else 2])
  return states


@pytest.fixture
def small_blocks(monkeypatch):
  """Blocks of four columns, so that prompt and ring are in several."""
  monkeypatch.setattr(flash_decode, "_LANES", 4)
  monkeypatch.setattr(flash_decode, "_COLUMNS", 4)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
  ("windows", "changes"),
  [((), {}), ((3, 0), {"num_key_value_heads": 1})],
)
def test_decoding_is_that_of_plain_and_reads_only_what_is_filled(
  windows, changes
):
  (plain, kernels), params = models(windows=windows, **changes)
  want = decoded(plain, params)
  got = decoded(kernels, params, spoil=True)
  jax.tree.map(close, got, want)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 2, 4)])
def test_eight_devices_decode_what_one_does(shape):
  (plain, kernels), params = models()
  want = decoded(plain, params)
  with jax.set_mesh(mesh_lib.make(*shape)):
    got = decoded(kernels, params)
  jax.tree.map(close, got, want)


def test_blocks_without_a_seen_column_are_not_fetched():
  seen = np.zeros((3, 11), bool)
  seen[0, [5, 10]] = seen[1, 0] = True
  # Columns 0-2, 3-5, 6-8 and 9-10; a turn that repeats a name copies nothing.
  got = flash_decode.turns(jnp.asarray(seen), 3)
  np.testing.assert_array_equal(got, [[1, 1, 1, 3], [0] * 4, [0] * 4])


@pytest.mark.parametrize(
  ("columns", "width", "want"),
  [(100, 2048, 100), (300, 2048, 256), (5000, 256, 1024), (5000, 8192, 128)],
)
def test_blocks_of_a_cache_fit_its_memory(columns, width, want):
  assert flash_decode.block(columns, width) == want


def test_the_backward_pass_recomputes_the_products_it_is_told_to():
  products = {}
  for remat in ("dots", "attention"):
    (model, _), params = models(remat)

    def loss(params, model=model):
      return model.hidden(params, *rows()).sum()

    program = str(jax.make_jaxpr(jax.grad(loss))(params))
    products[remat] = program.count("dot_general")
  # All seven of a layer but the last, for prompts and for completions.
  assert products["attention"] == products["dots"] + 2 * 6
