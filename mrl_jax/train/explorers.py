"""What a policy that explores does it with."""

from typing import Any

import jax

from mrl_jax import config as config_lib
from mrl_jax import recipe_config, recipes
from mrl_jax.explore import explorer
from mrl_jax.model import encoder, transformer


def make(
  config: config_lib.Config,
  number: int,
  actor: Any,
  recipe: recipes.Recipe,
  initial: Any,
  mesh: jax.sharding.Mesh,
) -> explorer.Explorer | None:
  """The explorer of one policy's recipe; None where it does not explore.

  Args:
    config: of the run.
    number: the policy's.
    actor: a `policy.Actor`: its name, tokenizer and model.
    recipe: its recipe.
    initial: its parameters at the start, where they are kept.
    mesh: that they lie on.
  """
  if recipe.novelty is None and recipe.prefixes is None:
    return None
  found = None
  if recipe_config.embeds(config, number):
    found = embedder(config.embedder, actor.model, initial, mesh)
  return explorer.Explorer(
    policy=actor.name,
    samples=config.of("samples", number),
    seed=config.seed,
    decode=actor.tokenizer.decode,
    embedder=found,
    novelty=recipe.novelty,
    prefixes=recipe.prefixes,
  )


def embedder(
  name: str,
  model: transformer.Model | None,
  initial: Any,
  mesh: jax.sharding.Mesh,
) -> encoder.Embedder:
  """What the flag names: policy, minilm, or a folder.

  Args:
    name: the flag's value.
    model: whose states "policy" takes,
    initial: under these parameters.
    mesh: that the parameters lie on.

  Raises:
    ConfigError: there is no such model, or none that can be read.
  """
  if name == "policy":
    return encoder.pooled(model, initial, mesh)
  try:
    directory = encoder.packaged() if name == "minilm" else name
    return encoder.sentence(directory, mesh)
  except (ValueError, OSError) as error:
    raise config_lib.ConfigError("embedder", name, str(error)) from None
