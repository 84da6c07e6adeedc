"""One optimiser step: prepare the rows, add up microbatches, apply.

The recipe's transforms turn the mask into a loss measure over the *whole*
update batch, inside the same jitted step; after that the objective is a
plain weighted sum, so microbatch gradients add exactly, whatever their
number and the device count. A step whose loss or gradient is not finite is
skipped and counted: one bad row costs one update, never the run.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Int

from mrl_jax import diagnostics, losses
from mrl_jax.kernels import logprobs
from mrl_jax.kernels import veto as veto_lib
from mrl_jax.model import transformer
from mrl_jax.parallel import sharding
from mrl_jax.train import state as state_lib
from mrl_jax.types import (
  Batch,
  BatchTransform,
  Distribution,
  Scores,
  Source,
  TokenLoss,
)

# Their last argument says how many rows in turn share a prompt; static.
Update = Callable[
  [state_lib.TrainState, Batch, int], tuple[state_lib.TrainState, Any]
]
Score = Callable[[Any, Batch, int], Scores]
Gradient = Callable[[Any, Batch, int], tuple[Array, Any, Any]]


def scorer(
  model: transformer.Model,
  allowed: Bool[np.ndarray, "V"],
  distribution: Distribution,
) -> Score:
  """`score(params, batch, share)`: log-probs and entropies of the tokens.

  Each `share` rows in turn have one prompt, which is computed once.
  """
  mask = jnp.asarray(allowed)

  def score(params, batch: Batch, share: int) -> Scores:
    hidden = model.hidden(
      params,
      batch.context[::share],
      batch.context_lengths[::share],
      batch.tokens,
    )
    unembedding = model.unembedding(params)
    return logprobs.score(hidden, unembedding, batch.tokens, mask, distribution)

  return score


def split(batch: Batch, count: int, share: int) -> Batch:
  """Leaves [B, ...] -> [count, B / count, ...], never parting `share` rows.

  The n-th prompt goes to microbatch n % count, so each microbatch stays
  spread over the same devices and no row moves.
  """

  def leaf(x):
    rest = x.shape[1:]
    x = x.reshape(-1, count, share, *rest)
    return jnp.swapaxes(x, 0, 1).reshape(count, -1, *rest)

  return jax.tree.map(leaf, batch)


def merge(tree: Any, share: int) -> Any:
  """The inverse of `split`, for any tree of [count, B / count, ...]."""

  def leaf(x):
    rest = x.shape[2:]
    x = x.reshape(x.shape[0], -1, share, *rest)
    return jnp.swapaxes(x, 0, 1).reshape(-1, *rest)

  return jax.tree.map(leaf, tree)


def make_score(
  model: transformer.Model,
  mesh: jax.sharding.Mesh,
  *,
  allowed: Bool[np.ndarray, "V"],
  distribution: Distribution,
  microbatches: int = 1,
) -> Score:
  """Jitted `score`, microbatch by microbatch, without a gradient."""
  score = scorer(model, allowed, distribution)

  def run(params, batch: Batch, share: int) -> Scores:
    rows = split(batch, microbatches, share)
    return merge(jax.lax.map(lambda b: score(params, b, share), rows), share)

  return jax.jit(run, static_argnums=2, out_shardings=sharding.batch(mesh))


def make_gradient(
  model: transformer.Model,
  loss: TokenLoss,
  *,
  allowed: Bool[np.ndarray, "V"],
  distribution: Distribution,
  microbatches: int = 1,
  veto: veto_lib.Rule | None = None,
) -> Gradient:
  """`gradient(params, batch, share)` -> loss, diagnostics' sums, gradients.

  The batch is a prepared one: its weights are the loss measure, so the
  gradient of the whole is the sum over the microbatches. `veto` is the rule
  in the loss, for the sums alone.
  """
  one = _part(model, loss, allowed, distribution, veto)

  def gradient(params, batch: Batch, share: int):
    if microbatches == 1:
      return one(params, batch, share)
    rows = split(batch, microbatches, share)
    first = jax.tree.map(lambda x: x[0], rows)
    shapes = jax.eval_shape(lambda p, b: one(p, b, share), params, first)
    carry = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def body(carry, rows):
      return add(carry, one(params, rows, share)), None

    return jax.lax.scan(body, carry, rows)[0]

  return gradient


def add(carry: tuple[Array, Any, Any], part: tuple[Array, Any, Any]):
  """Losses, sums and gradients of two parts of a batch."""
  value, sums, grads = carry
  v, s, g = part
  grads = jax.tree.map(jnp.add, grads, g)
  return value + v, diagnostics.merge(sums, s), grads


def _part(model, loss, allowed, distribution, veto) -> Gradient:
  """The gradient of rows that are computed together."""
  score = scorer(model, allowed, distribution)
  objective = losses.objective(loss)

  def one(params, rows: Batch, share: int):
    def part(params):
      scores = score(params, rows, share)
      return objective(scores, rows), diagnostics.measure(scores, rows, veto)

    (value, sums), grads = jax.value_and_grad(part, has_aux=True)(params)
    # Where their parameters lie, before they are added to others.
    return value, sums, jax.tree.map(sharding.constrain, grads, model.axes)

  return one


def make(
  model: transformer.Model,
  optimizer: optax.GradientTransformation,
  prepare: BatchTransform,
  loss: TokenLoss,
  shardings: state_lib.TrainState,
  mesh: jax.sharding.Mesh,
  *,
  allowed: Bool[np.ndarray, "V"],
  distribution: Distribution,
  microbatches: int = 1,
  veto: veto_lib.Rule | None = None,
) -> Update:
  """Builds the jitted `update(state, batch, share) -> (state, report)`.

  The report is a dict: "loss", "grad_norm", "step", "skipped", "staleness"
  (of the policy's oldest own row: updates since it was sampled), "ratio_max"
  (of its own tokens), "tokens", the diagnostics' sums (see
  `diagnostics.summarize`), and what `diagnostics.shaping` says.
  `veto` is the rule in the loss, for the sums.
  """
  gradient = make_gradient(
    model,
    loss,
    allowed=allowed,
    distribution=distribution,
    microbatches=microbatches,
    veto=veto,
  )

  def update(state, batch: Batch, share: int):
    shaped = diagnostics.shaping(batch)
    batch = prepare(batch)
    found = gradient(state.params, batch, share)
    return apply(optimizer, state, batch, found, shaped)

  everywhere = sharding.replicated(mesh)
  return jax.jit(
    update,
    donate_argnums=0,
    static_argnums=2,
    in_shardings=(shardings, sharding.batch(mesh)),
    out_shardings=(shardings, everywhere),
  )


def apply(
  optimizer: optax.GradientTransformation,
  state: state_lib.TrainState,
  batch: Batch,
  found: tuple[Array, Any, Any],
  shaped: dict[str, Array],
) -> tuple[state_lib.TrainState, dict[str, Any]]:
  """The state after a step, or as it was if the step is not finite.

  Args:
    optimizer: of the policy.
    state: before.
    batch: prepared.
    found: what a `Gradient` returns.
    shaped: what `diagnostics.shaping` says of the batch.
  """
  value, sums, grads = found
  norm = optax.global_norm(grads)
  fine = jnp.isfinite(norm) & jnp.isfinite(value)
  changes, opt_state = optimizer.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, changes)
  params, opt_state = jax.tree.map(
    lambda new, old: jnp.where(fine, new, old),
    (params, opt_state),
    (state.params, state.opt_state),
  )
  one = fine.astype(jnp.int32)
  new = state_lib.TrainState(
    params, opt_state, state.step + one, state.skipped + 1 - one
  )
  report = {
    "loss": value,
    "grad_norm": norm,
    "step": new.step,
    "skipped": new.skipped,
    "staleness": staleness(state.step, batch),
    "ratio_max": sums.ratio_max[Source.OWN],
    "tokens": sums,
    **shaped,
  }
  return new, report


def staleness(step: Int[Array, ""], batch: Batch) -> Int[Array, ""]:
  """Updates between the oldest own row's and this one; 0 without any."""
  own = batch.source == int(Source.OWN)
  return jnp.where(own, step - batch.version, 0).max()
