"""Makes a tiny policy: random weights, then supervised on task solutions.

  python -m experiments.warmstart --tokenizer=char --out=DIR [--task=countdown]

It is the training step of the library with another recipe: the loss is minus
the log-prob of the solution's tokens, EOS included. The learning rate stays
constant to the end on purpose. A decayed rate leaves the policy in a narrow
minimum, which the first steps of reinforcement learning, all noise, throw it
out of; one that was trained at a rate also bears it.
"""

import dataclasses
import pathlib
from collections.abc import Sequence

import jax
import numpy as np
from absl import flags
from rich import progress as rich_progress

from experiments import flags as flags_lib
from experiments import tasks, tokenizers
from mrl_jax import collate, losses, records
from mrl_jax import config as config_lib
from mrl_jax.model import hf, transformer
from mrl_jax.model import spec as spec_lib
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.tasks import arithmetic, dataset
from mrl_jax.text import prompts as prompts_lib
from mrl_jax.text import tokenizer as tokenizer_lib
from mrl_jax.train import state as state_lib
from mrl_jax.train import update as update_lib
from mrl_jax.transforms import weights
from mrl_jax.types import Batch, Distribution

KINDS = {
  "char": tokenizers.char,
  "merged": tokenizers.merged,
  "operator": tokenizers.operator,
}
FAMILIES = ("llama", "qwen3")


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How a tiny policy is made; the defaults made the packaged ones."""

  family: str = "llama"  # the architecture: one of FAMILIES
  steps: int = 3000  # at most
  until: float = 0.45  # stop once the mean loss of 50 steps is below, nats
  batch: int = 128
  lr: float = 1e-3
  seed: int = 0
  width: int = 128
  layers: int = 2
  heads: int = 4
  kv_heads: int = 2
  mlp: int = 256


def make(
  kind: str,
  out: pathlib.Path,
  recipe: Recipe,
  task: dataset.Task | None = None,
) -> list[float]:
  """Writes the policy to `out`; returns the loss of every step.

  Args:
    kind: of tokenizer, one of KINDS.
    out: a folder.
    recipe: how it is trained.
    task: whose problems' answers are learned; None: chain arithmetic.
  """
  task = task or arithmetic.make(seed=recipe.seed + 1)
  tokenizers.write(str(out), KINDS[kind]())
  tokenizer = tokenizer_lib.load(str(out))
  model = transformer.make(
    dataclasses.replace(
      spec_lib.from_config(model_config(tokenizer, recipe)), remat="dots"
    )
  )
  mesh = mesh_lib.make(1, 1, 1, devices=jax.devices()[:1])
  params = jax.device_put(
    model.init(jax.random.key(recipe.seed)),
    jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()),
  )
  optimizer = state_lib.make_optimizer(
    recipe.lr, recipe.steps, warmup=50, clip_norm=1.0
  )
  state = state_lib.init(optimizer, params, mesh)
  update = update_lib.make(
    model,
    optimizer,
    weights.token_mean(),
    losses.score(),
    state_lib.of(optimizer, params, mesh),
    mesh,
    allowed=tokenizer.allowed(model.spec.vocab),
    distribution=Distribution(),
  )
  values = []
  with jax.set_mesh(mesh):
    for step in rich_progress.track(range(recipe.steps), description=kind):
      chosen = range(step * recipe.batch, (step + 1) * recipe.batch)
      rows = _batch([task.problem(i) for i in chosen], tokenizer)
      state, report = update(state, rows, 1)
      values.append(float(report["loss"]))
      if len(values) >= 50 and np.mean(values[-50:]) < recipe.until:
        break
  hf.save(model, state.params, out, source_directory=out)
  return values


def model_config(
  tokenizer: tokenizer_lib.Tokenizer, recipe: Recipe
) -> dict[str, object]:
  """The config.json of a tiny policy over the tokenizer."""
  return {
    "model_type": recipe.family,
    "hidden_size": recipe.width,
    "intermediate_size": recipe.mlp,
    "num_hidden_layers": recipe.layers,
    "num_attention_heads": recipe.heads,
    "num_key_value_heads": recipe.kv_heads,
    "head_dim": recipe.width // recipe.heads,
    "vocab_size": tokenizer.vocab_size,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": tokenizer.eos_ids[0],
    "pad_token_id": tokenizer.pad_id,
  }


def _batch(problems: Sequence[dataset.Problem], tokenizer) -> Batch:
  rows = []
  for problem in problems:
    ids = tokenizer.encode(problem.answer)
    tokens = np.asarray([*ids, tokenizer.eos_ids[0]], np.int32)
    nothing = np.zeros(len(tokens), np.float32)
    rows.append(
      records.Rollout(
        prompt_id=problem.id,
        sample=0,
        prompt=problem.prompt,
        context=tuple(prompts_lib.render(tokenizer, problem.prompt)),
        tokens=tokens,
        logprobs=nothing,
        entropies=nothing,
        finished=True,
        text=problem.answer,
        answer=problem.answer,
        reward=1.0,
        outcome="correct",
      )
    )
  return collate.batch(rows)


def main() -> int:
  values = flags.FLAGS
  out = pathlib.Path(values.out)
  if (out / "model.safetensors").exists():
    raise config_lib.ConfigError("out", out, "a model is there already")
  recipe = Recipe(
    **{f.name: values[f.name].value for f in dataclasses.fields(Recipe)}
  )
  task = tasks.load(
    config_lib.Config(
      workdir=values.out,
      policies=(values.out,),
      seed=recipe.seed + 1,
      task=values.task,
      task_args=values.task_args,
    )
  )
  found = make(values.tokenizer, out, recipe, task)
  print(f"{out}: loss {found[0]:.3f} -> {np.mean(found[-20:]):.3f}")
  return 0


if __name__ == "__main__":
  flags.DEFINE_enum("tokenizer", "char", sorted(KINDS), "Which tokenizer.")
  flags.DEFINE_string("out", None, "Folder to write.", required=True)
  flags.DEFINE_enum("task", "chain_arithmetic", [*tasks.BUILT_IN], "Which.")
  flags.DEFINE_string("task_args", "{}", "Its arguments, as a JSON object.")
  flags.DEFINE_enum("family", "llama", FAMILIES, "The architecture.")
  for field in dataclasses.fields(Recipe)[1:]:
    is_float = isinstance(field.default, float)
    define = flags.DEFINE_float if is_float else flags.DEFINE_integer
    define(field.name, field.default, f"{field.name} of the recipe.")
  flags_lib.run(main)
