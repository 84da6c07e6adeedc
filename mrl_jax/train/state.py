"""The training state of one policy, and where each of its arrays lives.

Every output of a jitted step has an explicit sharding: an optimiser state
built by a bare `jit(optimizer.init)` would leave Adam's moments on one
device, and a compiled step can then fail on its second call.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from mrl_jax.parallel import sharding


class TrainState(NamedTuple):
  """What an update reads and writes; donated to it."""

  params: Any  # nested dict of float32 arrays
  opt_state: Any
  step: Int[Array, ""]  # updates applied
  skipped: Int[Array, ""]  # updates skipped: loss or gradient not finite


def make_optimizer(
  lr: float,
  total: int,
  *,
  schedule: str = "constant",
  warmup: int = 0,
  b1: float = 0.9,
  b2: float = 0.999,
  weight_decay: float = 0.0,
  clip_norm: float = 0.0,
) -> optax.GradientTransformation:
  """AdamW behind a global-norm clip, over `total` updates."""
  after = max(total - warmup, 1)
  shape = {
    "constant": optax.constant_schedule(lr),
    "linear": optax.linear_schedule(lr, 0.0, after),
    "cosine": optax.cosine_decay_schedule(lr, after),
  }[schedule]
  if warmup:
    ramp = optax.linear_schedule(lr / warmup, lr, warmup - 1)
    shape = optax.join_schedules([ramp, shape], [warmup])
  clip = optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity()
  adam = optax.adamw(shape, b1=b1, b2=b2, weight_decay=weight_decay)
  return optax.chain(clip, adam)


def init(
  optimizer: optax.GradientTransformation,
  params: Any,
  mesh: jax.sharding.Mesh,
) -> TrainState:
  """The state at update 0, each leaf on its own devices."""
  shardings = of(optimizer, params, mesh)
  opt_state = jax.jit(optimizer.init, out_shardings=shardings.opt_state)(params)
  zero = jax.device_put(jnp.zeros((), jnp.int32), shardings.step)
  return TrainState(params, opt_state, zero, zero + 0)


def of(
  optimizer: optax.GradientTransformation,
  params: Any,
  mesh: jax.sharding.Mesh,
) -> TrainState:
  """The shardings of a state, as a TrainState of NamedShardings.

  Moments lie as their parameters lie; everything else is replicated.
  """
  everywhere = sharding.replicated(mesh)
  lies = jax.tree.map(lambda leaf: leaf.sharding, params)
  shapes = jax.eval_shape(optimizer.init, params)
  opt_state = optax.tree_map_params(
    optimizer,
    lambda _, lie: lie,
    shapes,
    lies,
    transform_non_params=lambda _: everywhere,
  )
  return TrainState(lies, opt_state, everywhere, everywhere)


def abstract(state: TrainState, shardings: TrainState) -> TrainState:
  """Shapes, dtypes and shardings: what a checkpoint is restored into."""
  return jax.tree.map(
    lambda leaf, lie: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=lie
    ),
    state,
    shardings,
  )
