"""Checkpoints on disk: exact round trips, shards, errors, memory."""

import dataclasses
import json
import math
import pathlib
import shutil
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import transformers

from mrl_jax.model import hf, transformer
from mrl_jax.model import spec as spec_lib
from mrl_jax.parallel import mesh as mesh_lib

ROOT = pathlib.Path(__file__).parent / "golden"
GOLDEN = sorted(path.name for path in ROOT.iterdir() if path.is_dir())
CONFIG = {
  "model_type": "qwen3",
  "vocab_size": 24,
  "hidden_size": 16,
  "intermediate_size": 24,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 8,
  "attention_bias": True,
  "tie_word_embeddings": False,
  "eos_token_id": [3, 5],
  "pad_token_id": 0,
}


def random_model(seed=0, **changes):
  """A model none of whose parameters is constant."""
  model = transformer.make(spec_lib.from_config({**CONFIG, **changes}))
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  rng = np.random.default_rng(seed)
  params = jax.tree.map(
    lambda leaf: jax.numpy.asarray(rng.normal(size=leaf.shape), "float32"),
    shapes,
  )
  return model, params


def assert_equal(left, right):
  jax.tree.map(np.testing.assert_array_equal, left, right)


def test_round_trip_is_exact(tmp_path):
  model, params = random_model()
  hf.save(model, params, tmp_path)
  again, loaded = hf.load(tmp_path)
  assert again.spec == model.spec
  assert_equal(params, loaded)
  assert all(leaf.dtype == "float32" for leaf in jax.tree.leaves(loaded))


def test_load_places_shards(tmp_path):
  model, params = random_model()
  hf.save(model, params, tmp_path)
  mesh = mesh_lib.make(2, 2, 2)
  again, loaded = hf.load(tmp_path, mesh, "bfloat16", "full")
  assert again.spec == dataclasses.replace(
    model.spec, compute_dtype="bfloat16", remat="full"
  )
  assert_equal(params, loaded)
  q = loaded["layers"]["q"]
  assert q.addressable_shards[0].data.shape == (3, 8, 2, 8)


def rewrite(directory, change):
  """Applies `change` to the dict of the directory's tensors."""
  path = str(directory / "model.safetensors")
  tensors = dict(safetensors.numpy.load_file(path))
  change(tensors)
  safetensors.numpy.save_file(tensors, path)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_other_dtypes_become_float32(tmp_path, dtype):
  model, params = random_model()
  hf.save(model, params, tmp_path)
  rewrite(
    tmp_path,
    lambda tensors: tensors.update(
      {name: value.astype(dtype) for name, value in tensors.items()}
    ),
  )
  loaded = hf.load(tmp_path)[1]
  assert_equal(
    jax.tree.map(
      lambda leaf: np.asarray(leaf).astype(dtype).astype(np.float32), params
    ),
    loaded,
  )
  assert all(leaf.dtype == "float32" for leaf in jax.tree.leaves(loaded))


def test_tensors_are_stored_as_other_programs_expect(tmp_path):
  model, params = random_model()
  hf.save(model, params, tmp_path)
  found = safetensors.numpy.load_file(tmp_path / "model.safetensors")
  layers = jax.tree.map(np.asarray, params["layers"])
  name = "model.layers.1.self_attn.{}_proj.weight".format
  for i in range(16):
    np.testing.assert_array_equal(
      found[name("q")][:, i], layers["q"][1, i].reshape(-1)
    )
    np.testing.assert_array_equal(
      found[name("o")][i], layers["o"][1, :, :, i].reshape(-1)
    )
  np.testing.assert_array_equal(
    found["model.layers.2.mlp.down_proj.weight"], layers["down"][2].T
  )


def test_wrong_tensors_are_all_named_in_one_error(tmp_path):
  model, params = random_model()
  hf.save(model, params, tmp_path)

  def change(tensors):
    del tensors["model.norm.weight"], tensors["lm_head.weight"]
    tensors["model.layers.0.mlp.extra"] = np.zeros(3, np.float32)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)
    name = "model.layers.2.self_attn.q_norm.weight"
    tensors[name] = tensors[name].astype(np.int8)

  rewrite(tmp_path, change)
  with pytest.raises(ValueError, match="do not fit") as error:
    hf.load(tmp_path)
  for part in (
    "5 tensors",
    "missing model.norm.weight",
    "missing lm_head.weight",
    "unknown model.layers.0.mlp.extra",
    "model.layers.1.mlp.up_proj.weight is (16, 24), not (24, 16)",
    "model.layers.2.self_attn.q_norm.weight is I8",
  ):
    assert part in str(error.value)


