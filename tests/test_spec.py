"""Every family's options are read, written back, or refused by name."""

import dataclasses

import pytest

from mrl_jax.model import rope
from mrl_jax.model import spec as spec_lib

SHAPE = {
  "hidden_size": 32,
  "intermediate_size": 64,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "vocab_size": 64,
}
MIXED = ["full_attention", "sliding_attention", "full_attention"]


def read(family, **more):
  return spec_lib.from_config({"model_type": family, **SHAPE, **more})


CONFIGS = [
  ("llama", {}),
  ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
  ("llama", {"head_dim": 16, "eos_token_id": [3, 5], "bos_token_id": 1}),
  ("mistral", {"sliding_window": 7}),
  ("mistral", {"sliding_window": None}),
  ("qwen2", {"rope_theta": 1e6}),
  (
    "qwen2",
    {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
  ),
  ("qwen3", {"head_dim": 16, "pad_token_id": 0, "eos_token_id": 2}),
  (
    "qwen3",
    {"use_sliding_window": True, "sliding_window": 5, "layer_types": MIXED},
  ),
]


@pytest.mark.parametrize(("family", "more"), CONFIGS)
def test_round_trip(family, more):
  spec = read(family, **more)
  assert spec_lib.from_config(spec_lib.to_config(spec)) == spec
  assert hash(spec) == hash(read(family, **more))


def test_family_options():
  llama, qwen2, qwen3 = read("llama"), read("qwen2"), read("qwen3")
  assert (llama.qkv_bias, llama.out_bias, llama.qk_norm) == (False,) * 3
  assert (qwen2.qkv_bias, qwen2.out_bias, qwen2.qk_norm) == (True, False, False)
  assert (qwen3.qkv_bias, qwen3.out_bias, qwen3.qk_norm) == (False, False, True)
  assert (llama.head_dim, qwen3.head_dim) == (8, 128)
  assert read("llama", num_key_value_heads=None).kv_heads == 4
  assert read("llama", rope_theta=1e6).rope == rope.Rope(1e6)


def test_windows():
  assert read("mistral", sliding_window=7).windows == (7, 7, 7)
  assert read("mistral", sliding_window=None).windows == ()
  used = {"sliding_window": 5, "use_sliding_window": True}
  assert read("qwen2", **used, max_window_layers=1).windows == (0, 5, 5)
  assert read("qwen2", **used, max_window_layers=3).windows == ()
  assert read("qwen3", **used, layer_types=MIXED).windows == (0, 5, 0)
  assert read("qwen2", sliding_window=5, max_window_layers=0).windows == ()


@pytest.mark.parametrize(
  ("family", "more", "message"),
  [
    ("gemma", {}, "model_type is 'gemma'; allowed: .*llama.*qwen3"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("llama", {"mlp_bias": True}, "mlp_bias is True"),
    ("llama", {"hidden_size": None}, "hidden_size must be a positive integer"),
    ("llama", {"num_key_value_heads": 3}, "4 must be a multiple of .* 3"),
    ("llama", {"head_dim": 7}, "head_dim 7 must be even"),
    ("qwen2", {"layer_types": ["chunked"] * 3}, "layer_types is 'chunked'"),
    ("qwen2", {"layer_types": MIXED[:2]}, "layer_types .* 2 .* 3 layers"),
  ],
)
def test_what_is_not_supported_is_named(family, more, message):
  with pytest.raises(ValueError, match=message):
    read(family, **more)


@pytest.mark.parametrize("field", ["compute_dtype", "remat", "attention"])
def test_misspelt_options_are_refused(field):
  with pytest.raises(ValueError, match=f"{field} is 'flot'; allowed"):
    dataclasses.replace(read("llama"), **{field: "flot"})


@pytest.mark.parametrize(("family", "more"), CONFIGS)
def test_transformers_reads_the_same_from_our_config(family, more):
  transformers = pytest.importorskip("transformers")
  spec = read(family, **more)
  config = spec_lib.to_config(spec)
  theirs = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
  back = spec_lib.from_config(theirs.to_dict())
  assert back == spec
