"""The planner against brute force, by laws, and on answers known by hand."""

import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl_jax import config as config_lib
from mrl_jax.parallel import allocate
from mrl_jax.parallel.allocate import Cost
from mrl_jax.train import placement

NAMES = "abcd"


def cost(name, seconds, **fields):
  return Cost(name, seconds, 0.0, 0.0, **fields)


@st.composite
def problems(draw, policies=4, most=16):
  """Costs of up to four policies, devices, memory and a serial share."""
  costs = []
  for name in NAMES[: draw(st.integers(1, policies))]:
    seconds = [float(draw(st.integers(0, 20))) for _ in range(3)]
    costs.append(
      Cost(
        name,
        *seconds,
        devices=draw(st.sampled_from([1, 2, 4])),
        tensor=draw(st.sampled_from([1, 1, 2, 3, 4])),
        resident_bytes=draw(st.integers(0, 40)),
        working_bytes=draw(st.integers(0, 10)),
        rows=draw(st.sampled_from([0, 0, 8, 12])),
      )
    )
  devices = draw(st.integers(1, most))
  memory = draw(st.one_of(st.none(), st.integers(1, 30)))
  return costs, devices, memory, draw(st.sampled_from([0.0, 0.25, 1.0]))


def allowed(cost_, count, memory):
  if count < 1 or count % cost_.tensor:
    return False
  if cost_.rows and cost_.rows % (count // cost_.tensor):
    return False
  need = cost_.resident_bytes + cost_.working_bytes
  return memory is None or need / count <= memory


def brute(costs, devices, memory, serial):
  """(mode, best sorted times, seconds) by trying every division."""
  options = [
    [g for g in range(1, devices + 1) if allowed(c, g, memory)] for c in costs
  ]
  if not all(options):
    return None
  best = None
  for counts in itertools.product(*options):
    if sum(counts) <= devices:
      times = [
        allocate.predict(c, g, serial)
        for c, g in zip(costs, counts, strict=True)
      ]
      key = (sorted(times, reverse=True), sum(counts))
      best = key if best is None or key < best else best
  if best is not None:
    return "partition", best, best[0][0]
  turns = [
    allocate.predict(c, g[-1], serial)
    for c, g in zip(costs, options, strict=True)
  ]
  return "inline", None, sum(turns)


def solve(costs, devices, memory, serial):
  try:
    return allocate.plan(costs, devices, memory, serial)
  except ValueError:
    return None


@settings(max_examples=300, deadline=None)
@given(problems())
def test_the_plan_is_the_best_of_all(problem):
  costs, devices, memory, serial = problem
  expected = brute(*problem)
  found = solve(*problem)
  if expected is None:
    assert found is None
    return
  mode, best, seconds = expected
  assert found.mode == mode
  assert found.seconds == pytest.approx(seconds)
  pairs = list(zip(costs, found.devices, strict=True))
  assert all(allowed(c, g, memory) for c, g in pairs)
  if mode == "partition":
    times = [allocate.predict(c, g, serial) for c, g in pairs]
    assert (sorted(times, reverse=True), sum(found.devices)) == best
    assert sum(found.devices) <= devices
  else:
    assert all(
      not any(allowed(c, more, memory) for more in range(g + 1, devices + 1))
      for c, g in pairs
    )
  assert "\n" not in found.reason and found.mode in found.reason


@settings(max_examples=100, deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_the_policies_does_not_matter(problem, rng):
  costs, *rest = problem
  found = solve(costs, *rest)
  order = list(range(len(costs)))
  rng.shuffle(order)
  other = solve([costs[i] for i in order], *rest)
  if found is None:
    assert other is None
    return
  assert other.devices == tuple(found.devices[i] for i in order)
  assert other.seconds == pytest.approx(found.seconds)
  assert (other.mode, other.offload) == (found.mode, found.offload)


@settings(max_examples=100, deadline=None)
@given(problems(most=15))
def test_one_device_more_is_never_worse(problem):
  costs, devices, memory, serial = problem
  found = solve(*problem)
  more = solve(costs, devices + 1, memory, serial)
  if found is None:
    return
  assert more is not None
  assert (found.mode, more.mode) != ("partition", "inline")
  if found.mode == more.mode:
    assert more.seconds <= found.seconds * (1 + 1e-12)


def test_devices_follow_the_seconds():
  costs = [cost("small", 10.0), cost("big", 30.0)]
  found = allocate.plan(costs, 8)
  assert found.mode == "partition"
  assert found.devices == (2, 6)
  assert found.seconds == 5.0
  assert "big" in found.reason or "small" in found.reason


def test_seconds_measured_on_more_devices_count_for_more():
  costs = [cost("one", 10.0, devices=1), cost("four", 10.0, devices=4)]
  assert allocate.plan(costs, 5).devices == (1, 4)


def test_greedy_giving_would_miss_the_best():
  """One device at a time gets stuck: `wide` only takes four at once."""
  costs = [cost("wide", 48.0, tensor=4), cost("narrow", 10.0)]
  found = allocate.plan(costs, 9)
  assert found.devices == (8, 1)
  assert found.seconds == 10.0


def test_leftover_devices_go_where_they_help():
  costs = [cost("a", 12.0, tensor=2), cost("b", 3.0)]
  # a takes 4 of 5; the last helps only b, which has to have one anyway.
  assert allocate.plan(costs, 5).devices == (4, 1)
  # The second largest time counts too.
  assert allocate.plan([*costs, cost("c", 3.0)], 7).devices == (4, 2, 1)


def test_devices_that_help_nobody_stay_idle():
  costs = [cost("a", 5.0), cost("b", 2.0)]
  found = allocate.plan(costs, 8, serial=1.0)
  assert found.devices == (1, 1)
  assert found.seconds == 5.0


def test_ties_go_to_the_first_name():
  assert allocate.plan([cost("b", 1.0), cost("a", 1.0)], 3).devices == (1, 2)


def test_too_few_devices_take_turns():
  costs = [cost("a", 4.0), cost("b", 6.0, tensor=2)]
  found = allocate.plan(costs, 2)
  assert found.mode == "inline"
  assert found.devices == (2, 2)
  assert found.seconds == 4.0 / 2 + 6.0 / 2
  assert not found.offload
  assert "at least 3 devices (a 1, b 2), there are 2" in found.reason


def test_memory_forces_turns_and_says_who_leaves():
  costs = [
    cost("a", 4.0, resident_bytes=60, working_bytes=20),
    cost("b", 6.0, resident_bytes=90, working_bytes=20),
  ]
  assert allocate.plan(costs, 8).mode == "partition"
  assert allocate.plan(costs, 8, 28).devices == (3, 5)  # at least 3 and 4
  found = allocate.plan(costs, 8, 18)  # b alone needs 7, a needs 5
  assert (found.mode, found.devices) == ("inline", (8, 8))
  assert found.offload  # 150 / 8 + 20 / 8 > 18
  roomy = [c._replace(working_bytes=150) for c in costs]
  assert allocate.plan(roomy, 8, 38).mode == "inline"
  assert not allocate.plan(roomy, 8, 38).offload  # 150 / 8 + 150 / 8 < 38
  assert "idle ones leave" in found.reason


def test_a_batch_is_divided_evenly():
  costs = [cost("a", 10.0, rows=64), cost("b", 1.0, rows=64)]
  assert allocate.plan(costs, 8).devices == (4, 4)


def test_a_policy_that_fits_nowhere_is_named():
  big = cost("big", 1.0, resident_bytes=3 * 2**30, working_bytes=2**30)
  with pytest.raises(ValueError, match=r"big: needs 4.0 GiB.*1.0 GiB.* 2 dev"):
    allocate.plan([cost("a", 1.0), big], 2, 2**30)
  with pytest.raises(ValueError, match="wide: needs a multiple of tensor=8"):
    allocate.plan([cost("wide", 1.0, tensor=8)], 4)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"devices": 0}, "devices=0"),
    ({"serial": 1.5}, r"serial=1.5 must be in \[0, 1\]"),
    ({"memory_bytes_per_device": 0}, "memory_bytes_per_device=0"),
    ({"costs": []}, "at least one policy"),
    ({"costs": [cost("a", 1.0), cost("a", 2.0)]}, "must differ"),
    ({"costs": [cost("a", -1.0)]}, "a: generate=-1.0"),
    ({"costs": [cost("a", float("nan"))]}, "a: generate=nan"),
    ({"costs": [cost("a", 1.0, tensor=0)]}, "a: tensor=0"),
  ],
)
def test_wrong_fields_are_named(fields, message):
  arguments = {"costs": [cost("a", 1.0)], "devices": 2} | fields
  with pytest.raises(ValueError, match=message):
    allocate.plan(**arguments)


