"""Whole runs of several policies: what they exchange, and what may go wrong."""

import threading

import jax
import numpy as np
import pytest

from mrl_jax import config as config_lib
from mrl_jax.exchange import codec, store
from mrl_jax.train import executor
from tests import runs

EXCHANGE = ("exchange/", "rescue/", "values/", "peer/")


@pytest.fixture(scope="module")
def paths():
  """Warm starts: random policies would solve nothing and so learn nothing."""
  assets = runs.ROOT / "experiments" / "assets"
  return [str(assets / kind) for kind in ("char", "merged", "operator")]


def config(workdir, paths, **fields):
  values = {
    "workdir": str(workdir),
    "policies": tuple(paths),
    "task_args": '{"max_operations": 4}',
    "rounds": 2,
    "prompts": 4,
    "samples": (4,),
    "completion_limit": 8,
    "prompt_limit": 32,
    "lr": (0.001,),
    "deadline": 0.2,
    "shares": (1,) * len(paths),
    **fields,
  }
  return config_lib.Config(**values)


def own(records):
  """A policy's numbers without what it heard."""
  return [
    {k: v for k, v in record.items() if not k.startswith(EXCHANGE)}
    for record in records
  ]


@pytest.fixture(scope="module")
def plain(paths, tmp_path_factory):
  """Two policies side by side."""
  return runs.train(
    config(tmp_path_factory.mktemp("plain"), paths[:2]), store.Memory()
  )


class Faulty(store.Memory):
  """Loses, delays or damages what one policy publishes."""

  def __init__(self, policy, damage):
    super().__init__()
    self._policy, self._damage = policy, damage

  def put(self, policy, round, data):
    if policy != self._policy:
      return super().put(policy, round, data)
    damaged = self._damage(data)
    if isinstance(damaged, float):
      later = super().put
      threading.Timer(damaged, later, (policy, round, data)).start()
      return True
    return True if damaged is None else super().put(policy, round, damaged)


class Silent(store.Memory):
  """Every shipment is whole, and empty."""

  def put(self, policy, round, data):
    return super().put(policy, round, codec.pack(policy, round, []))


FAULTS = {
  "withheld": (lambda data: None, "late"),
  "delayed past the deadline": (lambda data: 2.0, "late"),
  "truncated": (lambda data: data[:60], "truncated"),
  "of another schema": (
    lambda data: data.replace(b'"schema":1', b'"schema":2', 1),
    "schema",
  ),
  "garbage": (lambda data: b"\x00\xff" * 40 + b"\n", "corrupt"),
}


def test_the_plain_runs_learn_something(plain):
  """Or else the comparisons with them would compare nothing."""
  for records in plain[0].values():
    assert all(record["grad_norm"] > 0 for record in records)
    assert all(record["degenerate"] < 1 for record in records)


@pytest.mark.parametrize(
  ("recipe", "fault"),
  [
    *(("sgt", fault) for fault in FAULTS),
    ("prp", "withheld"),
    ("prp", "truncated"),
    ("xgrpo", "truncated"),
  ],
)
def test_a_faulty_peer_costs_one_refusal_and_a_plain_step(
  recipe, fault, paths, plain, tmp_path
):
  damage, reason = FAULTS[fault]
  found, _ = runs.train(
    config(tmp_path, paths[:2], recipe=(recipe, "grpo")),
    Faulty("merged", damage),
  )
  for record in found["char"]:
    assert record["exchange/refused"] == 1, record
    assert record.get(f"exchange/refused/{reason}") == 1, record
    assert record["exchange/admitted"] == record["exchange/used"] == 0
  assert own(found["char"]) == own(plain[0]["char"])


def test_a_policy_on_its_own_samples_is_not_affected(paths, plain, tmp_path):
  found, states = runs.train(
    config(tmp_path, paths[:2], recipe=("grpo", "xgrpo+sgt")), store.Memory()
  )
  assert own(found["char"]) == own(plain[0]["char"])
  assert all(record["exchange/told"] > 0 for record in found["char"])
  assert all(record["exchange/admitted"] > 0 for record in found["merged"])
  same = jax.tree.map(
    lambda a, b: np.array_equal(a, b),
    states["char"].params,
    plain[1]["char"].params,
  )
  assert all(jax.tree.leaves(same))


