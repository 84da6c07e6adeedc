"""Shapes of what a policy's programs take, without the arrays.

Prompts and completions have the lengths of the limits, the longest that a run
can meet.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from mrl_jax import collate, recipes
from mrl_jax import config as config_lib
from mrl_jax.model import arithmetic
from mrl_jax.parallel import sharding
from mrl_jax.types import Batch, Peers, Shaping, Trace


def placed(shapes: Any, places: Any) -> Any:
  """Shapes with their shardings."""
  return jax.tree.map(
    lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
    shapes,
    places,
  )


def device_bytes(tree: Any) -> int:
  """Bytes of a tree of shapes on one device."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )


def rows(config: config_lib.Config, number: int) -> arithmetic.Rows:
  """Of one update; what peers wrote counts like own completions."""
  return arithmetic.Rows(
    config.prompts // config.updates,
    collate.bucket(config.prompt_limit),
    config.of("samples", number) + _foreign(config, number),
    collate.bucket(config.completion_limit),
  )


def _foreign(config: config_lib.Config, number: int) -> int:
  """Rows of peers that stand behind each group."""
  names = config.of("recipe", number).split("+")
  count = 0
  if "prp" in names:
    count += config.peer_samples or config.of("samples", number)
  if "sgt" in names:
    count += config.rescue_samples
  return count


def shaped(config: config_lib.Config, number: int) -> bool:
  """Whether the policy has a potential."""
  return "merla" in config.of("recipe", number).split("+")


def batch(
  config: config_lib.Config,
  number: int,
  recipe: recipes.Recipe,
  mesh: jax.sharding.Mesh,
) -> Batch:
  """An update's rows, as wide as they can be."""
  found = rows(config, number)
  count = found.prompts * found.samples
  place = sharding.batch(mesh)

  def leaf(*dims, kind=jnp.float32):
    return jax.ShapeDtypeStruct((count, *dims), kind, sharding=place)

  number_ = functools.partial(leaf, kind=jnp.int32)
  width = found.completion
  numbers = {f: leaf(width) for f in Trace._fields}
  numbers |= {
    f: number_(width) for f in ("first", "last", "chunk_start", "chunk_stop")
  }
  kl = bool(config.kl_coefficient)
  return Batch(
    context=number_(found.prompt),
    context_lengths=number_(),
    tokens=number_(width),
    weights=leaf(width),
    behavior_logprobs=leaf(width),
    rewards=leaf(),
    advantages=leaf(),
    credit=leaf(width),
    bonus=leaf(),
    clip_low=leaf(),
    clip_high=leaf(),
    group=number_(),
    source=number_(),
    version=number_(),
    peers=Peers(leaf(), leaf(), leaf()),
    old_logprobs=leaf(width) if recipe.rescore else None,
    ref_logprobs=leaf(width) if kl else None,
    trace=Trace(**numbers) if "trajectory" in recipe.needs else None,
    shaping=Shaping(leaf(width), leaf()) if shaped(config, number) else None,
  )
