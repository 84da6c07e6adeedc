"""Drawing tokens: the exact distribution, keys, stopping, batch layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl_jax import collate
from mrl_jax.kernels import logprobs
from mrl_jax.model import spec as spec_lib
from mrl_jax.model import transformer
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.parallel import sharding
from mrl_jax.sampling import adapter, engine
from mrl_jax.types import Distribution

VOCAB = 37
STOPS = (1, 5)
CONFIG = {
  "model_type": "llama",
  "hidden_size": 16,
  "intermediate_size": 32,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "vocab_size": VOCAB,
  "rms_norm_eps": 1e-5,
  "max_position_embeddings": 512,
  "tie_word_embeddings": True,
  "rope_theta": 1e4,
}


@functools.cache
def policy():
  model = transformer.make(spec_lib.from_config(CONFIG))
  # Large weights, so that the distributions are far from uniform.
  params = jax.tree.map(lambda x: 3 * x, model.init(jax.random.key(0)))
  return model, params


def generator(mesh=(1, 1, 1), allowed=None, **changes):
  model, _ = policy()
  devices = jax.devices()[: int(np.prod(mesh))]
  options = {
    "samples": 2,
    "limit": 40,
    "stop_ids": STOPS,
    "distribution": Distribution(),
    "seed": 3,
  }
  if allowed is None:
    allowed = np.ones(VOCAB, bool)
  return engine.make(
    model,
    mesh_lib.make(*mesh, devices=devices),
    allowed=allowed,
    **{**options, **changes},
  )


def prompts(count=6):
  rng = np.random.default_rng(0)
  return [rng.integers(6, VOCAB, 3 + 5 * i).tolist() for i in range(count)]


def ids(count, samples=2, round_=0):
  rows = [
    engine.words("policy", round_, f"prompt/{i}", s)
    for i in range(count)
    for s in range(samples)
  ]
  return np.asarray(rows, np.uint32)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 400), st.integers(0, 2**32 - 1), st.floats(0, 1 - 2**-23))
def test_invert_cdf_is_the_searchsorted_of_the_running_sum(vocab, seed, u):
  rng = np.random.default_rng(seed)
  p = rng.random((1, vocab)) * (rng.random((1, vocab)) < 0.3)
  p[0, rng.integers(vocab)] += 0.1
  token = int(
    engine.invert_cdf(jnp.float32(p), jnp.full((1,), u, jnp.float32))[0]
  )
  p32 = np.float32(p[0]).astype(np.float64)
  ends = np.cumsum(p32)
  low, high = (ends[token] - p32[token]), ends[token]
  assert p32[token] > 0
  target, slack = np.float32(u) * ends[-1], 1e-5 * ends[-1]
  assert low - slack <= target <= high + slack


def test_draws_have_the_frequencies_of_the_distribution():
  logits = jnp.log(jnp.asarray([0.5, 0.3, 0.2, 0.0]))
  count = 20_000
  u = jax.random.uniform(jax.random.key(1), (count,))
  token, logprob, entropy = engine.draw(jnp.tile(logits, (count, 1)), u)
  frequencies = np.bincount(np.asarray(token), minlength=4) / count
  np.testing.assert_allclose(frequencies, [0.5, 0.3, 0.2, 0.0], atol=0.012)
  np.testing.assert_allclose(
    np.exp(logprob), np.asarray([0.5, 0.3, 0.2])[token], rtol=1e-5
  )
  expected = -sum(p * np.log(p) for p in (0.5, 0.3, 0.2))
  np.testing.assert_allclose(entropy, expected, rtol=1e-5)


def test_no_two_rows_of_a_run_share_a_key():
  names = [
    engine.words(policy_, round_, f"p{i}", sample)
    for policy_ in ("left", "right")
    for round_ in range(3)
    for i in range(4)
    for sample in range(4)
  ]
  keys = engine.row_keys(0, jnp.asarray(names, jnp.uint32))
  assert len(np.unique(jax.random.key_data(keys), axis=0)) == len(names)


def test_completions_end_at_any_stop_id_and_keep_it():
  out = generator()(policy()[1], prompts(), ids(6))
  assert out.finished.any()
  for row in range(12):
    tokens = out.tokens[row, : out.lengths[row]]
    assert not np.isin(tokens[:-1], STOPS).any()
    assert out.finished[row] == (tokens[-1] in STOPS)
    assert out.finished[row] or out.lengths[row] == 40
    assert not out.tokens[row, out.lengths[row] :].any()
    assert not out.logprobs[row, out.lengths[row] :].any()
  assert set(out.tokens[out.finished, out.lengths[out.finished] - 1]) <= set(
    STOPS
  )


def test_a_sample_does_not_depend_on_batch_layout():
  whole = generator()(policy()[1], prompts(), ids(6))
  few = generator(rows=4)(policy()[1], prompts(), ids(6))
  width = min(whole.tokens.shape[1], few.tokens.shape[1])
  np.testing.assert_array_equal(whole.lengths, few.lengths)
  np.testing.assert_array_equal(whole.tokens[:, :width], few.tokens[:, :width])
  backwards = generator()(
    policy()[1], prompts()[::-1], ids(6).reshape(6, 2, -1)[::-1].reshape(12, -1)
  )
  np.testing.assert_array_equal(
    backwards.tokens.reshape(6, 2, -1)[::-1].reshape(12, -1), whole.tokens
  )


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1), (2, 2, 2)])
def test_a_sample_does_not_depend_on_the_devices(shape):
  model, params = policy()
  one = generator()(params, prompts(), ids(6))
  mesh = mesh_lib.make(*shape)
  shapes = jax.eval_shape(lambda: params)
  placed = jax.device_put(params, sharding.tree(model.axes, shapes, mesh))
  many = generator(shape)(placed, prompts(), ids(6))
  np.testing.assert_array_equal(one.tokens, many.tokens)
  np.testing.assert_allclose(one.logprobs, many.logprobs, atol=1e-4)


def test_rounds_and_seeds_change_the_samples_and_repeats_do_not():
  generate = generator()
  first = generate(policy()[1], prompts(), ids(6))
  again = generate(policy()[1], prompts(), ids(6))
  np.testing.assert_array_equal(first.tokens, again.tokens)
  other = generate(policy()[1], prompts(), ids(6, round_=1))
  assert other.tokens.tolist() != first.tokens.tolist()
  seeded = generator(seed=4)(policy()[1], prompts(), ids(6))
  assert seeded.tokens.tolist() != first.tokens.tolist()


@pytest.mark.parametrize(
  "distribution",
  [
    Distribution(),
    Distribution(temperature=0.5),
    Distribution(top_k=5),
    Distribution(top_p=0.8),
    Distribution(0.7, 10, 0.9),
  ],
)
def test_the_scorer_gives_the_samplers_log_probs_and_entropies(distribution):
  """Self-ratio 1 at any temperature, top-k, top-p and with barred ids."""
  allowed = np.ones(VOCAB, bool)
  allowed[[7, 30, 36]] = False
  model, params = policy()
  generate = generator(distribution=distribution, allowed=allowed)
  out = generate(params, prompts(), ids(6))
  valid = np.arange(out.tokens.shape[1])[None, :] < out.lengths[:, None]
  assert not np.isin(out.tokens[valid], [7, 30, 36]).any()
  context, lengths = collate.left_pad([p for p in prompts() for _ in range(2)])
  rows = map(jnp.asarray, (context, lengths, out.tokens))
  hidden = model.hidden(params, *rows)
  scores = logprobs.score(
    hidden,
    model.unembedding(params),
    jnp.asarray(out.tokens),
    jnp.asarray(allowed),
    distribution,
  )
  for ours, sampled in zip(scores, (out.logprobs, out.entropies), strict=True):
    np.testing.assert_allclose(
      np.where(valid, ours, 0), np.where(valid, sampled, 0), atol=1e-3
    )


@given(st.integers(1, 5000), st.sampled_from([8, 16, 32]))
def test_buckets_hold_what_they_are_asked_to_and_little_more(length, multiple):
  size = collate.bucket(length, multiple)
  assert length <= size <= max(multiple, length * 1.25 + multiple)
  assert collate.bucket(size, multiple) == size


def answers(_, requests):
  """An engine that counts, and answers the last request first."""
  for number, prompt, words, limit in reversed(requests):
    tokens = [*prompt, *words][:limit]
    chances = [-float(number)] * len(tokens)
    yield adapter.Completion(number, tokens, chances, number % 2 == 0, chances)


def test_anybodys_engine_is_a_generate():
  words = np.asarray([[7], [8], [9], [10]], np.uint32)
  out = adapter.adapt(answers, 2, limit=3)({}, [[1], [2, 3, 4, 5]], words)
  assert out.tokens.tolist() == [[1, 7, 0], [1, 8, 0], [2, 3, 4], [2, 3, 4]]
  assert out.lengths.tolist() == [2, 2, 3, 3]
  assert out.logprobs.tolist() == [[0, 0, 0], [-1, -1, 0], [-2] * 3, [-3] * 3]
  assert out.entropies.tolist() == out.logprobs.tolist()
  assert out.finished.tolist() == [True, False, True, False]

  def silent(_, requests):
    return [row._replace(entropies=None) for row in answers(_, requests)]

  unknown = adapter.adapt(silent, 2)({}, [[1], [2, 3, 4, 5]], words).entropies
  np.testing.assert_array_equal(np.isnan(unknown[0]), [1, 1, 0, 0, 0])


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda rows: rows[1:], r"requests \[3\] have no completion"),
    (lambda rows: [*rows, rows[0]], "number 3 came twice"),
    (lambda rows: [rows[0]._replace(number=4)], r"4 is not in \[0, 4\)"),
    (lambda rows: [rows[0]._replace(tokens=[])], "0 tokens; allowed is 1 to 3"),
    (lambda rows: [rows[0]._replace(tokens=[1] * 4)], "has 4 tokens"),
    (lambda rows: [rows[0]._replace(logprobs=[0.0])], "logprobs has length 1"),
    (lambda rows: [rows[0]._replace(entropies=[])], "entropies has length 0"),
  ],
)
def test_an_engine_that_answers_wrongly_is_refused(change, message):
  def wrong(params, requests):
    return change(list(answers(params, requests)))

  generate = adapter.adapt(wrong, 2, limit=3)
  with pytest.raises(ValueError, match=message):
    generate({}, [[1], [2, 3]], np.zeros((4, 1), np.uint32))
