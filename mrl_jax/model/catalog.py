"""Shapes of published models, by name: what can be planned without weights.

Each row is what the model's config.json says and its family does not. The
numbers of parameters that follow from them are those that were published
(tests/test_catalog.py).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from mrl_jax.model import spec as spec_lib


class Row(NamedTuple):
  """What differs between the sizes of a family."""

  width: int
  mlp: int
  layers: int
  heads: int
  kv_heads: int
  tied: bool
  changes: Mapping[str, Any] = {}  # of config.json


_LLAMA3 = {
  "rope_type": "llama3",
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 8192,
}
_FAMILIES: dict[str, dict[str, Any]] = {
  "qwen3": {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
  },
  "qwen2.5": {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
  },
  "llama": {
    "model_type": "llama",
    "vocab_size": 128256,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-5,
    "rope_scaling": _LLAMA3,
    "max_position_embeddings": 131072,
  },
  "smollm2": {
    "model_type": "llama",
    "vocab_size": 49152,
    "rope_theta": 1e5,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
  },
  "mistral": {
    "model_type": "mistral",
    "vocab_size": 32768,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "max_position_embeddings": 32768,
  },
}
_SMALL_QWEN = {"vocab_size": 151936}
_LLAMA_32 = {"rope_scaling": {**_LLAMA3, "factor": 32.0}}
_MISTRAL_01 = {"vocab_size": 32000, "rope_theta": 1e4, "sliding_window": 4096}
ROWS: dict[str, Row] = {
  "qwen3-0.6b": Row(1024, 3072, 28, 16, 8, True),
  "qwen3-1.7b": Row(2048, 6144, 28, 16, 8, True),
  "qwen3-4b": Row(2560, 9728, 36, 32, 8, True),
  "qwen3-8b": Row(4096, 12288, 36, 32, 8, False),
  "qwen3-14b": Row(5120, 17408, 40, 40, 8, False),
  "qwen3-32b": Row(5120, 25600, 64, 64, 8, False),
  "qwen2.5-0.5b": Row(896, 4864, 24, 14, 2, True, _SMALL_QWEN),
  "qwen2.5-1.5b": Row(1536, 8960, 28, 12, 2, True, _SMALL_QWEN),
  "qwen2.5-3b": Row(2048, 11008, 36, 16, 2, True, _SMALL_QWEN),
  "qwen2.5-7b": Row(3584, 18944, 28, 28, 4, False),
  "qwen2.5-14b": Row(5120, 13824, 48, 40, 8, False),
  "qwen2.5-32b": Row(5120, 27648, 64, 40, 8, False),
  "qwen2.5-72b": Row(8192, 29568, 80, 64, 8, False),
  "llama-3.2-1b": Row(2048, 8192, 16, 32, 8, True, _LLAMA_32),
  "llama-3.2-3b": Row(3072, 8192, 28, 24, 8, True, _LLAMA_32),
  "llama-3.1-8b": Row(4096, 14336, 32, 32, 8, False),
  "llama-3.1-70b": Row(8192, 28672, 80, 64, 8, False),
  "llama-3.3-70b": Row(8192, 28672, 80, 64, 8, False),
  "smollm2-135m": Row(576, 1536, 30, 9, 3, True),
  "smollm2-360m": Row(960, 2560, 32, 15, 5, True),
  "smollm2-1.7b": Row(2048, 8192, 24, 32, 32, True, {"rope_theta": 1.3e5}),
  "mistral-7b-v0.1": Row(4096, 14336, 32, 32, 8, False, _MISTRAL_01),
  "mistral-7b-v0.3": Row(4096, 14336, 32, 32, 8, False),
}


def names() -> tuple[str, ...]:
  """All models."""
  return tuple(ROWS)


def get(name: str) -> spec_lib.Spec:
  """The spec of a model, computed in float32 and without rematerialisation.

  Raises:
    ValueError: for a name that is not in the catalogue.
  """
  if name not in ROWS:
    raise ValueError(f"model is {name!r}; allowed: {', '.join(ROWS)}")
  row = ROWS[name]
  family = next(f for f in _FAMILIES if name.startswith(f))
  return spec_lib.from_config(
    {
      "hidden_size": row.width,
      "intermediate_size": row.mlp,
      "num_hidden_layers": row.layers,
      "num_attention_heads": row.heads,
      "num_key_value_heads": row.kv_heads,
      "rms_norm_eps": 1e-6,
      "tie_word_embeddings": row.tied,
      **_FAMILIES[family],
      **row.changes,
    }
  )
