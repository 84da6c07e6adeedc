"""One decoder for several families, as pure functions over its parameters.

Inside are the modules of `layers.py`; outside there is only `Model`,
functions over a nested dict of arrays, so that any other decoder with these
functions can take its place. Layers are stacked along a leading axis and
scanned, except where one token is decoded: there they stand apart.

Prompts are computed once for the G completions of each, in training as in
sampling: `hidden` takes N prompts and B = N G completions, runs both as two
streams through the layers, and lets the completions attend to their prompt.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mrl_jax.kernels import lookup
from mrl_jax.model import attention, flash, layers, rope
from mrl_jax.model import cache as cache_lib
from mrl_jax.model import spec as spec_lib
from mrl_jax.parallel import sharding

Params = dict[str, Any]


class Model(NamedTuple):
  """A decoder; see `make` for what each function does."""

  spec: spec_lib.Spec
  axes: Any  # logical axes, a tree like the parameters
  init: Callable[[Array], Params]
  hidden: Callable[..., Array]
  unembedding: Callable[[Params], Array]
  prefill: Callable[..., tuple[Array, cache_lib.Prompts]]
  unstack: Callable[[Params], Params]
  decode: Callable[..., tuple[Array, cache_lib.Cache]]


def make(spec: spec_lib.Spec) -> Model:
  """The model's functions.

  init(key) -> params: float32, layer leaves stacked along L.
  hidden(params, context [N, P], context_lengths [N], tokens [B, T]): the
    states [B, T, D] that predict tokens[:, t], after the final norm; prompts
    left-padded, completions right-padded, rows of prompt n at n G + g.
  unembedding(params) -> [V, D], in the compute dtype.
  prefill(params, context, context_lengths) -> the state [N, D] of each last
    prompt token, and the prompts' keys and values.
  unstack(params) -> the parameters that `decode` takes: the layers apart and
    in the compute dtype, so that no step slices or casts them.
  decode(unstacked, tokens [B], cache) -> the states [B, D] that predict the
    next tokens, and the cache with these.
  """
  kind = _attention(spec)
  return Model(
    spec=spec,
    axes=_axes(spec),
    init=jax.jit(functools.partial(_init, spec)),
    hidden=functools.partial(_hidden, spec, kind),
    unembedding=functools.partial(_unembedding, spec),
    prefill=functools.partial(_prefill, spec, kind),
    unstack=functools.partial(_unstack, spec),
    decode=functools.partial(_decode, spec, kind),
  )


def _attention(spec: spec_lib.Spec) -> attention.Attention:
  if spec.attention == "plain":
    return attention.plain(spec.windows)
  return flash.make(spec.windows, interpret=spec.attention == "interpret")


def _init(spec: spec_lib.Spec, key: Array) -> Params:
  first, second = jax.random.split(key)
  keys = jax.random.split(first, spec.layers)
  stacked = jax.vmap(lambda k: _values(layers.Block(spec, nnx.Rngs(k))))(keys)
  return {**_values(layers.Ends(spec, nnx.Rngs(second))), "layers": stacked}


def _values(module: nnx.Module) -> Params:
  return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def _axes(spec: spec_lib.Spec) -> Any:
  def axes(kind, lead):
    module = nnx.eval_shape(lambda: kind(spec, nnx.Rngs(0)))
    return {
      name: (*lead, *getattr(module, name).get_metadata("axes"))
      for name in _values(module)
    }

  return {**axes(layers.Ends, ()), "layers": axes(layers.Block, ("layers",))}


def _block(spec: spec_lib.Spec) -> Callable[[Params], layers.Block]:
  """A function from one layer's parameters to its module."""
  module = nnx.eval_shape(lambda: layers.Block(spec, nnx.Rngs(0)))
  graph, state = nnx.split(module)

  def bind(params: Params) -> layers.Block:
    filled = jax.tree.map(lambda x: x, state)
    nnx.replace_by_pure_dict(filled, params)
    return nnx.merge(graph, filled)

  return bind


def _hidden(
  spec: spec_lib.Spec,
  kind: attention.Attention,
  params: Params,
  context: Int[Array, "N P"],
  context_lengths: Int[Array, "N"],
  tokens: Int[Array, "B T"],
) -> Float[Array, "B T D"]:
  count, width = context.shape
  rows, steps = tokens.shape
  group = rows // count
  # A completion's first input is the last prompt token, run with the rows.
  last = jnp.repeat(context[:, -1:], group, axis=0)
  inputs = jnp.concatenate([last, tokens[:, :-1]], axis=1)
  embed = functools.partial(_embed, spec, params)
  where = _positions(context_lengths, width)
  later = context_lengths[:, None] - 1 + jnp.arange(steps)[None, :]
  turns = _turns(spec, where)
  later_turns = _turns(spec, later[:, None])
  attend_prompt = kind.over_itself(where)
  attend_both = kind.over_prompt_and_itself(where, steps)
  bind = _block(spec)

  def layer(carry, inputs_):
    x, y = carry
    block, window = bind(inputs_[0]), inputs_[1]
    q, k, v = block.qkv(x, turns)
    x = block.finish(x, attend_prompt(q, k, v, window))
    grouped = y.reshape(count, group, steps, -1)
    q, k2, v2 = block.qkv(grouped, later_turns)
    attended = attend_both(q, k, v, k2, v2, window)
    y = block.finish(grouped, attended).reshape(y.shape)
    return (_rows(x), _rows(y)), None

  layer = _rematerialised(layer, spec.remat)
  carry = (_rows(embed(context)), _rows(embed(inputs)))
  _, y = jax.lax.scan(layer, carry, _layers(spec, params))[0]
  y = layers.rms_norm(y, params["norm"], spec.norm_eps)
  return sharding.constrain(y, ("batch", None, None))


