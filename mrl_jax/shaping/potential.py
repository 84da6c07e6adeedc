"""The potential: what a frozen reference's states say about a prefix.

A small network reads two vectors of one causal pass of the frozen reference:
the state that has seen the prompt, and the running mean of the states that
have seen the response so far. Kernels are kept to a spectral norm and the
output to (-B, B), so the potential is smooth and small whatever it is asked.
It is trained once, over many tasks (see `meta.py`), and never again: all
values of a rollout, and of a run, are of one version.
"""

import dataclasses
import functools
import itertools
import json
import os
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from jaxtyping import Array, Bool, Float
from safetensors import numpy as safetensors

from mrl_jax.model import transformer
from mrl_jax.parallel import processes

Params = dict[str, Any]
_SPEC, _WEIGHTS = "potential.json", "potential.safetensors"
_FAR = 0.05  # relative distance of a probe: more than a dtype's rounding


@dataclasses.dataclass(frozen=True)
class Spec:
  """The shape of a potential, and what it was made for."""

  width: int  # D, of the reference's states
  hidden: int = 256
  depth: int = 2  # hidden layers
  bound: float = 1.0  # B
  cap: float = 4.0  # on the spectral norm of every kernel
  mode: str = "token"  # whose objective trained it
  steps: int = 0  # of meta-training; 0: untrained
  reference: str = ""  # the model whose states it reads

  def __post_init__(self):
    for field in ("hidden", "depth", "bound", "cap"):
      if not getattr(self, field) > 0:
        raise ValueError(f"{field}={getattr(self, field)} must be above 0")


class Potential(NamedTuple):
  """Ready to use: kernels within their cap."""

  spec: Spec
  params: Params  # "network", and "centre" and "scale" [D] of the states
  probe: Float[np.ndarray, "D"]  # what the reference says of fixed ids


class Network(nnx.Module):
  """u(s_t) before the bound: SiLU layers on [z_x, z_t, z_t - z_x]."""

  def __init__(self, spec: Spec, rngs: nnx.Rngs):
    self.depth = spec.depth
    sizes = (3 * spec.width, *(spec.hidden,) * spec.depth, 1)
    for number, pair in enumerate(itertools.pairwise(sizes)):
      setattr(self, f"layer{number}", nnx.Linear(*pair, rngs=rngs))

  def __call__(self, start: Array, means: Array) -> Array:
    """[..., D], [..., T, D] -> [..., T]; the parts are never concatenated."""
    kernel, bias = self.layer0.kernel[...], self.layer0.bias[...]
    of_start, of_mean, of_change = jnp.split(kernel, 3)
    once = start @ (of_start - of_change) + _ranked(bias, start.ndim)
    x = jax.nn.silu(once[..., None, :] + means @ (of_mean + of_change))
    for number in range(1, self.depth + 1):
      layer = getattr(self, f"layer{number}")
      x = x @ layer.kernel[...] + _ranked(layer.bias[...], x.ndim)
      x = jax.nn.silu(x) if number < self.depth else x
    return x[..., 0]


def _ranked(vector: Array, rank: int) -> Array:
  return vector.reshape((1,) * (rank - 1) + vector.shape)


def init(spec: Spec, key: Array) -> Params:
  """Random parameters of the network; states are taken as they are."""
  module = Network(spec, nnx.Rngs(key))
  return {
    "network": nnx.to_pure_dict(nnx.state(module, nnx.Param)),
    "centre": jnp.zeros(spec.width),
    "scale": jnp.ones(spec.width),
  }


def summaries(
  states: Float[Array, "B T D"],
) -> tuple[Float[Array, "B D"], Float[Array, "B T D"]]:
  """h_x and h_<=t: the state after the prompt, the mean of those since.

  h_<=t = (1/t) sum_{k=1..t} states[:, k], and h_x for t = 0; entry t of
  the states has seen t tokens of the response.
  """
  states = states.astype(jnp.float32)
  start = states[:, 0]
  count = jnp.arange(1, states.shape[1], dtype=jnp.float32)[None, :, None]
  later = jnp.cumsum(states[:, 1:], axis=1) / count
  return start, jnp.concatenate([start[:, None], later], axis=1)


def evaluate(
  spec: Spec,
  params: Params,
  start: Float[Array, "*rows D"],
  means: Float[Array, "*rows T D"],
) -> Float[Array, "*rows T"]:
  """g(s_t) = B tanh(MLP(h_x, h_<=t, h_<=t - h_x) / B), of standardised h.

  MeRLa 2026, https://arxiv.org/abs/2607.26094, in our form: the running mean
  and the tanh are ours.
  """

  def standard(x):
    centre, scale = (_ranked(params[n], x.ndim) for n in ("centre", "scale"))
    return (x - centre) / scale

  network = _bind(spec, params["network"])
  found = network(standard(start), standard(means))
  return spec.bound * jnp.tanh(found / spec.bound)


def values(
  spec: Spec,
  params: Params,
  states: Float[Array, "B T D"],
  mask: Bool[Array, "B T"],
) -> Float[Array, "B T"]:
  """g(s_t) of every prefix that is not the whole response; 0 on padding."""
  return jnp.where(mask, evaluate(spec, params, *summaries(states)), 0.0)


