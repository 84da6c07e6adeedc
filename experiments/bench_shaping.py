"""What a potential costs: a reference pass with it, and the same without.

Both are timed in turn on the same batch, so that the difference is the
potential's. Where a KL wants the reference's log-probs anyway, the potential
reads the states of that pass; where none does, the pass is its own, and the
log-probs are left out of it. `potential_of_states` is what is beyond a pass.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mrl_jax.shaping import potential
from mrl_jax.train import reference
from mrl_jax.types import Batch, Distribution


def measure(
  parts: Any, batch: Batch, microbatches: int, reps: int
) -> dict[str, float]:
  """CPU seconds (medians) of the passes; `parts` is a `bench.Parts`."""
  spec = potential.Spec(width=parts.shape.width)
  params = potential.sealed(potential.init(spec, jax.random.key(0)), spec.cap)
  found = potential.Potential(spec, params, np.zeros(spec.width, np.float32))

  def made(compared: bool):
    return reference.make(
      parts.model,
      parts.mesh,
      found,
      allowed=np.ones(parts.shape.vocab, bool),
      distribution=Distribution(),
      microbatches=microbatches,
      compared=compared,
    ).score

  samples, shape = parts.shape.samples, parts.shape
  shared, alone = made(compared=True), made(compared=False)
  size = (shape.prompts * shape.samples, shape.completion_length, shape.width)
  states = jax.random.normal(jax.random.key(1), size)
  values = jax.jit(functools.partial(potential.values, spec, params))
  calls = {
    "logprobs": lambda: parts.score(parts.reference, batch, samples),
    "logprobs_and_potential": lambda: shared(parts.reference, batch, samples),
    "potential": lambda: alone(parts.reference, batch, samples),
    "potential_of_states": lambda: values(states, batch.weights != 0),
  }
  seconds: dict[str, list[float]] = {name: [] for name in calls}
  for _ in range(reps + 1):  # the first one compiles
    for name, call in calls.items():
      seconds[name].append(_cpu(call))
  return {
    name: round(statistics.median(values[1:]), 4)
    for name, values in seconds.items()
  }


def _cpu(call: Callable[[], Any]) -> float:
  start = time.process_time()
  jax.block_until_ready(call())
  return time.process_time() - start
