"""Keys and values of the rows that are being decoded, one row in each slot.

A slot's columns are its row's prompt, then a ring for the completion. All
slots write the same ring column, the global step modulo the capacity: a
write is one slice for all rows, whenever they entered. A row that entered at
step s owns the columns written since then, so a column of age a is its own
if a <= step - s, and nothing needs to be erased when a row leaves. Layers are
separate arrays, which attention then reads where they lie.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mrl_jax.parallel import sharding


class Prompts(NamedTuple):
  """Keys and values of N prompts, left-padded."""

  keys: Float[Array, "L N K P h"]
  values: Float[Array, "L N K P h"]
  positions: Int[Array, "N P"]  # of each column; negative on the padding


class Cache(NamedTuple):
  """What `decode` attends to: in each of B slots, P prompt columns, a ring."""

  keys: tuple[Float[Array, "B K C h"], ...]  # one array for each layer
  values: tuple[Float[Array, "B K C h"], ...]
  positions: Int[Array, "B P"]  # of the prompt's columns
  entered: Int[Array, "B"]  # the global step at which the row entered
  step: Int[Array, ""]  # tokens written to each slot so far

  @property
  def capacity(self) -> int:
    """Completion tokens that a row can hold."""
    return self.keys[0].shape[2] - self.positions.shape[1]


class Bounds(NamedTuple):
  """The columns that the token now being written attends to, in each slot."""

  start: Int[Array, "B"]  # the first column of the prompt
  count: Int[Array, "B"]  # the last so many of the ring, up to `newest`
  newest: Int[Array, ""]  # the ring column of this token

  def hold(self, columns: Array, width: int, capacity: int) -> Array:
    """Whether they hold these columns, of a prompt of `width` and a ring."""
    age = self.newest - (columns - width)
    age += jnp.where(age < 0, capacity, 0)
    in_ring = (columns >= width) & (columns < width + capacity)
    in_prompt = (columns < width) & (columns >= self.start)
    return in_prompt | (in_ring & (age < self.count))


def bounds(cache: Cache, window: int) -> Bounds:
  """The columns in a window of so many tokens; 0 is all of the row's."""
  width, capacity = cache.positions.shape[1], cache.capacity
  start, count = -cache.positions[:, 0], cache.step - cache.entered + 1
  if window:
    # Column c of the prompt is width - c + count - 1 tokens back.
    start = jnp.maximum(start, width + count - window)
    count = jnp.minimum(count, window)
  return Bounds(start, jnp.minimum(count, capacity), cache.step % capacity)


def seen(cache: Cache, window: int) -> Bool[Array, "B C"]:
  """Which columns the token now being written attends to."""
  start, count, newest = bounds(cache, window)
  width, capacity = cache.positions.shape[1], cache.capacity
  columns = jnp.arange(width + capacity)[None, :]
  found = Bounds(start[:, None], count[:, None], newest)
  return found.hold(columns, width, capacity)


def empty(prompts: Prompts, slots: int, capacity: int) -> Cache:
  """A cache for rows of such prompts; no slot holds a row."""
  layers, _, heads, width, size = prompts.keys.shape
  shape = (slots, heads, width + capacity, size)

  def zeros():
    return tuple(jnp.zeros(shape, prompts.keys.dtype) for _ in range(layers))

  return Cache(
    zeros(),
    zeros(),
    jnp.zeros((slots, width), jnp.int32),
    jnp.zeros((slots,), jnp.int32),
    jnp.zeros((), jnp.int32),
  )


def enter(
  cache: Cache,
  prompts: Prompts,
  picked: Int[Array, "E"],
  slots: Int[Array, "E"],
) -> Cache:
  """Rows of the picked prompts enter these slots; beyond B they are dropped."""
  width = cache.positions.shape[1]

  def write(columns, new):
    return tuple(
      old.at[slots, :, :width].set(layer[picked], mode="drop")
      for old, layer in zip(columns, new, strict=True)
    )

  positions = prompts.positions[picked]
  return cache._replace(
    keys=write(cache.keys, prompts.keys),
    values=write(cache.values, prompts.values),
    positions=cache.positions.at[slots].set(positions, mode="drop"),
    entered=cache.entered.at[slots].set(cache.step, mode="drop"),
  )


def refit(cache: Cache, slots: Int[Array, "E"], capacity: int) -> Cache:
  """The cache of these slots alone, with a ring of `capacity` columns.

  New column c holds the latest step t with t = c modulo the new capacity; it
  was in column t modulo the old one, if t is not older than that ring.
  """
  width = cache.positions.shape[1]
  last = cache.step - 1
  steps = last - (last - jnp.arange(capacity)) % capacity
  ring = width + steps % cache.capacity
  columns = jnp.concatenate([jnp.arange(width), ring])

  def place(layers):
    return tuple(jnp.take(x[slots], columns, axis=2) for x in layers)

  return cache._replace(
    keys=place(cache.keys),
    values=place(cache.values),
    positions=cache.positions[slots],
    entered=cache.entered[slots],
  )


def pin(cache: Cache) -> Cache:
  """Spreads slots over the data axes and heads over the tensor axis."""

  def layers(columns):
    axes = ("batch", "kv_heads", None, None)
    return tuple(sharding.constrain(layer, axes) for layer in columns)

  return Cache(
    layers(cache.keys),
    layers(cache.values),
    sharding.constrain(cache.positions, ("batch", None)),
    sharding.constrain(cache.entered, ("batch",)),
    sharding.constrain(cache.step, ()),
  )
