"""The programs of a policy from shapes alone: no weights, no data, no chip.

What a run would compile in its first round is lowered here for the devices
of any mesh, so that a compiler can say what it takes before anybody pays for
them.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mrl_jax import collate, recipe_config, recipes
from mrl_jax import config as config_lib
from mrl_jax.exchange import publish
from mrl_jax.model import arithmetic, transformer
from mrl_jax.model import spec as spec_lib
from mrl_jax.parallel import sharding
from mrl_jax.sampling import slots as slots_lib
from mrl_jax.train import policy as policy_lib
from mrl_jax.train import shapes as shapes_lib
from mrl_jax.train import state as state_lib
from mrl_jax.train import update as update_lib
from mrl_jax.types import Distribution


class Program(NamedTuple):
  """One jitted function of a run."""

  name: str
  lower: Callable[[], jax.stages.Lowered]
  calls: int  # in a round
  flops: int  # of the model's own arithmetic, in one call, on all devices
  kernels: int  # FLOPs of hand-written kernels, likewise
  beside: int  # bytes on each device that it does not take, but that are there


class Policy(NamedTuple):
  """A policy without weights."""

  name: str
  spec: spec_lib.Spec
  parameters: int
  parameter_bytes: int  # on one device
  optimizer_bytes: int  # on one device
  rows: arithmetic.Rows  # of one update
  programs: tuple[Program, ...]


class _Shapes(NamedTuple):
  """What the programs are lowered from."""

  config: config_lib.Config
  number: int
  mesh: jax.sharding.Mesh
  model: transformer.Model
  state: state_lib.TrainState  # of ShapeDtypeStructs
  recipe: recipes.Recipe
  options: dict[str, Any]


def plan(
  config: config_lib.Config,
  number: int,
  spec: spec_lib.Spec,
  mesh: jax.sharding.Mesh,
) -> Policy:
  """Policy `number` of the run, on a mesh whose devices may not be here.

  Args:
    config: of the run; `policies` are not read.
    number: of the policy.
    spec: its decoder, with the compute dtype, rematerialisation and attention
      that are to be compiled.
    mesh: of all its devices.
  """
  shapes = _shapes(config, number, spec, mesh)
  parameters = shapes_lib.device_bytes(shapes.state.params)
  optimizer = shapes_lib.device_bytes(shapes.state.opt_state)
  copies = int(bool(config.kl_coefficient) or shapes_lib.shaped(config, number))
  initial = parameters * copies
  programs = [_update(shapes, initial)]
  if shapes.recipe.rescore or copies:
    programs.append(_score(shapes, optimizer + initial))
  programs += _sampler(shapes, optimizer + initial)
  return Policy(
    config.policy_names()[number],
    spec,
    sum(math.prod(x.shape) for x in jax.tree.leaves(shapes.state.params)),
    parameters,
    optimizer,
    shapes_lib.rows(config, number),
    tuple(programs),
  )


def _shapes(config, number, spec, mesh) -> _Shapes:
  model = transformer.make(spec)
  found = jax.eval_shape(model.init, jax.random.key(0))
  params = shapes_lib.placed(found, sharding.tree(model.axes, found, mesh))
  optimizer = policy_lib.make_optimizer(config, number)
  zero = jax.ShapeDtypeStruct((), jnp.int32)
  opt_state = jax.eval_shape(optimizer.init, params)
  state = state_lib.TrainState(params, opt_state, zero, zero)
  state = shapes_lib.placed(state, state_lib.of(optimizer, params, mesh))
  allowed = np.ones(spec.vocab, bool)
  member = publish.Member("", None, allowed, config.completion_limit, "", 0)
  return _Shapes(
    config,
    number,
    mesh,
    model,
    state,
    recipe_config.make(config, number, member),
    {
      "allowed": allowed,
      "distribution": Distribution(
        config.temperature, config.top_k, config.top_p
      ),
    },
  )


def _batch(shapes: _Shapes):
  return shapes_lib.batch(
    shapes.config, shapes.number, shapes.recipe, shapes.mesh
  )


def _update(shapes: _Shapes, beside: int) -> Program:
  config, spec = shapes.config, shapes.model.spec
  rows = shapes_lib.rows(config, shapes.number)

  def lower():
    update = update_lib.make(
      shapes.model,
      policy_lib.make_optimizer(config, shapes.number),
      shapes.recipe.prepare,
      shapes.recipe.loss,
      jax.tree.map(lambda x: x.sharding, shapes.state),
      shapes.mesh,
      microbatches=config.microbatches,
      veto=shapes.recipe.veto,
      **shapes.options,
    )
    with jax.set_mesh(shapes.mesh):
      return update.lower(shapes.state, _batch(shapes), rows.samples)

  # The backward kernel computes the scores again: five products, not four.
  passes = 2 + 2.5 if spec.remat == "full" else 1 + 2.5
  kernels = round(passes * arithmetic.attention(spec, rows))
  flops = arithmetic.training(spec, rows)
  return Program(
    "update", lower, config.updates, flops, _opaque(spec, kernels), beside
  )


def _score(shapes: _Shapes, beside: int) -> Program:
  config, spec = shapes.config, shapes.model.spec
  rows = shapes_lib.rows(config, shapes.number)

  def lower():
    score = update_lib.make_score(
      shapes.model,
      shapes.mesh,
      microbatches=config.microbatches,
      **shapes.options,
    )
    with jax.set_mesh(shapes.mesh):
      return score.lower(shapes.state.params, _batch(shapes), rows.samples)

  kl = bool(config.kl_coefficient) or shapes_lib.shaped(config, shapes.number)
  calls = config.updates * (int(shapes.recipe.rescore) + int(kl))
  flops = arithmetic.forward(spec, rows)
  kernels = _opaque(spec, arithmetic.attention(spec, rows))
  return Program("score", lower, calls, flops, kernels, beside)


def _opaque(spec: spec_lib.Spec, kernels: int) -> int:
  return 0 if spec.attention == "plain" else kernels


def _sampler(shapes: _Shapes, beside: int) -> Iterator[Program]:
  """Prefill of a slotful of prompts, and one token of all slots."""
  config, spec, mesh = shapes.config, shapes.model.spec, shapes.mesh
  samples = config.of("samples", shapes.number)
  spread = mesh.shape["data"] * mesh.shape["fsdp"]
  count = (config.part or config.prompts) * samples
  slots = min(config.rows or count, count)
  slots += -slots % spread
  prompts = min(max(1, slots // samples), config.prompts)
  prompts += -prompts % spread
  prompt = collate.bucket(config.prompt_limit)
  programs = slots_lib.make(
    shapes.model,
    limit=config.completion_limit,
    stop_ids=(0,),
    seed=0,
    **shapes.options,
  )
  params, place = shapes.state.params, sharding.batch(mesh)
  context = (
    jax.ShapeDtypeStruct((prompts, prompt), jnp.int32, sharding=place),
    jax.ShapeDtypeStruct((prompts,), jnp.int32, sharding=place),
  )

  def lower_prefill():
    with jax.set_mesh(mesh):
      return programs.prefill.lower(params, *context)

  def lower_block():
    with jax.set_mesh(mesh):
      weights = _compiled(programs.unstack, params)
      hidden, cached = _compiled(programs.prefill, params, *context)
      state = _compiled(
        programs.empty, hidden, cached, slots, config.completion_limit
      )
      floor = jax.ShapeDtypeStruct((), jnp.int32)
      return programs.block.lower(weights, state, floor)

  rounds = -(-config.prompts * samples // slots)
  attended = arithmetic.attention(spec, arithmetic.Rows(prompts, prompt, 0, 0))
  yield Program(
    "prefill",
    lower_prefill,
    -(-config.prompts // prompts),
    arithmetic.prefill(spec, prompts, prompt),
    _opaque(spec, attended),
    beside,
  )
  half = prompt + config.completion_limit // 2
  seen = arithmetic.decode(spec, slots, half)
  dense = arithmetic.decode(spec, slots, -1)  # of no key at all
  parameters = shapes_lib.device_bytes(params)
  yield Program(
    "decode",
    lower_block,
    rounds * config.completion_limit,
    seen,
    _opaque(spec, seen - dense),
    beside + parameters,
  )


def _compiled(function, *arguments) -> Any:
  """The shapes of a function's results, and where they would lie."""
  lowered = function.lower(*arguments)
  return shapes_lib.placed(lowered.out_info, lowered.compile().output_shardings)
