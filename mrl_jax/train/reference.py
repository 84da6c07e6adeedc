"""What the frozen reference says of a stage's rows, in one forward pass.

A KL to the initial policy needs its log-probs, a potential its states; where
a recipe wants both, they come from the same pass.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool

from mrl_jax import config as config_lib
from mrl_jax.kernels import logprobs
from mrl_jax.model import transformer
from mrl_jax.parallel import sharding
from mrl_jax.shaping import potential
from mrl_jax.train import update
from mrl_jax.types import Batch, Distribution


class Reference(NamedTuple):
  """A potential, on the devices, and the pass that it needs."""

  potential: potential.Potential
  # (reference's parameters, batch, rows that share a prompt) -> "potentials"
  # [B, T], and "ref_logprobs" [B, T] where a KL asks for them.
  score: Callable[[Any, Batch, int], dict[str, Array]]


def make(
  model: transformer.Model,
  mesh: jax.sharding.Mesh,
  found: potential.Potential,
  *,
  allowed: Bool[np.ndarray, "V"],
  distribution: Distribution,
  microbatches: int = 1,
  compared: bool = False,
) -> Reference:
  """Compiles nothing yet; `compared` asks for the log-probs too."""
  mask = jax.numpy.asarray(allowed)
  weights = jax.device_put(found.params, sharding.replicated(mesh))

  def part(params, shape, batch: Batch, share: int) -> dict[str, Array]:
    states = model.hidden(
      params,
      batch.context[::share],
      batch.context_lengths[::share],
      batch.tokens,
    )
    real = batch.weights != 0
    out = {"potentials": potential.values(found.spec, shape, states, real)}
    if compared:
      unembedding = model.unembedding(params)
      scores = logprobs.score(
        states, unembedding, batch.tokens, mask, distribution
      )
      out["ref_logprobs"] = scores.logprobs
    return out

  def run(params, shape, batch: Batch, share: int) -> dict[str, Array]:
    rows = update.split(batch, microbatches, share)
    parts = jax.lax.map(lambda b: part(params, shape, b, share), rows)
    return update.merge(parts, share)

  run = jax.jit(run, static_argnums=3, out_shardings=sharding.batch(mesh))
  return Reference(
    found, lambda params, batch, share: run(params, weights, batch, share)
  )


def read(
  config: config_lib.Config,
  number: int,
  model: transformer.Model,
  params: Any,
) -> potential.Potential | None:
  """The potential of one policy's flags; None where its recipe has none.

  Raises:
    ConfigError: there is none, or it is another policy's.
  """
  if "merla" not in config.of("recipe", number).split("+"):
    return None
  directory = config.of("potential", number)
  try:
    found = potential.load(directory)
    potential.check(found, model, params)
  except (ValueError, OSError) as error:
    raise config_lib.ConfigError("potential", directory, str(error)) from None
  return found
