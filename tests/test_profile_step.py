"""The profile's parts are all of the time, and its products the model's."""

import pytest

from experiments import bench, profile_step
from mrl_jax.model import arithmetic

SHAPE = bench.Shape(2, 32, 96, 2, 1, 24, 80, 2, 2, 8, 16)


def test_parts_add_up_and_products_are_the_models():
  parts, recorder = profile_step.parts_of(SHAPE, "float32", "none")
  update = profile_step.passes(parts)["update"]
  found = profile_step.measure(recorder, update, 1)
  seconds = sum(part["seconds"] for part in found["parts"].values())
  assert seconds + found["outside"] == pytest.approx(found["cpu"])
  for part in found["parts"].values():
    runs = sum(part[run] for run in profile_step.RUNS)
    assert runs == pytest.approx(part["seconds"])
  spec = bench.model_spec(SHAPE, "float32", "none")
  needed = arithmetic.training(spec, arithmetic.Rows(2, 8, 2, 16))
  flops = sum(part["flops"] for part in found["parts"].values())
  # The last layer does nothing for the prompts; masked pairs are computed.
  assert 0.95 * needed < flops < 1.5 * needed
  assert found["parts"]["feed-forward"]["flops"] > 0.4 * needed
