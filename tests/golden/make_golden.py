"""Makes the fixtures of tests/test_model.py with the reference implementation.

  pip install torch transformers safetensors
  python tests/golden/make_golden.py

For each case: a tiny random checkpoint as `transformers` writes it, and the
logits that its own model gives on two sequences. No parameter is left at a
constant, so a bias or a norm that is read wrongly shows. Tests read the files
and need no torch. The files were made with torch 2.13.0, transformers 5.24.0.
"""

import json
import pathlib

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
LENGTH = 24
SHAPE = {
  "vocab_size": 64,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 256,
  "bos_token_id": 1,
  "eos_token_id": 2,
  "pad_token_id": 0,
}


def rope(theta: float, kind: str = "default", **options: float) -> dict:
  """The rotary part of a configuration."""
  return {"rope_theta": theta, "rope_type": kind, **options}


CASES = {
  "llama3": transformers.LlamaConfig(
    **SHAPE,
    tie_word_embeddings=False,
    rope_parameters=rope(
      500.0,
      "llama3",
      factor=8.0,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_max_position_embeddings=32,
    ),
  ),
  "llama_linear": transformers.LlamaConfig(
    **SHAPE,
    attention_bias=True,
    tie_word_embeddings=False,
    rope_parameters=rope(1e4, "linear", factor=4.0),
  ),
  "smollm2": transformers.LlamaConfig(
    **{**SHAPE, "num_attention_heads": 8, "num_key_value_heads": 4},
    tie_word_embeddings=True,
    rms_norm_eps=1e-5,
    rope_parameters=rope(1e5),
  ),
  "mistral": transformers.MistralConfig(
    **SHAPE, head_dim=8, sliding_window=6, rope_parameters=rope(1e4)
  ),
  "qwen2": transformers.Qwen2Config(
    **SHAPE, tie_word_embeddings=True, rope_parameters=rope(1e4)
  ),
  "qwen3": transformers.Qwen3Config(
    **SHAPE,
    head_dim=16,
    tie_word_embeddings=False,
    use_sliding_window=True,
    sliding_window=5,
    max_window_layers=1,
    rope_parameters=rope(1e4),
  ),
}
SHARDED = "llama3"  # this checkpoint is written in several files
THETAS = (1e4, 1e6)  # the logits of "qwen2" are kept for both


def logits(config, state: dict | None, tokens: np.ndarray):
  """The model's logits on `tokens`, and the model."""
  model = transformers.AutoModelForCausalLM.from_config(
    config, attn_implementation="eager"
  ).eval()
  if state is None:
    randomize(model)
  else:
    model.load_state_dict(state)
  with torch.no_grad():
    out = model(torch.tensor(tokens), use_cache=False).logits
  return out.float().numpy(), model


def randomize(model: torch.nn.Module) -> None:
  """Gives every parameter values of a size that keeps logits near 1."""
  for name, value in model.named_parameters():
    if "norm" in name:
      torch.nn.init.uniform_(value, 0.5, 1.5)
    elif value.ndim == 1:
      torch.nn.init.normal_(value, std=0.5)
    else:
      torch.nn.init.normal_(value, std=1.5 * value.shape[1] ** -0.5)


def main() -> None:
  for number, (name, config) in enumerate(CASES.items()):
    torch.manual_seed(number)
    rng = np.random.default_rng(number)
    tokens = rng.integers(0, config.vocab_size, (2, LENGTH))
    found, model = logits(config, None, tokens)
    arrays = {"tokens": tokens.astype(np.int32), "logits": found}
    folder = HERE / name
    size = "40KB" if name == SHARDED else "1GB"
    model.save_pretrained(folder, max_shard_size=size)
    if name == "qwen2":
      for theta in THETAS:
        changed = type(config)(
          **{**config.to_dict(), "rope_parameters": rope(theta)}
        )
        other, _ = logits(changed, model.state_dict(), tokens)
        arrays[f"logits_theta_{theta:.0e}"] = other
    np.savez_compressed(folder / "logits.npz", **arrays)
    files = sorted(path.name for path in folder.iterdir())
    print(name, json.dumps(files), f"logits std {found.std():.2f}")


if __name__ == "__main__":
  main()
