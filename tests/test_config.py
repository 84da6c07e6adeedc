"""Configurations: every mistake is one clear error."""

import dataclasses
import itertools
import json

import pytest

from mrl_jax import config as config_lib
from mrl_jax import config_files

GOOD = {"workdir": "w", "policies": ("a/left", "b/right")}


def make(**changes):
  return config_lib.Config(**{**GOOD, **changes})


@pytest.mark.parametrize(
  ("field", "value", "part"),
  [
    ("loss", ("grop",), "allowed: policy_gradient, gspo, cispo"),
    ("reduction", "token-mean", "allowed: token_mean"),
    ("kl", "K3", "allowed: k1, k2, k3"),
    ("recipe", ("grpo", "gpro"), "allowed: grpo"),
    ("correction", "TIS", "allowed: none, tis_token"),
    ("samples", (1,), "at least 2"),
    ("microbatches", 7, "must divide the 32 prompts"),
    ("length_buckets", 1, "needs --microbatches above 1"),
    ("updates", 5, "must divide --prompts=32"),
    ("temperature", 0.0, "above 0"),
    ("temperature", float("nan"), "above 0"),
    ("top_p", 0.0, "in (0, 1]"),
    ("clip_low", 1.5, "in [0, 1]"),
    ("dual_clip", 0.5, "above 1"),
    ("lr", (1.0, 2.0, 3.0), "1 value or 2"),
    ("lr", (-1.0,), "at least 0"),
    ("lr", (float("nan"),), "at least 0"),
    ("mesh", (1, 1), "data,fsdp,tensor"),
    ("mesh", (-1, -1, 1), "at most one"),
    ("mesh", (0, 1, 1), "data,fsdp,tensor"),
    ("attention", "splash", "allowed: auto, plain, pallas, interpret"),
    ("coordinator", "somewhere", "HOST:PORT or auto"),
    ("coordinator", "somewhere:http", "HOST:PORT or auto"),
    ("processes", 2, "needs --coordinator=HOST:PORT"),
    ("process_id", 0, "needs --coordinator=HOST:PORT"),
    ("names", ("x",), "must be 2 names"),
    ("names", ("x", "x"), "unique"),
    ("policies", (), "at least one"),
    ("policies", ("a/same", "b/same"), "unique"),
    ("workdir", "", "name the folder"),
    ("task_args", "[1]", "JSON object"),
    ("task_args", "{", "task_args"),
    ("b1", 1.0, "in [0, 1)"),
    ("rounds", 0, "at least 1"),
    ("recipe", ("sgt+gtp",), "allowed: grpo, dr_grpo, prp, xgrpo, sgt"),
    ("recipe", ("sgt+sgt",), "twice"),
    ("recipe", ("prp+xgrpo",), "xgrpo adds nothing"),
    ("recipe", ("grpo+dr_grpo",), "not both"),
    ("samples", (4, 8, 8), "1 value or 2"),
    ("xgrpo_mix", 1.5, "in [0, 1] or -1"),
    ("prp_mode", "off", "allowed: behavior, decoupled, recompute"),
    ("spread", "token", "allowed: bytes, chunk"),
    ("peer_dual_clip", 0.5, "above 1"),
    ("peer_cap", 0.0, "above 0"),
    ("staleness", -1, "at least 0"),
    ("deadline", -1.0, "at least 0"),
    ("shares", (1,), "must be 2 numbers"),
    ("shares", (0, 1), "at least 1"),
    ("replan_every", 2, "--executor=partition"),
    ("executor", "both", "allowed: inline, partition"),
    ("veto", "suffx", "allowed: none, suffix, cumulative"),
    ("veto_tau", 1.0, "in [0, 1) or -1"),
    ("veto_tau", -0.5, "in [0, 1) or -1"),
    ("veto_tau", float("nan"), "in [0, 1) or -1"),
    ("recipe", ("extra+novelty",), "extra is novelty and regenerate"),
    ("names", ("memories", "x"), "no policy may be called memories"),
    ("novelty_memory", 7, "must be 0 or at least --samples=8"),
    ("novelty_weight", -0.1, "at least 0"),
    ("novelty_pool", "right", "allowed: all, correct"),
    ("regenerate", "least", "allowed: lowest, highest, random, restart"),
    ("regenerate_cap", 1.0, "in (0, 1)"),
    ("regenerate_cuts", 1, "at least 2"),
    ("regenerate_temperature", 0.0, "above 0"),
  ],
)
def test_a_bad_value_names_field_value_and_what_is_allowed(field, value, part):
  with pytest.raises(config_lib.ConfigError) as caught:
    make(**{field: value})
  message = str(caught.value)
  assert part in message
  assert "\n" not in message
  assert f"--{caught.value.field}=" in message


