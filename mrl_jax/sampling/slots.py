"""The device side of the sampler: slots that rows enter, decode in and leave.

Rows enter with a copy of their prompt's keys and values, and decoding runs
in jitted blocks whose end is dynamic: one program for each number of slots
and ring capacity, however long the block. Finished slots step on, unseen and
ignored, until another row enters or the slots are gathered into fewer.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from mrl_jax.model import cache as cache_lib
from mrl_jax.model import transformer
from mrl_jax.parallel import sharding
from mrl_jax.sampling import draws
from mrl_jax.types import Distribution

BLOCK = 64  # most tokens of a slot between two looks of the host


class State(NamedTuple):
  """What is in the slots."""

  hidden: Float[Array, "B D"]  # predicts each slot's next token
  cache: cache_lib.Cache
  keys: Array  # [B], of the rows
  live: Bool[Array, "B"]


class Drawn(NamedTuple):
  """The tokens of a block, aligned in time; a slot's first `counts` count."""

  tokens: Int[Array, "T B"]
  logprobs: Float[Array, "T B"]
  entropies: Float[Array, "T B"]
  counts: Int[Array, "B"]


class Programs(NamedTuple):
  """The jitted functions; see `make` for what each does."""

  unstack: Callable
  prefill: Callable
  empty: Callable
  enter: Callable
  refit: Callable
  block: Callable


def make(
  model: transformer.Model,
  *,
  limit: int,
  stop_ids: tuple[int, ...],
  allowed: Bool[np.ndarray, "V"],
  distribution: Distribution,
  seed: int,
) -> Programs:
  """The sampler's programs, to be called under a mesh.

  unstack(params) -> the parameters that `block` takes: gathered over the axes
    that share rows, since a step would gather them for a single token.
  prefill(params, context [N, P], lengths [N]) -> hidden [N, D], prompts.
  empty(hidden, prompts, slots, capacity) -> a state with no row.
  enter(state, hidden, prompts, picked [E], slots [E], ids [E, W]) -> the
    state with rows of the picked prompts in these slots; those beyond the
    last slot are dropped.
  refit(state, slots [E], capacity) -> the state of these slots alone.
  block(unstacked, state, floor) -> state, Drawn. Ends where `floor` or fewer
    rows are live, a live row has filled its ring, or the block is full.
  """
  stops = np.asarray(stop_ids, np.int32)
  return Programs(
    unstack=jax.jit(_make_unstack(model)),
    prefill=jax.jit(model.prefill),
    empty=jax.jit(_make_empty(seed), static_argnums=(2, 3)),
    enter=jax.jit(_make_enter(seed), donate_argnums=0),
    refit=jax.jit(_refit, static_argnums=2),
    block=jax.jit(
      _make_block(model, limit, stops, np.asarray(allowed), distribution),
      donate_argnums=1,
    ),
  )


def _make_unstack(model):
  layer = {name: axes[1:] for name, axes in model.axes["layers"].items()}

  def pin(axes, leaf):
    whole = tuple(None if name == "embed" else name for name in axes)
    return sharding.constrain(leaf, whole)

  def unstack(params):
    parts = model.unstack(params)
    axes = {**model.axes, "layers": (layer,) * len(parts["layers"])}
    return jax.tree.map(
      pin, axes, parts, is_leaf=lambda x: isinstance(x, tuple) and _named(x)
    )

  return unstack


def _named(axes) -> bool:
  """Whether a tuple is the axes of an array, not a tuple of layers."""
  return all(name is None or isinstance(name, str) for name in axes)


def _make_empty(seed):
  def empty(hidden, prompts, slots, capacity):
    cache = cache_lib.empty(prompts, slots, capacity)
    keys = draws.row_keys(seed, jnp.zeros((slots, 1), jnp.uint32))
    live = jnp.zeros((slots,), bool)
    hidden = jnp.zeros((slots, hidden.shape[1]), hidden.dtype)
    return _pin(State(hidden, cache, keys, live))

  return empty


def _make_enter(seed):
  def enter(
    state: State,
    hidden: Float[Array, "N D"],
    prompts: cache_lib.Prompts,
    picked: Int[Array, "E"],
    slots: Int[Array, "E"],
    ids: UInt32[Array, "E W"],
  ) -> State:
    def put(old, new):
      return old.at[slots].set(new, mode="drop")

    return _pin(
      State(
        put(state.hidden, hidden[picked]),
        cache_lib.enter(state.cache, prompts, picked, slots),
        put(state.keys, draws.row_keys(seed, ids)),
        put(state.live, True),
      )
    )

  return enter


def _refit(state: State, slots: Int[Array, "E"], capacity: int) -> State:
  return _pin(
    State(
      state.hidden[slots],
      cache_lib.refit(state.cache, slots, capacity),
      state.keys[slots],
      state.live[slots],
    )
  )


def _make_block(model, limit, stops, allowed, distribution):
  def run(params, state, floor):
    unembedding = model.unembedding(params)
    slots, capacity = state.live.shape[0], state.cache.capacity
    kinds = (jnp.int32, jnp.float32, jnp.float32)
    drawn = Drawn(
      *(jnp.zeros((BLOCK, slots), kind) for kind in kinds),
      jnp.zeros((slots,), jnp.int32),
    )
    start = state.cache.step

    def position(state):
      return state.cache.step - state.cache.entered

    def more(carry):
      state, _ = carry
      full = jnp.any(state.live & (position(state) >= capacity))
      room = state.cache.step - start < BLOCK
      return room & ~full & (jnp.sum(state.live) > floor)

    def step(carry):
      state, drawn = carry
      live, at = state.live, position(state)
      keys = jax.vmap(jax.random.fold_in)(state.keys, at)
      values = draws.sample(
        state.hidden,
        unembedding,
        jnp.asarray(allowed),
        distribution,
        jax.vmap(jax.random.uniform)(keys),
      )
      columns = tuple(
        jax.lax.dynamic_update_slice(
          column,
          jnp.where(live, value, jnp.zeros((), value.dtype))[None],
          (state.cache.step - start, 0),
        )
        for column, value in zip(drawn[:3], values, strict=True)
      )
      token = values[0]
      stopped = jnp.any(token[:, None] == stops[None, :], axis=-1)
      hidden, cache = model.decode(params, token, state.cache)
      going = live & ~stopped & (at + 1 < limit)
      state = State(hidden, cache, state.keys, going)
      return state, Drawn(*columns, drawn.counts + live)

    state, drawn = jax.lax.while_loop(more, step, (state, drawn))
    return _pin(state), drawn

  return run


def _pin(state: State) -> State:
  """One sharding for every program, so that each compiles once."""
  return State(
    sharding.constrain(state.hidden, ("batch", None)),
    cache_lib.pin(state.cache),
    sharding.constrain(state.keys, ("batch",)),
    sharding.constrain(state.live, ("batch",)),
  )
