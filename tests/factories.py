"""Batches for tests: random ones, and ones made by hand from a few arrays."""

import functools
import pathlib

import jax.numpy as jnp
import numpy as np

from mrl_jax.exchange import publish
from mrl_jax.model import spec as spec_lib
from mrl_jax.model import transformer
from mrl_jax.text import tokenizer as tokenizer_lib
from mrl_jax.types import Batch, Peers, Scores, Source


def batch(rows=4, steps=6, samples=2, vocab=11, seed=0, **fields) -> Batch:
  """A random batch with whole groups; `fields` replace leaves by arrays.

  Rows have their own lengths, groups stand together, rewards are 0 or 1,
  advantages are unset (NaN), the window is [0.8, 1.28].
  """
  rng = np.random.default_rng(seed)
  lengths = rng.integers(1, steps + 1, rows)
  mask = np.arange(steps)[None, :] < lengths[:, None]
  nothing = np.zeros(rows)
  context_lengths = rng.integers(1, 4, rows)
  context = rng.integers(vocab, size=(rows, 3))
  context[np.arange(3)[None, :] < 3 - context_lengths[:, None]] = 0
  values = {
    "context": context,
    "context_lengths": context_lengths,
    "tokens": rng.integers(vocab, size=(rows, steps)) * mask,
    "weights": mask,
    "behavior_logprobs": -rng.exponential(size=(rows, steps)) * mask,
    "rewards": rng.integers(2, size=rows),
    "advantages": np.full(rows, np.nan),
    "credit": np.zeros((rows, steps)),
    "bonus": nothing,
    "clip_low": np.full(rows, 0.2),
    "clip_high": np.full(rows, 0.28),
    "group": np.arange(rows) // samples,
    "source": np.full(rows, int(Source.OWN)),
    "version": nothing,
    **fields,
  }
  integers = {"context", "context_lengths", "tokens"}
  integers |= {"group", "source", "version"}
  arrays = {
    name: value
    if value is None
    else jnp.asarray(value, jnp.int32 if name in integers else jnp.float32)
    for name, value in values.items()
    if name != "peers"
  }
  none = Peers(*(jnp.zeros(rows, jnp.float32) for _ in range(3)))
  return Batch(**arrays, peers=fields.get("peers", none))


def rows(weights, **fields) -> Batch:
  """A batch made by hand: its shape is that of `weights` [B, T]."""
  weights = np.asarray(weights, np.float32)
  shape = {"rows": weights.shape[0], "steps": weights.shape[1]}
  zeros = np.zeros_like(weights)
  fields = {"behavior_logprobs": zeros, "advantages": zeros[:, 0], **fields}
  return batch(**shape, weights=weights, **fields)


def scores(batch_: Batch, seed=0, drift=0.3) -> Scores:
  """The log-probs of a policy that moved away from the sampler's."""
  rng = np.random.default_rng(seed)
  shape = batch_.behavior_logprobs.shape
  moved = batch_.behavior_logprobs + jnp.asarray(
    rng.normal(size=shape) * drift, jnp.float32
  )
  entropies = jnp.asarray(rng.exponential(size=shape), jnp.float32)
  return Scores(moved, entropies)


@functools.cache
def member(name: str = "char") -> publish.Member:
  """The side in an exchange of one of the packaged tiny policies."""
  root = pathlib.Path(__file__).parent.parent
  tokenizer = tokenizer_lib.load(str(root / "experiments" / "assets" / name))
  allowed = tokenizer.allowed(tokenizer.vocab_size)
  return publish.Member(name, tokenizer, allowed, 12, "task exact", 0)


def decoder() -> transformer.Model:
  """A Llama of a few hundred weights, for 11 tokens."""
  config = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 11,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
  }
  return transformer.make(spec_lib.from_config(config))