def test_a_large_machine_is_planned_quickly():
  rng = random.Random(0)
  costs = [cost(name, rng.uniform(1, 100), tensor=4) for name in NAMES]
  start = time.process_time()
  found = allocate.plan(costs, 512, serial=0.1)
  assert time.process_time() - start < 5
  assert sum(found.devices) == 512


def test_shares_of_a_tpu_divide_it():
  """Six and two would be best; the compiler takes neither six nor three."""
  costs = [cost("a", 6.0), cost("b", 2.0)]
  assert allocate.plan(costs, 8).devices == (6, 2)
  even = allocate.plan(costs, 8, even=True)
  assert even.devices == (4, 4)
  assert even.seconds == pytest.approx(6 / 4)


def test_a_share_that_does_not_divide_a_tpu_is_refused_at_start():
  values = {"workdir": "w", "policies": ("a", "b", "c")}
  config = config_lib.Config(**values, executor="partition")
  assert placement.shares(config, 16, "cpu") == (5, 5, 5)
  assert placement.shares(config, 16, "tpu") == (4, 4, 4)
  config = config_lib.Config(**values, executor="partition", shares=(8, 4, 3))
  assert placement.shares(config, 16, "cpu") == (8, 4, 3)
  with pytest.raises(config_lib.ConfigError, match="must each divide the 16"):
    placement.shares(config, 16, "tpu")
