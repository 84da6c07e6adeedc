"""One policy: a model, a tokenizer and a recipe, compiled for a mesh.

`build` reads a Hugging Face directory and turns a `Config` into the three
jitted functions of training (generate, score, update) for it. The policy
itself never changes; its `TrainState` is passed in and out.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mrl_jax import config as config_lib
from mrl_jax import recipe_config, recipes, records
from mrl_jax.exchange import publish
from mrl_jax.explore import explorer
from mrl_jax.model import attention, hf, transformer
from mrl_jax.parallel import processes, sharding
from mrl_jax.sampling import engine
from mrl_jax.text import prompts as prompts_lib
from mrl_jax.text import tokenizer as tokenizer_lib
from mrl_jax.train import explorers
from mrl_jax.train import reference as reference_lib
from mrl_jax.train import state as state_lib
from mrl_jax.train import update as update_lib
from mrl_jax.train import widths as widths_lib
from mrl_jax.types import Distribution

Sampler = Callable[..., engine.Generate]  # `engine.make`, or one like it


class Actor(NamedTuple):
  """A model that can be sampled from: all that evaluation needs."""

  name: str
  directory: str
  model: transformer.Model
  tokenizer: tokenizer_lib.Tokenizer
  allowed: np.ndarray  # [V] bool, ids that may be sampled
  distribution: Distribution
  generate: engine.Generate


class Policy(NamedTuple):
  """What stays fixed about a policy during a run."""

  name: str
  number: int  # in the configuration
  samples: int  # G
  actor: Actor
  recipe: recipes.Recipe
  member: publish.Member
  mesh: jax.sharding.Mesh
  shardings: state_lib.TrainState
  score: update_lib.Score
  update: Callable  # of update.make, or of widths.make if `pieces`
  initial: Any  # its parameters at the start, or None: nothing needs them
  compared: bool  # whether the loss has a KL to the initial policy
  explorer: explorer.Explorer | None
  sampler: Sampler = engine.make
  microbatches: int = 1
  pieces: int = 0  # of a group, in microbatches of their own widths; 0: none
  reference: reference_lib.Reference | None = None  # with its potential

  @property
  def spread(self) -> int:
    """Over how many devices rows are spread."""
    return self.mesh.shape["data"] * self.mesh.shape["fsdp"]


def load_actor(
  config: config_lib.Config,
  number: int,
  mesh: jax.sharding.Mesh,
  samples: int,
  sampler: Sampler = engine.make,
) -> tuple[Actor, Any]:
  """Reads policy `number` of the run, with its parameters on the mesh."""
  directory = config.policies[number]
  tokenizer = tokenizer_lib.load(directory)
  platform = mesh.devices.flat[0].platform
  model, params = hf.load(
    directory,
    mesh,
    compute_dtype=config.dtype,
    remat=config.remat,
    attention=attention.chosen(config.attention, platform),
  )
  actor = _actor(config, number, mesh, samples, model, tokenizer, sampler)
  return actor, params


def _actor(config, number, mesh, samples, model, tokenizer, sampler) -> Actor:
  allowed = tokenizer.allowed(model.spec.vocab)
  distribution = Distribution(config.temperature, config.top_k, config.top_p)
  generate = sampler(
    model,
    mesh,
    samples=samples,
    limit=config.completion_limit,
    stop_ids=tokenizer.eos_ids,
    allowed=allowed,
    distribution=distribution,
    seed=config.seed,
    rows=config.rows,
  )
  if sampler is not engine.make:
    generate = _agreed(generate)
  name, directory = config.policy_names()[number], config.policies[number]
  return Actor(
    name, directory, model, tokenizer, allowed, distribution, generate
  )


def _agreed(generate: engine.Generate) -> engine.Generate:
  """Another engine may draw other completions in each process.

  Each process calls it, since all must take part in reading the parameters.
  """

  def apply(params, prompts, ids) -> engine.Samples:
    out = generate(params, prompts, ids)
    return processes.agreed(lambda: out)

  return apply


def build(
  config: config_lib.Config,
  number: int,
  mesh: jax.sharding.Mesh,
  sampler: Sampler = engine.make,
) -> tuple[Policy, state_lib.TrainState]:
  """Loads policy `number` of the run and its training functions."""
  samples = config.of("samples", number)
  actor, params = load_actor(config, number, mesh, samples, sampler)
  embeds = recipe_config.embeds(config, number) and config.embedder == "policy"
  found = reference_lib.read(config, number, actor.model, params)
  kept = config.kl_coefficient or embeds or found
  initial = jax.tree.map(jnp.copy, params) if kept else None
  policy = _policy(config, number, mesh, actor, params, initial, found, sampler)
  optimizer = make_optimizer(config, number)
  return policy, state_lib.init(optimizer, params, mesh)


def move(
  config: config_lib.Config,
  policy: Policy,
  state: state_lib.TrainState,
  mesh: jax.sharding.Mesh,
) -> tuple[Policy, state_lib.TrainState]:
  """The same policy and state on another mesh; compiles anew."""
  old = policy.actor
  actor = _actor(
    config,
    policy.number,
    mesh,
    policy.samples,
    old.model,
    old.tokenizer,
    policy.sampler,
  )
  places = sharding.tree(old.model.axes, state.params, mesh)
  params = jax.device_put(state.params, places)
  initial = policy.initial
  if initial is not None:
    initial = jax.device_put(initial, places)
  found = policy.reference and policy.reference.potential
  moved = _policy(
    config, policy.number, mesh, actor, params, initial, found, policy.sampler
  )
  return moved, jax.device_put(state, moved.shardings)


def _policy(
  config, number, mesh, actor, params, initial, found, sampler
) -> Policy:
  member = publish.Member(
    policy=actor.name,
    tokenizer=actor.tokenizer,
    allowed=actor.allowed,
    limit=config.completion_limit,
    verifier=f"{config.task} {config.task_args} {config.verifier}",
    seed=config.seed,
  )
  bound = found.spec.bound if found else 1.0
  recipe = recipe_config.make(config, number, member, bound)
  shardings = state_lib.of(make_optimizer(config, number), params, mesh)
  options = {
    "allowed": actor.allowed,
    "distribution": actor.distribution,
    "microbatches": config.microbatches,
  }
  return Policy(
    name=actor.name,
    number=number,
    samples=config.of("samples", number),
    actor=actor,
    recipe=recipe,
    member=member,
    mesh=mesh,
    shardings=shardings,
    score=update_lib.make_score(actor.model, mesh, **options),
    update=(widths_lib if config.length_buckets else update_lib).make(
      actor.model,
      make_optimizer(config, number),
      recipe.prepare,
      recipe.loss,
      shardings,
      mesh,
      veto=recipe.veto,
      **options,
    ),
    initial=initial,
    compared=bool(config.kl_coefficient),
    explorer=explorers.make(config, number, actor, recipe, initial, mesh),
    reference=found
    and reference_lib.make(
      actor.model,
      mesh,
      found,
      compared=bool(config.kl_coefficient),
      **options,
    ),
    sampler=sampler,
    microbatches=config.microbatches,
    pieces=config.length_buckets,
  )


def make_optimizer(
  config: config_lib.Config, number: int
) -> optax.GradientTransformation:
  """The optimiser of one policy of the run."""
  return state_lib.make_optimizer(
    config.of("lr", number),
    config.rounds * config.updates,
    schedule=config.lr_schedule,
    warmup=config.lr_warmup,
    b1=config.b1,
    b2=config.b2,
    weight_decay=config.weight_decay,
    clip_norm=config.clip_norm,
  )


def render(
  actor: Actor, prompt: str, config: config_lib.Config
) -> tuple[int, ...]:
  """The prompt's ids in the actor's own tokenizer and template."""
  ids = prompts_lib.render(
    actor.tokenizer,
    prompt,
    system=config.system_prompt or None,
    format=config.prompt_format,
  )
  return tuple(ids)


def sample(
  actor: Actor,
  params: Any,
  slots: Sequence[explorer.Slot],
  round_: int,
  samples: int,
  version: int = 0,
) -> list[records.Rollout]:
  """G unscored rollouts per slot, in order; `version` is the policy's."""
  ids = [
    engine.words(actor.name, round_, slot.problem.id, number)
    for slot in slots
    for number in range(samples)
  ]
  contexts = [slot.context for slot in slots]
  out = actor.generate(params, contexts, np.asarray(ids, np.uint32))
  rows = []
  for index in range(len(slots) * samples):
    slot, length = slots[index // samples], int(out.lengths[index])
    problem, item = slot.problem, slot.item
    prefix = item.prefix if item else ()
    tokens = out.tokens[index, :length]
    rows.append(
      records.Rollout(
        prompt_id=problem.id,
        sample=index % samples,
        prompt=problem.prompt,
        context=slot.context,
        tokens=tokens,
        logprobs=out.logprobs[index, :length],
        entropies=out.entropies[index, :length],
        finished=bool(out.finished[index]),
        text=actor.tokenizer.decode([*prefix, *tokens.tolist()]),
        answer=problem.answer,
        reward=float("nan"),
        outcome="",
        version=version,
        root=item.root if item else "",
        prefix=len(prefix),
      )
    )
  return rows
