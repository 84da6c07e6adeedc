"""Checkpoints in the Hugging Face layout, read into shards and written back.

`load` builds the parameters leaf by leaf, and each device's shard from only
the parts of the files that it needs, so no second copy of the model is ever in
host memory. `save` streams tensor after tensor to a file that `transformers`
opens. How tensors and parameters correspond is the table in `hf_names`.
"""

import contextlib
import dataclasses
import gc
import json
import os
import pathlib
import shutil
from typing import Any

import jax
import numpy as np
import safetensors
from jax.sharding import Sharding, SingleDeviceSharding

from mrl_jax.model import hf_names, hf_write, transformer
from mrl_jax.model import spec as spec_lib
from mrl_jax.parallel import sharding

Directory = str | os.PathLike[str]

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = ("F32", "BF16", "F16", "F64")
_TOKENIZER_FILES = (
  "tokenizer.json",
  "tokenizer.model",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
  "vocab.json",
  "merges.txt",
  "chat_template.jinja",
  "chat_template.json",
)
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load(
  directory: Directory,
  mesh: jax.sharding.Mesh | None = None,
  compute_dtype: str = "float32",
  remat: str = "none",
  attention: str = "plain",
) -> tuple[transformer.Model, transformer.Params]:
  """Reads a model; its parameters are float32, whatever the file's dtype.

  Args:
    directory: config.json with model.safetensors, or with several files and
      their index.
    mesh: what to spread the parameters over; one device if None.
    compute_dtype: of activations and matrix products.
    remat: what the backward pass recomputes: see `spec.REMAT`.
    attention: what computes attention: see `spec.ATTENTIONS`.

  Raises:
    FileNotFoundError: the directory lacks the configuration or the weights.
    ValueError: an unsupported configuration, or tensors that are missing,
      unknown or misshapen: one error that names them all.
  """
  root = pathlib.Path(directory)
  spec = dataclasses.replace(
    spec_lib.from_config(read_config(root)),
    compute_dtype=compute_dtype,
    remat=remat,
    attention=attention,
  )
  model = transformer.make(spec)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  if mesh is None:
    device = SingleDeviceSharding(jax.local_devices()[0])
    targets = jax.tree.map(lambda _: device, shapes)
  else:
    targets = sharding.tree(model.axes, shapes, mesh)
  with contextlib.ExitStack() as stack:
    files = _open(root, stack)
    _check(root, spec, files, shapes)
    params = jax.tree.map(
      lambda leaf, place, target: _read(files, place, leaf.shape, target),
      shapes,
      hf_names.places(shapes),
      targets,
    )
  return model, params


def read_config(directory: Directory) -> dict[str, Any]:
  """The parsed config.json."""
  path = pathlib.Path(directory) / "config.json"
  if not path.is_file():
    raise FileNotFoundError(
      f"no model in directory {str(directory)!r}: it has no config.json"
    )
  return _json(path)


def _open(root: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, Any]:
  """Tensor name -> the open file that holds it."""
  index = root / _INDEX
  if (root / _WEIGHTS).is_file():
    names = [_WEIGHTS]
  elif index.is_file():
    names = sorted(set(_json(index)["weight_map"].values()))
  else:
    raise FileNotFoundError(
      f"no weights in directory {str(root)!r}: looked for {_WEIGHTS} and"
      f" {_INDEX}"
    )
  lost = [name for name in names if not (root / name).is_file()]
  if lost:
    raise FileNotFoundError(f"{index} lists files that are missing: {lost}")
  found = {}
  for name in names:
    try:
      file = safetensors.safe_open(str(root / name), framework="np")
    except safetensors.SafetensorError as error:
      raise ValueError(f"{root / name} cannot be read: {error}") from error
    found.update(dict.fromkeys(stack.enter_context(file).keys(), file))
  return found


def _check(
  root: pathlib.Path,
  spec: spec_lib.Spec,
  files: dict[str, Any],
  shapes: transformer.Params,
) -> None:
  expected: dict[str, tuple[int, ...]] = {}
  for place, leaf in hf_names.paired(shapes):
    expected |= hf_names.tensors(place, leaf.shape)
  wrong = [f"missing {n}" for n in expected if n not in files]
  for name, file in files.items():
    if name not in expected:
      if not hf_names.is_ignored(name, spec):
        wrong.append(f"unknown {name}")
      continue
    part = file.get_slice(name)
    if tuple(part.get_shape()) != expected[name]:
      wrong.append(f"{name} is {tuple(part.get_shape())}, not {expected[name]}")
    elif part.get_dtype() not in _DTYPES:
      wrong.append(f"{name} is {part.get_dtype()}, not one of {_DTYPES}")
  if wrong:
    raise ValueError(
      f"the weights in {str(root)!r} do not fit its config.json"
      f" ({len(wrong)} tensors): {'; '.join(wrong)}"
    )


