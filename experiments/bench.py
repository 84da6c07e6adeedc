"""Times the parts of a training step on random weights; prints one JSON.

  python -m experiments.bench --shape=small --reps=5

For a named shape: wall and CPU seconds (median and least) of sampling, of
log-probs alone, of loss and gradient, and of the whole step with a reference
forward, and of that forward with a potential (see bench_shaping.py); tokens
per second; the temporaries XLA allocates; peak memory. The shapes of
bench_sampling.py are of sampling alone. With --tokenizers, also of reading one
tokenizer's completions in another's. CPU seconds are of the whole process and
are the number to compare on a shared
machine. The first, compiling call of each part is reported apart.
"""

import dataclasses
import json
import pathlib
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments import bench_alignment, bench_sampling, bench_shaping
from experiments import flags as flags_lib
from mrl_jax import collate, compose, losses, records
from mrl_jax import config as config_lib
from mrl_jax.model import spec as spec_lib
from mrl_jax.model import transformer
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.parallel import sharding
from mrl_jax.sampling import engine
from mrl_jax.train import state as state_lib
from mrl_jax.train import update as update_lib
from mrl_jax.transforms import advantages, clipping, weights
from mrl_jax.types import Batch, Distribution


@dataclasses.dataclass(frozen=True)
class Shape:
  """A model and a batch."""

  layers: int = 4
  width: int = 256
  mlp: int = 768
  heads: int = 4
  kv_heads: int = 2
  head_dim: int = 64
  vocab: int = 4096
  prompts: int = 8
  samples: int = 8
  prompt_length: int = 64
  completion_length: int = 128


SHAPES = {
  "small": Shape(),
  "tiny": Shape(2, 128, 256, 4, 2, 32, 64, 32, 16, 16, 16),
  "long": Shape(prompts=2, samples=8, completion_length=1024),
}


class Parts:
  """The jitted parts of a step, on random weights."""

  def __init__(self, shape: Shape, dtype: str, remat: str, microbatches: int):
    self.shape = shape
    self.mesh = mesh_lib.make(1, 1, 1, devices=jax.devices()[:1])
    self.model = transformer.make(model_spec(shape, dtype, remat))
    params = self.model.init(jax.random.key(0))
    places = sharding.tree(self.model.axes, params, self.mesh)
    params = jax.device_put(params, places)
    self.reference = jax.tree.map(lambda x: x + 0, params)
    optimizer = state_lib.make_optimizer(1e-4, 100, clip_norm=1.0)
    self.state = state_lib.init(optimizer, params, self.mesh)
    allowed = np.ones(shape.vocab, bool)
    options = {"allowed": allowed, "distribution": Distribution()}
    training = {"microbatches": microbatches}
    self.generate = engine.make(
      self.model,
      self.mesh,
      samples=shape.samples,
      limit=shape.completion_length,
      stop_ids=(shape.vocab,),  # no id: every row is of full length
      seed=0,
      **options,
    )
    self.score = update_lib.make_score(
      self.model, self.mesh, **training, **options
    )
    prepare = compose.chain(
      advantages.group_advantages(),
      clipping.clip_range(0.2, 0.28),
      weights.token_mean(),
    )
    loss = losses.add((1.0, losses.policy_gradient()), (0.04, losses.kl()))
    self.update = update_lib.make(
      self.model,
      optimizer,
      prepare,
      loss,
      state_lib.of(optimizer, params, self.mesh),
      self.mesh,
      **training,
      **options,
    )
    self.gradient = update_lib.make_gradient(
      self.model, loss, **training, **options
    )
    self.prepare = prepare
    self.prompts = _prompts(shape)

  def sample(self, round_: int = 0) -> engine.Samples:
    ids = [
      engine.words("policy", round_, f"prompt/{i}", s)
      for i in range(self.shape.prompts)
      for s in range(self.shape.samples)
    ]
    return self.generate(
      self.state.params, self.prompts, np.asarray(ids, np.uint32)
    )

  def batch(self, out: engine.Samples) -> Batch:
    batch = collate.batch(_rollouts(self.prompts, out, self.shape.samples))
    return jax.device_put(batch, sharding.batch(self.mesh))

  def step(self, round_: int) -> dict[str, float]:
    """A whole step; returns the wall seconds of its phases."""
    start = time.perf_counter()
    out = self.sample(round_)
    sampled = time.perf_counter()
    batch = self.batch(out)
    reference = self.score(self.reference, batch, self.shape.samples).logprobs
    reference.block_until_ready()
    scored = time.perf_counter()
    batch = batch._replace(ref_logprobs=reference)
    self.state, report = self.update(self.state, batch, self.shape.samples)
    jax.block_until_ready(report)
    end = time.perf_counter()
    return {
      "sample": sampled - start,
      "reference": scored - sampled,
      "update": end - scored,
    }