def test_buffers_and_copies_of_tied_matrices_are_ignored(tmp_path):
  model, params = random_model(tie_word_embeddings=True)
  hf.save(model, params, tmp_path)

  def change(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors[name] = np.ones(4, np.float32)

  rewrite(tmp_path, change)
  assert_equal(params, hf.load(tmp_path)[1])


def test_a_directory_without_a_model_is_refused_by_name(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"config\.json") as error:
    hf.load(tmp_path / "nowhere")
  assert "nowhere" in str(error.value)
  (tmp_path / "config.json").write_text(json.dumps(CONFIG))
  with pytest.raises(FileNotFoundError, match="no weights in directory"):
    hf.load(tmp_path)
  index = tmp_path / "model.safetensors.index.json"
  index.write_text('{"weight_map": {"a": "part-1.safetensors"}}')
  with pytest.raises(FileNotFoundError, match=r"part-1\.safetensors"):
    hf.load(tmp_path)
  (tmp_path / "part-1.safetensors").write_bytes(b"nonsense" * 4)
  with pytest.raises(ValueError, match=r"part-1\.safetensors cannot be read"):
    hf.load(tmp_path)
  (tmp_path / "config.json").write_text("{")
  with pytest.raises(ValueError, match="not valid JSON"):
    hf.load(tmp_path)


def test_export_keeps_what_the_source_says(tmp_path):
  source, out = tmp_path / "source", tmp_path / "out"
  model, params = random_model()
  hf.save(model, params, source)
  config = json.loads((source / "config.json").read_text())
  config |= {"torch_dtype": "bfloat16", "attention_dropout": 0.25}
  texts = {
    "config.json": json.dumps(config),
    "generation_config.json": '{"eos_token_id": [5, 7], "top_k": 9}',
    "tokenizer.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "README.md": "not copied",
  }
  for name, text in texts.items():
    (source / name).write_text(text)
  hf.save(model, params, out, source_directory=source)
  assert {path.name for path in out.iterdir()} == {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "chat_template.jinja",
  }
  written = json.loads((out / "config.json").read_text())
  assert written["attention_dropout"] == 0.25
  assert written["dtype"] == "float32" and "torch_dtype" not in written
  generation = json.loads((out / "generation_config.json").read_text())
  assert generation == {"eos_token_id": [5, 7], "pad_token_id": 0, "top_k": 9}
  assert hf.generation_eos(out) == (5, 7)
  (out / "generation_config.json").unlink()
  assert hf.generation_eos(out) == (3, 5)
  assert hf.load(out)[0].spec == model.spec


@pytest.mark.parametrize("name", GOLDEN)
def test_transformers_reads_the_exported_configuration(tmp_path, name):
  model, params = hf.load(ROOT / name)
  hf.save(model, params, tmp_path)  # from the spec alone
  read = transformers.AutoConfig.from_pretrained
  got, want = read(tmp_path).to_dict(), read(ROOT / name).to_dict()
  for field in ("_name_or_path", "transformers_version", "max_window_layers"):
    got.pop(field, None), want.pop(field, None)
  got = {field: got.get(field) for field in want}
  assert got == want
  assert_equal(params, hf.load(tmp_path)[1])


def test_saving_replaces_a_checkpoint_in_several_files(tmp_path):
  shutil.copytree(ROOT / "llama3", tmp_path, dirs_exist_ok=True)
  model, params = hf.load(tmp_path, mesh_lib.make(2, 2, 2))
  params = jax.tree.map(lambda leaf: leaf + 1, params)
  hf.save(model, params, tmp_path, source_directory=tmp_path)
  names = {path.name for path in tmp_path.glob("model*")}
  assert names == {"model.safetensors"}
  assert_equal(params, hf.load(tmp_path)[1])


def test_a_failed_save_leaves_the_old_model(tmp_path):
  model, params = random_model()
  hf.save(model, params, tmp_path)
  other = random_model(seed=1)[1]
  other["layers"]["up"].delete()
  with pytest.raises(RuntimeError, match="deleted"):
    hf.save(model, other, tmp_path)
  assert_equal(params, hf.load(tmp_path)[1])


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2)])
def test_no_second_copy_in_host_memory(tmp_path, sizes):
  """Of about 100 MB, at most one parameter is held twice at a time."""
  model, params = random_model(
    hidden_size=512, intermediate_size=2048, num_hidden_layers=7, head_dim=128
  )
  leaves = jax.tree.leaves(params)
  largest = max(leaf.nbytes for leaf in leaves)
  assert sum(leaf.nbytes for leaf in leaves) > 1e8 > 3 * largest
  hf.save(model, params, tmp_path)
  mesh = mesh_lib.make(*sizes, devices=jax.devices()[: math.prod(sizes)])
  tracemalloc.start()
  try:
    loaded = hf.load(tmp_path, mesh)[1]
    # Host arrays that became the parameters are still traced.
    now, peak = tracemalloc.get_traced_memory()
    assert peak - now < 1.5 * largest
    tracemalloc.reset_peak()
    hf.save(model, loaded, tmp_path / "again")
    assert tracemalloc.get_traced_memory()[1] - now < 0.5 * largest
  finally:
    tracemalloc.stop()
  assert_equal(params, hf.load(tmp_path / "again", mesh)[1])