def _read(
  files: dict[str, Any],
  place: hf_names.Place,
  shape: tuple[int, ...],
  target: Sharding,
) -> jax.Array:
  """One parameter on its devices, from the parts that each needs."""
  gc.collect(0)  # JAX lets go of the last parameter's host copy only then
  names = list(hf_names.tensors(place, shape))
  layered = hf_names.LAYER in place.name
  inner = shape[1:] if layered else shape
  done: dict[Any, np.ndarray] = {}  # devices with the same part share it

  def one(name: str, index: hf_names.Index) -> np.ndarray:
    part = files[name].get_slice(name)
    tensor = part[hf_names.stored_index(place, inner, index)]
    return hf_names.from_stored(place, tensor, sizes(index, inner))

  def sizes(index: hf_names.Index, shape: tuple[int, ...]) -> tuple[int, ...]:
    pairs = [
      hf_names.bounds(part, size)
      for part, size in zip(index, shape, strict=True)
    ]
    return tuple(stop - start for start, stop in pairs)

  def callback(index: hf_names.Index) -> np.ndarray:
    key = tuple(
      hf_names.bounds(part, size)
      for part, size in zip(index, shape, strict=True)
    )
    if key not in done:
      done[key] = np.empty(sizes(index, shape), np.float32)
      if layered:
        for row, name in enumerate(names[index[0]]):
          done[key][row] = one(name, index[1:])
      else:
        done[key][...] = one(names[0], index)
    return done[key]

  array = jax.make_array_from_callback(shape, target, callback)
  # Transfers in flight would hold one host copy of each parameter.
  return jax.block_until_ready(array)


def save(
  model: transformer.Model,
  params: transformer.Params,
  directory: Directory,
  source_directory: Directory | None = None,
) -> None:
  """Writes a directory that `transformers` opens; the weights are float32.

  Files are replaced only once all of them are written. With several processes
  all must call this; the first one writes.

  Args:
    model: whose parameters these are.
    params: the parameters, wherever they lie.
    directory: where to; made if need be.
    source_directory: what these parameters started from, which may be
      `directory` itself. Tokenizer and chat template are copied from it, and
      its configuration is kept where it says more.
  """
  root = pathlib.Path(directory)
  source = pathlib.Path(source_directory or directory)
  writes = jax.process_index() == 0
  with contextlib.ExitStack() as stack:
    file = None
    if writes:
      root.mkdir(parents=True, exist_ok=True)
      file = stack.enter_context(open(_temporary(root / _WEIGHTS), "wb"))
    hf_write.weights(hf_names.paired(params), file)
  if not writes:
    return
  config = _config(source, model.spec)
  texts = {
    "config.json": config,
    "generation_config.json": _generation(source, config),
  }
  for name, content in texts.items():
    text = json.dumps(content, indent=2) + "\n"
    _temporary(root / name).write_text(text, encoding="utf-8")
  copied = []
  if source.resolve() != root.resolve():
    copied = [n for n in _TOKENIZER_FILES if (source / n).is_file()]
  for name in copied:
    shutil.copyfile(source / name, _temporary(root / name))
  for name in (_WEIGHTS, *texts, *copied):
    os.replace(_temporary(root / name), root / name)
  _remove_shards(root)


def _config(source: pathlib.Path, spec: spec_lib.Spec) -> dict[str, Any]:
  """The source's config.json, with what the model is on top."""
  kept = _json(source / "config.json", missing_ok=True)
  kept.pop("torch_dtype", None)  # the older name of dtype
  return {**kept, **spec_lib.to_config(spec)}


def _generation(source: pathlib.Path, config: dict[str, Any]) -> dict[str, Any]:
  ids = {name: config.get(name) for name in _TOKEN_IDS}
  kept = _json(source / "generation_config.json", missing_ok=True)
  return {**{k: v for k, v in ids.items() if v is not None}, **kept}


def generation_eos(directory: Directory) -> tuple[int, ...]:
  """The ids that end a completion, of generation_config or else config."""
  for name in ("generation_config.json", "config.json"):
    content = _json(pathlib.Path(directory) / name, missing_ok=True)
    found = spec_lib.ids(content.get("eos_token_id"))
    if found:
      return found
  return ()


def _remove_shards(root: pathlib.Path) -> None:
  """Removes the files of an older checkpoint that was in several."""
  index = root / _INDEX
  for name in set(_json(index, missing_ok=True).get("weight_map", {}).values()):
    if name != _WEIGHTS and pathlib.Path(name).name == name:
      (root / name).unlink(missing_ok=True)
  index.unlink(missing_ok=True)


def _temporary(path: pathlib.Path) -> pathlib.Path:
  return path.with_name(f".{path.name}.partial")


def _json(path: pathlib.Path, missing_ok: bool = False) -> dict[str, Any]:
  if missing_ok and not path.is_file():
    return {}
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except ValueError as error:
    raise ValueError(f"{path} is not valid JSON: {error}") from error