def test_a_good_configuration_survives_json():
  config = make(lr=(1e-3, 2e-4), mesh=(2, 2, 2), task_args='{"n": 3}')
  text = json.dumps(config_files.to_dict(config))
  assert config_files.from_dict(json.loads(text)) == config


def test_regeneration_leaves_room_for_new_prompts():
  make(regenerate_slots=32)  # of no consequence without the recipe
  with pytest.raises(config_lib.ConfigError, match="below --prompts=32"):
    make(recipe=("regenerate",), regenerate_slots=32)


def test_an_unknown_saved_field_is_refused():
  with pytest.raises(config_lib.ConfigError, match="--spam"):
    config_files.from_dict({**GOOD, "spam": 1})


def test_per_policy_values():
  config = make(lr=(1e-3, 2e-4))
  assert [config.of("lr", i) for i in range(2)] == [1e-3, 2e-4]
  assert [config.of("loss", i) for i in range(2)] == ["policy_gradient"] * 2
  assert config.policy_names() == ("left", "right")


def test_resume_refuses_another_run_but_allows_more_rounds():
  saved = make(seed=1)
  config_files.check_resume(saved, make(seed=1, rounds=500))
  with pytest.raises(config_lib.ConfigError, match=r"--seed=2.*started with 1"):
    config_files.check_resume(saved, make(seed=2))


def test_resume_refuses_more_rounds_of_a_decaying_rate():
  saved = make(lr_schedule="cosine")
  with pytest.raises(config_lib.ConfigError, match="--rounds=500"):
    config_files.check_resume(saved, make(lr_schedule="cosine", rounds=500))


def test_every_field_is_documented():
  for field in dataclasses.fields(config_lib.Config):
    assert field.metadata["help"], field.name


def test_resumable_fields_exist():
  names = {field.name for field in dataclasses.fields(config_lib.Config)}
  assert names >= config_files.RESUMABLE


def test_every_listed_name_is_accepted():
  for field in dataclasses.fields(config_lib.Config):
    for name in field.metadata["names"] or ():
      value = (name,) if isinstance(field.default, tuple) else name
      shaped = {"potential": ("p",), "reduction": "constant_mean"}
      more = shaped if name == "merla" else {}
      assert make(**{field.name: value}, **more)


def test_division_is_exact_for_all_small_shapes():
  sizes = (1, 2, 3, 4)
  for prompts, updates, micro in itertools.product(sizes, sizes, sizes):
    fits = prompts % updates == 0 and (prompts // updates) % micro == 0
    values = {"prompts": prompts, "updates": updates, "microbatches": micro}
    if fits:
      assert make(samples=(2,), **values)
    else:
      with pytest.raises(config_lib.ConfigError):
        make(samples=(2,), **values)


def test_older_records_must_outlive_the_process():
  with pytest.raises(config_lib.ConfigError, match="--staleness=1"):
    make(staleness=1, exchange="memory")


def test_a_probe_needs_a_peer():
  with pytest.raises(config_lib.ConfigError, match="more than one"):
    make(policies=("a",), recipe=("sgt",))


def test_idle_states_exist_only_where_policies_take_turns():
  with pytest.raises(config_lib.ConfigError, match="--offload"):
    make(offload=True, executor="partition")


@pytest.mark.parametrize("low", [0.0, 1.0])
def test_a_veto_at_the_end_of_no_clip_range_needs_a_threshold(low):
  with pytest.raises(config_lib.ConfigError, match="give --veto_tau"):
    make(veto="suffix", clip_low=low)
  assert make(veto="suffix", clip_low=low, veto_tau=0.0)
  assert make(veto="cumulative", clip_low=low)


def test_several_processes_are_told_apart():
  many = {"coordinator": "localhost:9000", "processes": 2}
  make(**many, process_id=1)
  make(coordinator="auto")
  for number in (-1, 2):
    with pytest.raises(config_lib.ConfigError, match=r"in \[0, 2\)"):
      make(**many, process_id=number)
  with pytest.raises(config_lib.ConfigError, match="must be inline"):
    make(coordinator="auto", executor="partition")
