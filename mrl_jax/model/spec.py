"""The shape and options of a decoder, and how each family states them.

A `Spec` is hashable and says everything the forward pass branches on, so a
compiled function is a function of it. `from_config` reads the config.json of
a Hugging Face checkpoint; a family not in `FAMILIES` is refused rather than
run with a guess.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_KINDS = ("default", "linear", "llama3")
REMATS = ("none", "full", "dots")


@dataclasses.dataclass(frozen=True)
class Rope:
  """Rotary embedding; the last four fields are read by llama3 only."""

  theta: float = 1e4
  kind: str = "default"
  factor: float = 1.0
  low_frequency_factor: float = 1.0
  high_frequency_factor: float = 4.0
  original_positions: int = 8192


@dataclasses.dataclass(frozen=True)
class Spec:
  """A pre-norm decoder with grouped-query attention and SwiGLU."""

  family: str
  vocab: int
  width: int  # D
  mlp: int  # F
  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  norm_eps: float = 1e-6
  rope: Rope = Rope()
  qkv_bias: bool = False
  qk_norm: bool = False
  tied: bool = False
  windows: tuple[int, ...] = ()  # per layer, 0 is none; () is none anywhere
  positions: int = 4096  # longest sequence it was made for
  compute_dtype: str = "float32"
  remat: str = "none"


def from_config(config: Mapping[str, Any]) -> Spec:
  """The spec of a config.json.

  Raises:
    ValueError: a family, activation or option that is not implemented.
    KeyError: a field that every config of the family has.
  """
  family = config.get("model_type")
  if family not in FAMILIES:
    raise ValueError(
      f"model_type: {family!r} is not implemented; allowed: "
      f"{', '.join(FAMILIES)}"
    )
  if config.get("hidden_act", "silu") != "silu":
    raise ValueError(
      f"hidden_act: {config['hidden_act']!r} is not implemented; allowed: silu"
    )
  for name in ("attention_bias", "mlp_bias"):
    if config.get(name, False):
      raise ValueError(f"{name}: true is not implemented for {family}")
  heads = config["num_attention_heads"]
  kv_heads = config.get("num_key_value_heads") or heads
  if heads % kv_heads:
    raise ValueError(
      f"num_key_value_heads: {kv_heads} must divide the {heads} heads"
    )
  return Spec(
    family=family,
    vocab=config["vocab_size"],
    width=config["hidden_size"],
    mlp=config["intermediate_size"],
    layers=config["num_hidden_layers"],
    heads=heads,
    kv_heads=kv_heads,
    head_dim=config.get("head_dim") or config["hidden_size"] // heads,
    norm_eps=config.get("rms_norm_eps", 1e-6),
    rope=_rope(config),
    qkv_bias=family == "qwen2",
    qk_norm=family == "qwen3",
    tied=bool(config.get("tie_word_embeddings", False)),
    windows=_windows(family, config),
    positions=config.get("max_position_embeddings", 4096),
  )


def _rope(config: Mapping[str, Any]) -> Rope:
  """Newer configs hold one dict, older ones a theta and a scaling dict."""
  values = dict(config.get("rope_scaling") or {})
  values.update(config.get("rope_parameters") or {})
  theta = values.get("rope_theta", config.get("rope_theta", 1e4))
  kind = values.get("rope_type", values.get("type", "default"))
  if kind not in ROPE_KINDS:
    raise ValueError(
      f"rope_type: {kind!r} is not implemented; allowed: "
      f"{', '.join(ROPE_KINDS)}"
    )
  if kind == "default":
    return Rope(theta)
  if kind == "linear":
    return Rope(theta, kind, values["factor"])
  return Rope(
    theta,
    kind,
    values["factor"],
    values["low_freq_factor"],
    values["high_freq_factor"],
    values["original_max_position_embeddings"],
  )


def _windows(family: str, config: Mapping[str, Any]) -> tuple[int, ...]:
  """Per layer, how many positions back it sees; () where none is limited."""
  window = config.get("sliding_window") or 0
  if family in ("qwen2", "qwen3") and not config.get("use_sliding_window"):
    window = 0
  if family == "llama" or not window:
    return ()
  layers = config["num_hidden_layers"]
  kinds = config.get("layer_types")
  if kinds:
    return tuple(window if k == "sliding_attention" else 0 for k in kinds)
  first = 0 if family == "mistral" else config.get("max_window_layers", layers)
  return tuple(window if i >= first else 0 for i in range(layers))