@functools.cache
def _shape(spec: Spec) -> tuple[Any, Any]:
  return nnx.split(nnx.eval_shape(lambda: Network(spec, nnx.Rngs(0))))


def _bind(spec: Spec, network: Params) -> Network:
  graph, state = _shape(spec)
  filled = jax.tree.map(lambda x: x, state)
  nnx.replace_by_pure_dict(filled, network)
  return nnx.merge(graph, filled)


def capped(params: Params, cap: float, steps: int = 16) -> Params:
  """W <- W min(1, cap / sigma(W)), sigma by power iteration from a fixed start.

  Miyato et al. 2018, https://arxiv.org/abs/1802.05957, with a cap in the
  place of 1 and smaller norms left alone.
  """

  def apply(kernel: Array) -> Array:
    fixed = jax.lax.stop_gradient(kernel)
    start = jnp.sin(jnp.arange(kernel.shape[1], dtype=kernel.dtype) + 1)

    def step(_, right):
      left = fixed @ right
      right = left @ fixed
      return right / jnp.maximum(jnp.linalg.norm(right), 1e-30)

    right = jax.lax.fori_loop(0, steps, step, start / jnp.linalg.norm(start))
    left = fixed @ right
    left = left / jnp.maximum(jnp.linalg.norm(left), 1e-30)
    sigma = left @ kernel @ right
    return kernel * jnp.minimum(1.0, cap / jnp.maximum(sigma, 1e-30))

  return _over_kernels(params, apply)


def sealed(params: Params, cap: float) -> Params:
  """`capped` with exact norms, as NumPy arrays: nothing is above the cap."""

  def apply(kernel: np.ndarray) -> np.ndarray:
    exact = np.asarray(kernel, np.float64)
    sigma = np.linalg.svd(exact, compute_uv=False)[0]
    return (exact * min(1.0, cap / max(sigma, 1e-30))).astype(np.float32)

  return _over_kernels(jax.tree.map(np.asarray, params), apply)


def _over_kernels(params: Params, apply) -> Params:
  network = {
    name: {**layer, "kernel": apply(layer["kernel"])}
    for name, layer in params["network"].items()
  }
  return {**params, "network": network}


def probe(model: transformer.Model, params: Any) -> Float[np.ndarray, "D"]:
  """The reference's mean state on fixed ids: whose features these are."""
  ids = np.arange(1, 17, dtype=np.int32)[None, :] % model.spec.vocab
  lengths = np.asarray([8], np.int32)
  states = jax.jit(model.hidden)(params, ids[:, :8], lengths, ids[:, 8:])
  return np.asarray(processes.fetch(states), np.float32)[0].mean(0)


def check(found: Potential, model: transformer.Model, params: Any) -> None:
  """Refuses a potential of another reference.

  Raises:
    ValueError: its states have another width, or are another model's.
  """
  spec = found.spec
  if spec.width != model.spec.width:
    raise ValueError(
      f"reads states of width {spec.width} (of {spec.reference}); this "
      f"policy's have {model.spec.width}"
    )
  mine = probe(model, params)
  apart = np.linalg.norm(mine - found.probe) / np.linalg.norm(found.probe)
  if not apart <= _FAR:
    raise ValueError(
      f"was trained on the states of {spec.reference}; this policy's initial "
      f"states are not those (relative distance {apart:.3g}): meta-train one "
      "for this policy"
    )


def save(
  found: Potential, directory: str | os.PathLike[str], report: dict[str, Any]
) -> None:
  """Writes all that RL needs, and how it was made, as two files."""
  root = pathlib.Path(directory)
  root.mkdir(parents=True, exist_ok=True)
  arrays = traverse_util.flatten_dict(found.params, sep="/")
  arrays = {name: np.asarray(array) for name, array in arrays.items()}
  safetensors.save_file({**arrays, "probe": found.probe}, root / _WEIGHTS)
  text = {"spec": dataclasses.asdict(found.spec), "report": report}
  (root / _SPEC).write_text(json.dumps(text, indent=1) + "\n")


def load(directory: str | os.PathLike[str]) -> Potential:
  """Reads what `save` wrote.

  Raises:
    FileNotFoundError: the directory lacks a file.
    ValueError: it holds something else.
  """
  root = pathlib.Path(directory)
  for name in (_SPEC, _WEIGHTS):
    if not (root / name).is_file():
      raise FileNotFoundError(
        f"{root}: no {name}; python -m experiments.meta_train writes one"
      )
  try:
    spec = Spec(**json.loads((root / _SPEC).read_text())["spec"])
    arrays = safetensors.load_file(root / _WEIGHTS)
    probe_ = arrays.pop("probe")
  except Exception as error:  # whatever the files' readers raise
    raise ValueError(f"{root}: not a potential: {error}") from None
  params = traverse_util.unflatten_dict(arrays, sep="/")
  wanted = jax.eval_shape(lambda: init(spec, jax.random.key(0)))
  shapes = jax.tree.map(lambda x: x.shape, wanted)
  if jax.tree.map(lambda x: x.shape, params) != shapes:
    raise ValueError(f"{root}: the arrays do not fit {_SPEC}")
  return Potential(spec, params, probe_)
