"""The profile's parts are all of the time, and its products the model's."""

import pytest

from experiments import bench, profile_parts, profile_step
from mrl_jax.model import arithmetic

# No two of its sizes are equal, so that no product passes for another.
SHAPE = bench.Shape(2, 32, 96, 2, 1, 24, 80, 2, 4, 8, 16)
ROWS = arithmetic.Rows(2, 8, 4, 16)
SPEC = bench.model_spec(SHAPE, "float32", "dots")


@pytest.fixture(scope="module")
def found():
  parts, recorder = profile_step.parts_of(SHAPE, "float32")
  return {
    name: profile_step.measure(recorder, run, 2)
    for name, run in profile_step.passes(parts).items()
  }


@pytest.mark.parametrize("name", ["sampling", "update"])
def test_parts_add_up_to_what_was_measured(name, found):
  parts = found[name]["parts"]
  seconds = sum(part["seconds"] for part in parts.values())
  assert seconds > 0 and 0 <= found[name]["outside"] < found[name]["cpu"]
  assert seconds + found[name]["outside"] == pytest.approx(found[name]["cpu"])
  for part in parts.values():
    runs = sum(part[run] for run in profile_step.RUNS)
    assert runs == pytest.approx(part["seconds"])


def _flops(found):
  return {name: part["flops"] for name, part in found["parts"].items()}


def _dense(tokens):
  """Products with the weights of the layers: attention's, feed-forward's."""
  feed = 2 * SPEC.layers * 3 * SPEC.width * SPEC.mlp * tokens
  all_ = 2 * SPEC.layers * arithmetic.layer_parameters(SPEC) * tokens
  return all_ - feed, feed


def test_products_of_an_update_are_the_models(found):
  flops = _flops(found["update"])
  projections, feed = _dense(ROWS.tokens)
  assert flops["projections"] == 3 * projections
  assert flops["feed-forward"] == 3 * feed
  # A single block of logits, which the compiler shares with the backward pass.
  logits = arithmetic.logits(SPEC, ROWS.completions)
  assert flops["unembedding and softmax"] == 3 * logits
  # All pairs, those ahead included: forward, again, and twice in backward.
  pairs = ROWS.prompts * ROWS.prompt**2
  pairs += ROWS.prompts * ROWS.samples * 16 * (ROWS.prompt + 16)
  forward = 4 * SPEC.heads * SPEC.head_dim * pairs * SPEC.layers
  assert flops["attention"] == 4 * forward


def test_products_of_sampling_are_the_models(found):
  flops = _flops(found["sampling"])
  prompts, completions = ROWS.prompts * ROWS.prompt, ROWS.completions
  projections, feed = _dense(prompts + completions)
  assert flops["projections"] == projections
  assert flops["feed-forward"] == feed
  assert flops["drawing"] == arithmetic.logits(SPEC, completions)


def test_time_inside_a_span_is_not_its_own():
  about = {"hlo_module": "m", "run_id": 1}
  spans = [
    (0, -10, "loop", about),
    (1, -4, "a", about),
    (2, -1, "b", about),
    (6, -2, "a", about),
    (12, -3, "c", about),
  ]
  own = [(event.name, event.own) for event in profile_step._own(spans)]
  ns = 1e-9
  want = [("b", ns), ("a", 3 * ns), ("a", 2 * ns), ("loop", 4 * ns)]
  assert own == [(n, pytest.approx(s)) for n, s in [*want, ("c", 3 * ns)]]


def test_a_place_in_the_source_has_its_part():
  def part(*frames):
    return profile_parts.part_of([profile_parts.Frame(*f) for f in frames])

  layers, update = "/x/mrl_jax/model/layers.py", "/x/mrl_jax/train/update.py"
  outer = (update, "make.<locals>.update")
  assert part((layers, "rms_norm"), (layers, "Block.qkv")) == "norm and rope"
  assert part((layers, "_project"), (layers, "Block.qkv")) == "projections"
  assert part(("/y/optax/transforms/_adding.py", "f"), outer) == "optimiser"
  assert part(("/x/mrl_jax/losses.py", "f"), outer) == "losses and diagnostics"
  assert part(outer) == "optimiser"
  assert part(("/z/other.py", "f")) is None