def measure(
  shape: Shape, dtype: str, remat: str, microbatches: int, reps: int
) -> dict[str, Any]:
  """All parts of one shape."""
  parts = Parts(shape, dtype, remat, microbatches)
  rows = shape.prompts * shape.samples
  completion = rows * shape.completion_length
  every = rows * (shape.prompt_length + shape.completion_length)
  out: dict[str, Any] = {
    "shape": dataclasses.asdict(shape),
    "dtype": dtype,
    "jax": jax.__version__,
    "device": jax.devices()[0].device_kind,
    "parameters": sum(x.size for x in jax.tree.leaves(parts.reference)),
  }
  out["sampling"] = timed(lambda r: parts.sample(r), reps)
  batch = parts.batch(parts.sample())
  logprobs = parts.score(parts.reference, batch, shape.samples).logprobs
  batch = batch._replace(ref_logprobs=logprobs)
  params = parts.state.params
  out["logprob"] = timed(
    lambda _: parts.score(params, batch, shape.samples), reps
  )
  prepared = jax.jit(parts.prepare)(batch)
  gradient = jax.jit(parts.gradient, static_argnums=2)
  out["loss_gradient"] = timed(
    lambda _: gradient(params, prepared, shape.samples), reps
  )
  memory = (
    gradient.lower(params, prepared, shape.samples).compile().memory_analysis()
  )
  temporaries = memory.temp_size_in_bytes / 2**20
  out["loss_gradient"]["xla_temporaries_mib"] = round(temporaries, 1)
  out["shaping"] = bench_shaping.measure(parts, batch, microbatches, reps)
  phases = []
  out["step"] = timed(lambda r: phases.append(parts.step(r)), reps)
  out["step"]["phases"] = {
    name: round(statistics.median(p[name] for p in phases[1:]), 4)
    for name in phases[0]
  }
  counts = {
    "sampling": completion,
    "logprob": every,
    "loss_gradient": every,
    "step": completion,
  }
  for name, count in counts.items():
    wall = out[name]["wall"]["median"]
    out[name]["tokens_per_second"] = round(count / wall, 1)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
  out["peak_rss_mib"] = round(peak)
  return out


def timed(run: Callable[[int], Any], reps: int) -> dict[str, Any]:
  """Wall and CPU seconds of `reps` calls after the one that compiles."""
  walls, cpus = [], []
  for rep in range(reps + 1):
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(run(rep))
    walls.append(time.perf_counter() - wall)
    cpus.append(time.process_time() - cpu)
  return {
    "first_call": round(walls[0], 3),
    "wall": _summary(walls[1:]),
    "cpu": _summary(cpus[1:]),
  }


def _summary(values: list[float]) -> dict[str, float]:
  return {
    "median": round(statistics.median(values), 4),
    "min": round(min(values), 4),
  }


def model_spec(shape: Shape, dtype: str, remat: str) -> spec_lib.Spec:
  """The model of a shape: a Qwen3 of its sizes."""
  config = {
    "model_type": "qwen3",
    "hidden_size": shape.width,
    "intermediate_size": shape.mlp,
    "num_hidden_layers": shape.layers,
    "num_attention_heads": shape.heads,
    "num_key_value_heads": shape.kv_heads,
    "head_dim": shape.head_dim,
    "vocab_size": shape.vocab,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
  }
  spec = spec_lib.from_config(config)
  return dataclasses.replace(spec, compute_dtype=dtype, remat=remat)


def _prompts(shape: Shape) -> list[list[int]]:
  rng = np.random.default_rng(0)
  size = (shape.prompts, shape.prompt_length)
  return rng.integers(3, shape.vocab, size).tolist()


def _rollouts(prompts, out: engine.Samples, samples: int):
  """Rows with a checkable reward: the share of even ids at the start."""
  for index, tokens in enumerate(out.tokens):
    number = index // samples
    yield records.Rollout(
      prompt_id=str(number),
      sample=index % samples,
      prompt="",
      context=tuple(prompts[number]),
      tokens=tokens[: out.lengths[index]],
      logprobs=out.logprobs[index, : out.lengths[index]],
      entropies=out.entropies[index, : out.lengths[index]],
      finished=False,
      text="",
      answer="",
      reward=float(np.mean(tokens[:32] % 2 == 0)),
      outcome="",
    )


def main() -> int:
  values = flags.FLAGS
  case = bench_sampling.CASES.get(values.shape)
  if case:
    spec = model_spec(Shape(vocab=case.vocab), values.dtype, values.remat)
    out = bench_sampling.measure(case, spec, values.reps)
  else:
    shape = SHAPES[values.shape]
    out = measure(
      shape, values.dtype, values.remat, values.microbatches, values.reps
    )
  if values.tokenizers:
    if len(values.tokenizers) != 2:
      raise config_lib.ConfigError(
        "tokenizers", tuple(values.tokenizers), "must be two directories"
      )
    out["alignment"] = bench_alignment.measure(*values.tokenizers)
  text = json.dumps({"name": values.shape, **out}, indent=1)
  if values.out:
    pathlib.Path(values.out).write_text(text + "\n")
  print(text)
  return 0


if __name__ == "__main__":
  flags_lib.define(("dtype", "remat", "microbatches"))
  flags.DEFINE_enum(
    "shape", "small", sorted({*SHAPES, *bench_sampling.CASES}), "Which shape."
  )
  flags.DEFINE_integer("reps", 5, "Timed calls of each part.", 1)
  flags.DEFINE_list(
    "tokenizers", [], "Also time reading the first one's tokens in the other's."
  )
  flags.DEFINE_string("out", "", "Also write the JSON here.")
  flags_lib.run(main)
