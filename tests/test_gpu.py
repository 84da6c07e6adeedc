"""What only a GPU can show: its sums, its bfloat16, its compilations.

`python -m experiments.bench_gpu` runs these. MRL_TEST_GPU=cpu runs them on a
CPU, which says that the tests themselves are in order.
"""

import os

import jax
import numpy as np
import pytest

from experiments import bench
from mrl_jax.parallel import mesh as mesh_lib
from tests import test_update

pytestmark = pytest.mark.gpu
SHAPE = bench.Shape(2, 64, 128, 4, 2, 16, 64, 4, 4, 16, 24)


@pytest.fixture(autouse=True)
def _device():
  if os.environ.get("MRL_TEST_GPU") != "cpu" and jax.default_backend() != "gpu":
    pytest.skip("needs a GPU; python -m experiments.bench_gpu runs it there")


def parts():
  return bench.Parts(SHAPE, "bfloat16", "dots", 2)


def test_an_update_is_the_cpus():
  with jax.default_matmul_precision("highest"):
    found, wanted = (
      test_update.step(
        mesh_lib.make(1, 1, 1, devices=[d]), test_update.batch(), updates=2
      )
      for d in (jax.devices()[0], jax.devices("cpu")[-1])
    )
  test_update.close(found, wanted, atol=1e-4)


def test_the_sampler_says_what_the_scorer_says():
  own = parts()
  out = own.sample()
  batch = own.batch(out)
  scored = own.score(own.state.params, batch, SHAPE.samples).logprobs
  drawn = np.asarray(batch.weights) > 0
  assert drawn.sum() == SHAPE.prompts * SHAPE.samples * SHAPE.completion_length
  error = np.abs(np.asarray(scored) - np.asarray(batch.behavior_logprobs))
  # Two programs round 8 bits differently: 0.004 on a CPU, where positions that
  # are off by one cost 0.26.
  assert error[drawn].mean() < 0.02
  assert error[drawn].max() < 0.1


def test_a_second_step_compiles_nothing():
  own = parts()
  own.step(0)
  compiled = []
  name = "/jax/core/compile/backend_compile_duration"
  listen = lambda event, *_, **__: event == name and compiled.append(event)  # noqa: E731
  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    own.step(1)
    assert not compiled
    jax.jit(lambda x: x + 41)(np.ones(3))  # the listener does hear
    assert compiled
  finally:
    jax.monitoring.clear_event_listeners()