def _prefill(
  spec: spec_lib.Spec,
  kind: attention.Attention,
  params: Params,
  context: Int[Array, "N P"],
  context_lengths: Int[Array, "N"],
) -> tuple[Float[Array, "N D"], cache_lib.Prompts]:
  where = _positions(context_lengths, context.shape[1])
  turns, attend = _turns(spec, where), kind.over_itself(where)
  bind = _block(spec)

  def layer(x, inputs):
    block, window = bind(inputs[0]), inputs[1]
    q, k, v = block.qkv(x, turns)
    x = block.finish(x, attend(q, k, v, window))
    return _rows(x), (jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))

  x = _rows(_embed(spec, params, context))
  x, (keys, values) = jax.lax.scan(layer, x, _layers(spec, params))
  prompts = cache_lib.Prompts(keys, values, where)
  return layers.rms_norm(x[:, -1], params["norm"], spec.norm_eps), prompts


def _unstack(spec: spec_lib.Spec, params: Params) -> Params:
  # Norms are computed in float32, so theirs are not rounded.
  def cast(path, leaf):
    kept = path[-1].key.endswith("norm")
    return leaf if kept else leaf.astype(spec.compute_dtype)

  params = jax.tree_util.tree_map_with_path(cast, params)
  parts = [
    jax.tree.map(lambda x, n=n: x[n], params["layers"])
    for n in range(spec.layers)
  ]
  return {**params, "layers": tuple(parts)}


def _decode(
  spec: spec_lib.Spec,
  kind: attention.Attention,
  params: Params,
  tokens: Int[Array, "B"],
  cache: cache_lib.Cache,
) -> tuple[Float[Array, "B D"], cache_lib.Cache]:
  width = cache.positions.shape[1]
  now = cache.positions[:, -1] + 1 + cache.step - cache.entered
  attend = kind.over_cache(cache)
  turns = _turns(spec, now)
  windows = spec.windows or (0,) * spec.layers
  column = width + cache.step % cache.capacity
  bind = _block(spec)

  def write(layer, new):
    return jax.lax.dynamic_update_slice(
      layer, new[:, :, None], (0, 0, column, 0)
    )

  x = _embed(spec, params, tokens)
  keys, values = list(cache.keys), list(cache.values)
  for number, part in enumerate(params["layers"]):
    block = bind(part)
    q, k, v = block.qkv(x, turns)
    keys[number] = write(keys[number], k)
    values[number] = write(values[number], v)
    attended = attend(q, keys[number], values[number], windows[number])
    x = _rows(block.finish(x, attended))
  x = layers.rms_norm(x, params["norm"], spec.norm_eps)
  return x, cache._replace(
    keys=tuple(keys), values=tuple(values), step=cache.step + 1
  )


def _positions(lengths: Int[Array, "N"], width: int) -> Int[Array, "N P"]:
  """0 at each row's first real token; negative on its left padding."""
  return jnp.arange(width)[None, :] - (width - lengths)[:, None]


def _turns(
  spec: spec_lib.Spec, positions: Int[Array, "..."]
) -> tuple[Array, Array]:
  """Cosines and sines [..., 1, h / 2]: one axis for the heads."""
  pair = rope.angles(spec.rope, spec.head_dim, positions)
  return tuple(x[..., None, :] for x in pair)


def _layers(spec: spec_lib.Spec, params: Params) -> tuple[Params, Array]:
  windows = spec.windows or (0,) * spec.layers
  return params["layers"], jnp.asarray(windows, jnp.int32)


def _embed(spec: spec_lib.Spec, params: Params, tokens: Array) -> Array:
  return lookup.take(params["embedding"], tokens, spec.compute_dtype)


def _unembedding(spec: spec_lib.Spec, params: Params) -> Array:
  name = "embedding" if spec.tied else "unembedding"
  return params[name].astype(spec.compute_dtype)


def _rows(x: Array) -> Array:
  """Pins the stream between two layers: rows, and time over the tensor axis.

  So a layer's input is kept in parts for the backward pass, and its norms are
  computed once, where each device would else have all of time (Korthikanti et
  al. 2022, https://arxiv.org/abs/2205.05198).
  """
  axes = ("batch", "time", None) if x.ndim == 3 else ("batch", None)
  return sharding.constrain(x, axes)


def _rematerialised(layer: Callable, remat: str) -> Callable:
  """The layer, with what its backward pass keeps.

  "none": all. "dots": the matrix products with weights, and the outputs of
  attention kernels. "attention": these outputs alone. "full": nothing.
  Without kernels nothing is kept of attention, and "attention" is "full".
  """
  if remat == "none":
    return layer
  only = jax.checkpoint_policies.save_only_these_names
  policy = {
    "dots": only(layers.PRODUCT, flash.OUTPUT),
    "attention": only(flash.OUTPUT),
    "full": None,
  }[remat]
  return jax.checkpoint(layer, policy=policy, prevent_cse=False)
