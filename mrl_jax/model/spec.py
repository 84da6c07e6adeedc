"""What a decoder is: its shape and options, read from a config.json.

One decoder covers the Llama, Mistral, Qwen2 and Qwen3 families: they differ
in a handful of options, and `from_config` reads each family's into the same
frozen record. It is hashable, so it can be static under jit. A further family
is one reader here, and an option where it does something new.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from mrl_jax.model import rope

Config = dict[str, Any]

DTYPES = ("float32", "bfloat16")
REMAT = ("none", "dots", "attention", "full")
ATTENTIONS = ("plain", "pallas", "interpret")
_ARCHITECTURES = {
  "llama": "LlamaForCausalLM",
  "mistral": "MistralForCausalLM",
  "qwen2": "Qwen2ForCausalLM",
  "qwen3": "Qwen3ForCausalLM",
}


@dataclasses.dataclass(frozen=True)
class Spec:
  """Shape and options of a decoder-only transformer."""

  family: str
  vocab: int
  width: int
  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  mlp: int
  norm_eps: float
  rope: rope.Rope
  tied: bool  # the unembedding is the embedding
  qkv_bias: bool = False
  out_bias: bool = False
  qk_norm: bool = False
  windows: tuple[int, ...] = ()  # per layer, 0 is full; () is all full
  max_positions: int = 4096
  init_scale: float = 0.02
  eos_ids: tuple[int, ...] = ()
  bos_id: int | None = None
  pad_id: int | None = None
  compute_dtype: str = "float32"
  remat: str = "none"
  attention: str = "plain"

  def __post_init__(self):
    _among("compute_dtype", self.compute_dtype, DTYPES)
    _among("remat", self.remat, REMAT)
    _among("attention", self.attention, ATTENTIONS)
    if self.heads % self.kv_heads:
      raise ValueError(
        f"num_attention_heads {self.heads} must be a multiple of "
        f"num_key_value_heads {self.kv_heads}"
      )
    if self.head_dim % 2:
      raise ValueError(f"head_dim {self.head_dim} must be even")
    if self.windows and len(self.windows) != self.layers:
      raise ValueError(
        f"layer_types has {len(self.windows)} entries for {self.layers} layers"
      )


def from_config(config: Config) -> Spec:
  """The spec of a Hugging Face config.json.

  Raises:
    ValueError: for a family or an option that is not supported, naming it
      and what is.
  """
  family = config.get("model_type")
  _among("model_type", family, tuple(_FAMILIES))
  _among("hidden_act", config.get("hidden_act", "silu"), ("silu",))
  _among("mlp_bias", bool(config.get("mlp_bias", False)), (False,))
  return _FAMILIES[family](config)


def to_config(spec: Spec) -> Config:
  """The config.json that transformers opens."""
  config: Config = {
    "architectures": [_ARCHITECTURES[spec.family]],
    "model_type": spec.family,
    "vocab_size": spec.vocab,
    "hidden_size": spec.width,
    "num_hidden_layers": spec.layers,
    "num_attention_heads": spec.heads,
    "num_key_value_heads": spec.kv_heads,
    "head_dim": spec.head_dim,
    "intermediate_size": spec.mlp,
    "hidden_act": "silu",
    "rms_norm_eps": spec.norm_eps,
    "tie_word_embeddings": spec.tied,
    "max_position_embeddings": spec.max_positions,
    "initializer_range": spec.init_scale,
    "bos_token_id": spec.bos_id,
    "pad_token_id": spec.pad_id,
    "eos_token_id": _scalar(spec.eos_ids),
    "use_cache": True,
    "dtype": "float32",
    **rope.to_config(spec.rope),
  }
  if spec.family in ("llama", "qwen3"):
    config["attention_bias"] = spec.out_bias
  windows = {w for w in spec.windows if w}
  if spec.family == "mistral":
    config["sliding_window"] = max(windows, default=None)
  if spec.family in ("qwen2", "qwen3"):
    config |= {
      "use_sliding_window": bool(windows),
      "sliding_window": max(windows, default=None),
      "layer_types": [
        "sliding_attention" if w else "full_attention"
        for w in spec.windows or (0,) * spec.layers
      ],
    }
  return config


def _common(config: Config, **options: Any) -> Spec:
  """What all families share."""
  width, heads = (
    _size(config, "hidden_size"),
    _size(config, "num_attention_heads"),
  )
  return Spec(
    family=config["model_type"],
    vocab=_size(config, "vocab_size"),
    width=width,
    layers=_size(config, "num_hidden_layers"),
    heads=heads,
    kv_heads=config.get("num_key_value_heads") or heads,
    head_dim=config.get("head_dim") or width // heads,
    mlp=_size(config, "intermediate_size"),
    norm_eps=float(config.get("rms_norm_eps", 1e-6)),
    rope=rope.from_config(config),
    tied=bool(config.get("tie_word_embeddings", False)),
    max_positions=config.get("max_position_embeddings", 4096),
    init_scale=config.get("initializer_range", 0.02),
    eos_ids=ids(config.get("eos_token_id")),
    bos_id=config.get("bos_token_id"),
    pad_id=config.get("pad_token_id"),
    **options,
  )


def _llama(config: Config) -> Spec:
  bias = bool(config.get("attention_bias", False))
  return _common(config, qkv_bias=bias, out_bias=bias)


def _mistral(config: Config) -> Spec:
  window = config.get("sliding_window", 4096) or 0
  sizes = (window,) * _size(config, "num_hidden_layers")
  return _common(config, windows=sizes if window else ())


def _qwen2(config: Config) -> Spec:
  return _common(config, qkv_bias=True, windows=_qwen_windows(config))


def _qwen3(config: Config) -> Spec:
  bias = bool(config.get("attention_bias", False))
  return _common(
    {**config, "head_dim": config.get("head_dim") or 128},
    qkv_bias=bias,
    out_bias=bias,
    qk_norm=True,
    windows=_qwen_windows(config),
  )


_FAMILIES: dict[str, Callable[[Config], Spec]] = {
  "llama": _llama,
  "mistral": _mistral,
  "qwen2": _qwen2,
  "qwen3": _qwen3,
}


def _qwen_windows(config: Config) -> tuple[int, ...]:
  used = config.get("use_sliding_window", False)
  window = (config.get("sliding_window", 4096) or 0) if used else 0
  return _windows(config, window, first=config.get("max_window_layers", 28))


def _windows(config: Config, window: int, first: int) -> tuple[int, ...]:
  """Per layer; `layer_types` decides where it is given, else `first`."""
  layers = _size(config, "num_hidden_layers")
  kinds = config.get("layer_types")
  if kinds is None:
    sizes = tuple(window if i >= first else 0 for i in range(layers))
  else:
    if len(kinds) != layers:
      raise ValueError(
        f"layer_types has {len(kinds)} entries for {layers} layers"
      )
    for kind in kinds:
      _among("layer_types", kind, ("full_attention", "sliding_attention"))
    sizes = tuple(window if k == "sliding_attention" else 0 for k in kinds)
  return sizes if any(sizes) else ()


def ids(value: int | list[int] | None) -> tuple[int, ...]:
  """An `eos_token_id` entry, which is one id, a list or null."""
  if value is None:
    return ()
  return (value,) if isinstance(value, int) else tuple(value)


def _scalar(values: tuple[int, ...]) -> int | list[int] | None:
  return values[0] if len(values) == 1 else list(values) or None


def _size(config: Config, field: str) -> int:
  value = config.get(field)
  if not isinstance(value, int) or value < 1:
    raise ValueError(f"{field} must be a positive integer, got {value!r}")
  return value


def _among(field: str, value: Any, allowed: tuple[Any, ...]) -> None:
  if value not in allowed:
    raise ValueError(f"{field} is {value!r}; allowed: {list(allowed)}")
