"""Whole runs that are shaped by a potential."""

import json
import pathlib
import signal
import time

import jax
import numpy as np
import pytest

from experiments import models
from mrl_jax import config as config_lib
from mrl_jax.exchange import store
from mrl_jax.model import hf
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.shaping import potential
from mrl_jax.train import metrics
from tests import runs


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
  """A tiny policy, and an untrained potential for it."""
  root = tmp_path_factory.mktemp("merla")
  path = runs.policy(root / "tiny", "char")
  mesh = mesh_lib.make(1, 1, 1, devices=jax.devices()[:1])
  model, params = hf.load(path, mesh)
  spec = potential.Spec(width=16, hidden=8, reference="tiny")
  found = potential.Potential(
    spec,
    potential.sealed(potential.init(spec, jax.random.key(0)), spec.cap),
    potential.probe(model, params),
  )
  potential.save(found, root / "potential", {})
  return path, str(root / "potential")


FLAGS = {"recipe": "merla", "reduction": "constant_mean"}


def config(workdir, parts, **flags) -> config_lib.Config:
  values = {
    "workdir": str(workdir),
    "policies": (parts[0],),
    "potential": (parts[1],),
    "recipe": ("merla",),
    "reduction": "constant_mean",
    "task_args": '{"max_operations": 1}',
    "rounds": 2,
    "prompts": 8,
    "samples": (4,),
    "completion_limit": 6,
    "lr": (0.01,),
    "mesh": (1, 1, 1),
    "shares": (1,),
    **flags,
  }
  return config_lib.Config(**values)


def numbers(found, *without):
  return [
    {k: v for k, v in r.items() if not k.startswith(without)} for r in found
  ]


def leaves(states):
  return jax.tree.leaves(states["tiny"].params)


def test_without_weight_it_is_grpo_bit_for_bit(tmp_path, parts):
  plain, want = runs.train(
    config(tmp_path / "grpo", parts, recipe=("grpo",)), store.Memory()
  )
  for mode in ("token", "sequence"):
    flags = {"shaping": mode, "shaping_alpha": 0.0}
    shaped, states = runs.train(
      config(tmp_path / mode, parts, **flags), store.Memory()
    )
    assert "shaping/phi_std" in shaped["tiny"][0]
    assert numbers(shaped["tiny"], "shaping/") == numbers(plain["tiny"])
    for one, other in zip(leaves(states), leaves(want), strict=True):
      assert np.array_equal(one, other), mode
  moved, states = runs.train(config(tmp_path / "on", parts), store.Memory())
  assert not all(
    np.array_equal(*pair)
    for pair in zip(leaves(states), leaves(want), strict=True)
  )
  # Shaped or not, what is told is the task's reward.
  assert moved["tiny"][0]["reward"] == plain["tiny"][0]["reward"]


def test_a_run_that_is_killed_inside_a_round_goes_on_exactly(tmp_path, parts):
  flags = {
    **FLAGS,
    "potential": parts[1],
    "rounds": 3,
    "updates": 4,
    "save_every": 1,
    "save_updates": 1,
  }
  whole = runs.run(runs.command(tmp_path / "whole", [parts[0]], **flags))
  assert whole.returncode == 0, whole.stderr
  broken = runs.command(tmp_path / "broken", [parts[0]], **flags)
  process = runs.start(broken)
  log = tmp_path / "broken" / "updates.jsonl"
  while process.poll() is None:
    if log.exists() and len(log.read_text().splitlines()) >= 6:
      process.send_signal(signal.SIGKILL)
      break
    time.sleep(0.02)
  process.communicate()
  again = runs.run(broken)
  assert again.returncode == 0, again.stderr
  runs.same(tmp_path / "whole", tmp_path / "broken")
  scales = [
    r["shaping/scale"] for r in metrics.read(tmp_path / "whole/metrics.jsonl")
  ]
  assert scales[0] == 0.5 and all(s > 0 for s in scales)


def test_all_four_methods_run_as_one(tmp_path, parts):
  """The flagfile, smaller: its recipes, veto and stages are its own."""
  other = runs.policy(tmp_path / "other", "merged")
  root = pathlib.Path(runs.ROOT) / "experiments" / "flagfiles"
  words = runs.command(
    tmp_path / "run",
    [parts[0], other],
    potential=f"{parts[1]},none",
    rounds=2,
    prompts=16,
    updates=2,
    part=8,
    regenerate_slots=4,
    rows=0,
  )
  words.insert(3, f"--flagfile={root / 'all_four.flags'}")
  done = runs.run(words)
  assert done.returncode == 0, done.stderr
  found = metrics.read(tmp_path / "run/metrics.jsonl")
  mine = [r for r in found if r["policy"] == "tiny"]
  assert {"shaping/phi_std", "explore/queue", "rescue/set"} <= set(mine[1])
  assert "shaping/phi_std" not in found[1 - found.index(mine[0])]
  settings = json.loads((tmp_path / "run/config.json").read_text())
  assert settings["veto"] == "suffix" and settings["rescore"]


@pytest.mark.parametrize(
  ("flags", "field", "why"),
  [
    ({"reduction": "token_mean"}, "reduction", "constant_mean"),
    ({"reduction": "sequence_mean"}, "reduction", "lengths"),
    ({"potential": ()}, "potential", "meta_train"),
    ({"drop_degenerate": True}, "drop_degenerate", "every group"),
    ({"shaping_decay": 1.0}, "shaping_decay", "[0, 1)"),
    ({"shaping_scale": 0.0}, "shaping_scale", "above 0"),
  ],
)
def test_flags_that_break_a_guarantee_are_refused(parts, flags, field, why):
  with pytest.raises(config_lib.ConfigError) as error:
    config("w", parts, **flags)
  assert error.value.field == field and why in str(error.value)


def test_a_run_knows_its_potentials_wherever_it_goes_on(parts, monkeypatch):
  monkeypatch.chdir(pathlib.Path(parts[1]).parent)
  found = models.located(config("w", (parts[0], "potential")))
  assert found.potential == (parts[1],)


def test_the_sequence_modes_take_any_reduction(parts):
  for mode in ("sequence", "bounded"):
    for reduction in ("token_mean", "sequence_mean"):
      config("w", parts, shaping=mode, reduction=reduction)