def test_sgt_without_a_rescue_is_grpo_to_the_bit(paths, plain, tmp_path):
  """The peer tells nothing but failures: its shipments hold no success."""
  found, states = runs.train(
    config(tmp_path, paths[:2], recipe=("sgt",)), Silent()
  )
  for name in found:
    assert all(record["exchange/refused"] == 0 for record in found[name])
    assert own(found[name]) == own(plain[0][name])
    for a, b in zip(
      jax.tree.leaves(states[name].params),
      jax.tree.leaves(plain[1][name].params),
      strict=True,
    ):
      np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
  "fields",
  [
    {"recipe": ("prp",), "samples": (4, 3)},
    {"recipe": ("prp+sgt",), "prp_mode": "decoupled", "updates": 2},
    {"recipe": ("prp",), "prp_mode": "recompute", "spread": "chunk"},
    {"recipe": ("xgrpo+sgt", "sgt", "grpo"), "lr": (1e-3, 2e-3, 3e-3)},
    {"recipe": ("prp", "xgrpo", "sgt"), "kl_coefficient": 0.1},
  ],
  ids=lambda fields: "+".join(fields["recipe"]),
)
def test_recipes_mix_and_match(fields, paths, tmp_path):
  count = max(len(fields["recipe"]), len(fields.get("samples", ())))
  used = paths[: max(2, count)]
  found, _ = runs.train(config(tmp_path, used, **fields), store.Memory())
  for number, records in enumerate(found.values()):
    recipe = fields["recipe"][number % len(fields["recipe"])]
    for record in records:
      assert np.isfinite(record["loss"])
      assert np.isfinite(record["grad_norm"])
      assert record["skipped"] == 0
      if "prp" in recipe:
        assert record["exchange/used"] > 0
        assert record["peer/chi2"] > -1
        assert 0 <= record["peer/split"] <= 1
      if "xgrpo" in recipe:
        assert record["values/shared"] == 1


def test_a_twins_chunks_weigh_exactly_one(paths, tmp_path):
  """Same parameters, same tokenizer: a peer's rows are on policy."""
  twins = config(
    tmp_path,
    [paths[0], paths[0]],
    names=("one", "two"),
    recipe=("prp",),
    rounds=1,
  )
  found, _ = runs.train(twins, store.Memory())
  for (record,) in found.values():
    assert record["exchange/used"] == 16
    # As far as decoding step by step and scoring at once agree in float32.
    assert record["peer/log_ratio_max"] < 3e-5
    assert record["log_ratio_max"] < 3e-5
    assert record["peer/chi2"] == pytest.approx(0, abs=1e-5)
    assert record["peer/ess"] == pytest.approx(1, abs=1e-6)
    assert record["peer/split"] == 0


@pytest.mark.parametrize("recipe", ["xgrpo+sgt", "prp"])
def test_inline_and_partition_are_the_same_run(recipe, paths, tmp_path):
  logs = {}
  for name in ("inline", "partition"):
    fields = config(
      tmp_path / name,
      paths[:2],
      recipe=(recipe,),
      executor=name,
      shares=(4, 4),
      deadline=60.0,
    )
    runs.train(fields, store.Memory())
    logs[name] = [
      (tmp_path / name / f"{file}.jsonl").read_bytes()
      for file in ("metrics", "rollouts", "exchange")
    ]
  assert logs["inline"] == logs["partition"]
  assert all(logs["inline"])


def test_offloading_changes_nothing(paths, plain, tmp_path):
  found, states = runs.train(
    config(tmp_path, paths[:2], offload=True), store.Memory()
  )
  assert found == plain[0]
  for state in states.values():
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state)}
    assert kinds == {jax.devices()[0].default_memory().kind}


class Broken(store.Memory):
  """One policy cannot publish."""

  def put(self, policy, round, data):
    if policy == "merged":
      raise OSError("disk full")
    return super().put(policy, round, data)


@pytest.mark.parametrize("name", ["inline", "partition"])
def test_a_policy_that_fails_ends_the_run_by_name(name, paths, tmp_path):
  fields = config(
    tmp_path, paths[:2], recipe=("sgt",), executor=name, deadline=600.0
  )
  with pytest.raises(executor.PolicyError, match=r"merged.*disk full"):
    runs.train(fields, Broken())


def test_shares_are_planned_again_from_measured_times(paths, tmp_path):
  fields = config(
    tmp_path,
    paths[:2],
    recipe=("sgt",),
    executor="partition",
    shares=(2, 2),
    replan_every=1,
    rounds=3,
    mesh=(1, -1, 1),
  )
  found, states = runs.train(fields, store.Memory())
  assert [len(records) for records in found.values()] == [3, 3]
  for state in states.values():
    assert int(state.step) == 3
