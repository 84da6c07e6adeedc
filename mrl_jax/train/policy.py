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

from mrl_jax import collate, recipes, records
from mrl_jax import config as config_lib
from mrl_jax.model import hf, transformer
from mrl_jax.parallel import sharding
from mrl_jax.sampling import engine
from mrl_jax.tasks import dataset
from mrl_jax.text import prompts as prompts_lib
from mrl_jax.text import tokenizer as tokenizer_lib
from mrl_jax.train import state as state_lib
from mrl_jax.train import update as update_lib
from mrl_jax.types import Batch, Distribution, Scores


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
  actor: Actor
  recipe: recipes.Recipe
  mesh: jax.sharding.Mesh
  shardings: state_lib.TrainState
  score: Callable[[Any, Batch], Scores]
  update: update_lib.Update
  reference: Any  # parameters of the initial policy, or None


def load_actor(
  config: config_lib.Config,
  number: int,
  mesh: jax.sharding.Mesh,
  samples: int,
) -> tuple[Actor, Any]:
  """Reads policy `number` of the run, with its parameters on the mesh."""
  directory = config.policies[number]
  tokenizer = tokenizer_lib.load(directory)
  model, params = hf.load(
    directory, mesh, compute_dtype=config.dtype, remat=config.remat
  )
  allowed = tokenizer.allowed(model.spec.vocab)
  distribution = Distribution(config.temperature, config.top_k, config.top_p)
  generate = engine.make(
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
  name = config.policy_names()[number]
  actor = Actor(
    name, directory, model, tokenizer, allowed, distribution, generate
  )
  return actor, params


def build(
  config: config_lib.Config, number: int, mesh: jax.sharding.Mesh
) -> tuple[Policy, state_lib.TrainState]:
  """Loads policy `number` of the run and its training functions."""
  actor, params = load_actor(config, number, mesh, config.samples)
  optimizer = make_optimizer(config, number)
  shardings = state_lib.of(optimizer, params, mesh)
  recipe = recipes.from_config(config, number)
  reference = jax.tree.map(jnp.copy, params) if config.kl_coefficient else None
  score = update_lib.make_score(
    actor.model,
    mesh,
    allowed=actor.allowed,
    distribution=actor.distribution,
    microbatches=config.microbatches,
    share=config.samples,
  )
  update = update_lib.make(
    actor.model,
    optimizer,
    recipe.prepare,
    recipe.loss,
    shardings,
    mesh,
    allowed=actor.allowed,
    distribution=actor.distribution,
    microbatches=config.microbatches,
    share=config.samples,
  )
  policy = Policy(
    actor.name, actor, recipe, mesh, shardings, score, update, reference
  )
  return policy, state_lib.init(optimizer, params, mesh)


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
  problems: Sequence[dataset.Problem],
  contexts: Sequence[tuple[int, ...]],
  round_: int,
  samples: int,
) -> list[records.Rollout]:
  """G unscored rollouts per problem, in order."""
  ids = [
    engine.words(actor.name, round_, problem.id, number)
    for problem in problems
    for number in range(samples)
  ]
  out = actor.generate(params, contexts, np.asarray(ids, np.uint32))
  rows = []
  for index in range(len(problems) * samples):
    problem, length = problems[index // samples], int(out.lengths[index])
    tokens = out.tokens[index, :length]
    rows.append(
      records.Rollout(
        prompt_id=problem.id,
        sample=index % samples,
        prompt=problem.prompt,
        context=contexts[index // samples],
        tokens=tokens,
        logprobs=out.logprobs[index, :length],
        entropies=out.entropies[index, :length],
        finished=bool(out.finished[index]),
        text=actor.tokenizer.decode(tokens.tolist()),
        answer=problem.answer,
        reward=float("nan"),
        outcome="",
      )
    )
  return rows


def learn(
  policy: Policy,
  state: state_lib.TrainState,
  round_: records.Round,
  updates: int,
) -> tuple[state_lib.TrainState, list[Any]]:
  """Runs the round's updates; each takes whole groups, in order."""
  rows = policy.recipe.receive(round_).own
  share = len(rows) // updates
  place = sharding.batch(policy.mesh)
  reports = []
  with jax.set_mesh(policy.mesh):
    batches = [
      jax.device_put(collate.batch(rows[i * share : (i + 1) * share]), place)
      for i in range(updates)
    ]
    batches = [_scored(policy, state.params, batch) for batch in batches]
    for batch in batches:
      with jax.transfer_guard("disallow"):
        state, report = policy.update(state, batch)
      reports.append(report)
  return state, jax.device_get(reports)


def _scored(policy: Policy, params: Any, batch: Batch) -> Batch:
  """Adds what the frozen and the current policy say, where it is needed."""
  if policy.recipe.rescore:
    batch = batch._replace(old_logprobs=policy.score(params, batch).logprobs)
  if policy.reference is not None:
    reference = policy.score(policy.reference, batch).logprobs
    batch = batch._replace(ref_logprobs=reference)
  return batch
