"""The decoder against the reference implementation, and against itself."""

import dataclasses
import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax.model import cache as cache_lib
from mrl_jax.model import hf, transformer

GOLDEN = pathlib.Path(__file__).parent / "golden"
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
PROMPT, GROUP, STEPS = 7, 2, 6
LENGTHS = (7, 3, 1)

# These programs run once: most of the time would go into optimising them.
jit = functools.partial(
  jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


@functools.cache
def golden(name):
  """Model, parameters, and the fixture's arrays."""
  return *hf.load(GOLDEN / name), np.load(GOLDEN / name / "logits.npz")


@functools.cache
def compiled(function):
  return jit(function)


def changed(name, directory, **fields):
  """The golden model `name` under a changed config.json."""
  shutil.copytree(GOLDEN / name, directory, dirs_exist_ok=True)
  path = directory / "config.json"
  config = {**json.loads(path.read_text()), **fields}
  kept = {k: v for k, v in config.items() if v is not None}
  path.write_text(json.dumps(kept))
  return hf.load(directory)


def after(model, params, tokens, prompt):
  """Logits of positions prompt - 1 .. S - 1."""
  lengths = np.full(len(tokens), prompt, np.int32)
  last = np.zeros((len(tokens), 1), np.int32)  # predicts nothing
  rest = np.concatenate([tokens[:, prompt:], last], axis=1)
  hidden = compiled(model.hidden)(params, tokens[:, :prompt], lengths, rest)
  return np.einsum(
    "btd,vd->btv",
    np.asarray(hidden, np.float32),
    np.asarray(model.unembedding(params), np.float32),
  )


def close(got, want, atol=1e-4):
  np.testing.assert_allclose(got, want, atol=atol, rtol=0)


def rows(seed=0):
  """Three prompts of different lengths, two completions of each."""
  rng = np.random.default_rng(seed)
  context = rng.integers(0, 64, (len(LENGTHS), PROMPT))
  tokens = rng.integers(0, 64, (len(LENGTHS) * GROUP, STEPS))
  lengths = np.array(LENGTHS)
  return tuple(x.astype(np.int32) for x in (context, lengths, tokens))


def test_every_family_has_a_fixture():
  families = {
    json.loads((GOLDEN / name / "config.json").read_text())["model_type"]
    for name in CASES
  }
  assert families == {"llama", "mistral", "qwen2", "qwen3"}
  assert (GOLDEN / "llama3" / "model.safetensors.index.json").is_file()


@pytest.mark.parametrize("name", CASES)
def test_logits_match_the_reference(name):
  model, params, fixture = golden(name)
  got = after(model, params, fixture["tokens"], 9)
  close(got, fixture["logits"][:, 8:])


def test_logits_match_from_the_first_position():
  model, params, fixture = golden("mistral")
  close(after(model, params, fixture["tokens"], 1), fixture["logits"])


def test_rope_theta_is_honoured(tmp_path):
  fixture = golden("qwen2")[2]
  found = {}
  for theta in (1e4, 1e6):
    old_spelling = {"rope_parameters": None, "rope_theta": theta}
    model, params = changed("qwen2", tmp_path, **old_spelling)
    found[theta] = after(model, params, fixture["tokens"], 9)
    close(found[theta], fixture[f"logits_theta_{theta:.0e}"][:, 8:])
  assert np.abs(found[1e4] - found[1e6]).max() > 0.1


@pytest.mark.parametrize(
  ("name", "fields"),
  [
    ("llama3", {"rope_parameters": {"rope_theta": 500.0}}),
    ("qwen3", {"use_sliding_window": False, "layer_types": None}),
  ],
)
def test_the_fixtures_tell_options_apart(name, fields, tmp_path):
  fixture = golden(name)[2]
  got = after(*changed(name, tmp_path, **fields), fixture["tokens"], 9)
  assert np.abs(got - fixture["logits"][:, 8:]).max() > 1e-2


def test_padding_changes_nothing():
  model, params, _ = golden("qwen3")
  context, lengths, tokens = rows()
  want = compiled(model.hidden)(params, context, lengths, tokens)
  padding = np.arange(PROMPT) < PROMPT - lengths[:, None]
  other = np.where(padding, 5, context)
  got = compiled(model.hidden)(params, other, lengths, tokens)
  close(got, want, 0)
  alone = context[1:2, -3:], lengths[1:2], tokens[2:4]
  close(compiled(model.hidden)(params, *alone), want[2:4], 1e-5)


def gradient(remat, context, lengths, tokens):
  """Gradients and states of "qwen3" under a rematerialisation policy."""
  model, params, _ = golden("qwen3")
  model = transformer.make(dataclasses.replace(model.spec, remat=remat))

  def loss(params):
    hidden = model.hidden(params, *map(jnp.asarray, (context, lengths, tokens)))
    return jnp.mean(jnp.sin(3 * hidden)), hidden

  return jit(jax.grad(loss, has_aux=True))(params)


def test_gradients_with_shared_and_repeated_prompts_and_remat():
  context, lengths, tokens = rows()
  want, hidden = gradient("none", context, lengths, tokens)
  assert not want.pop("unembedding").any()  # not part of the states
  assert all(np.abs(g).max() > 1e-3 for g in jax.tree.leaves(want))
  same = functools.partial(close, atol=1e-6)
  dots, _ = gradient("dots", context, lengths, tokens)
  jax.tree.map(same, want, {name: dots[name] for name in want})
  context, lengths = (np.repeat(x, GROUP, axis=0) for x in (context, lengths))
  full, states = gradient("full", context, lengths, tokens)
  jax.tree.map(same, want, {name: full[name] for name in want})
  close(states, hidden, 1e-5)


def test_decoding_is_the_forward_pass():
  model, params, _ = golden("qwen3")
  context, lengths, tokens = rows()
  want = compiled(model.hidden)(params, context, lengths, tokens)
  hidden, prompts = jit(model.prefill)(params, context, lengths)
  close(np.repeat(hidden, GROUP, axis=0), want[:, 0], 1e-5)
  cache = filled(prompts, STEPS // 2)
  parts = model.unstack(params)
  everyone = jnp.arange(len(tokens))
  for step in range(STEPS - 1):
    if step == STEPS // 2:
      cache = cache_lib.refit(cache, everyone, STEPS)
    hidden, cache = compiled(model.decode)(parts, tokens[:, step], cache)
    close(hidden, want[:, step + 1], 1e-5)
  assert int(cache.step) == STEPS - 1


def filled(prompts, capacity):
  """A cache that every row has entered."""
  rows_ = jnp.arange(len(LENGTHS) * GROUP)
  cache = cache_lib.empty(prompts, len(rows_), capacity)
  return cache_lib.enter(cache, prompts, rows_ // GROUP, rows_)


def test_bfloat16_is_near_and_decodes_the_same():
  model, params, _ = golden("qwen3")
  half = transformer.make(
    dataclasses.replace(model.spec, compute_dtype="bfloat16")
  )
  assert half.unembedding(params).dtype == jnp.bfloat16
  context, lengths, tokens = rows()
  exact = compiled(model.hidden)(params, context, lengths, tokens)
  got = jit(half.hidden)(params, context, lengths, tokens)
  assert got.dtype == jnp.bfloat16
  assert 1e-5 < _distance(got, exact) < 0.03
  hidden, prompts = jit(half.prefill)(params, context, lengths)
  assert hidden.dtype == prompts.keys.dtype == jnp.bfloat16
  cache, parts = filled(prompts, STEPS), half.unstack(params)
  assert parts["layers"][0]["q"].dtype == jnp.bfloat16
  assert parts["layers"][0]["attention_norm"].dtype == jnp.float32
  hidden, cache = jit(half.decode)(parts, tokens[:, 0], cache)
  assert cache.keys[0].dtype == jnp.bfloat16
  assert _distance(hidden, exact[:, 1]) < 0.03


def _distance(got, want):
  """Root mean square of the difference, over that of what is wanted."""
  got, want = (np.asarray(x, np.float32) for x in (got, want))
  return np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))


def test_tied_models_share_the_embedding():
  tied, untied = golden("smollm2"), golden("llama3")
  assert "unembedding" not in tied[1] and "unembedding" in untied[1]
  np.testing.assert_array_equal(
    tied[0].unembedding(tied[1]), tied[1]["embedding"]
  )
