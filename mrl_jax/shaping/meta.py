"""Meta-training: one potential from many tasks' right and wrong responses.

Three terms: the potential should tell a good response from a bad one, before
its end in the token mode; it should use its range; and it should not drift,
or, in the modes that change the reward, not spread within a prompt. The
network's kernels are kept to their norm at every step. Training is joint over
tasks, optionally with one first-order step inside each task, and stops when
tasks that it never saw stop gaining.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from mrl_jax.shaping import features as features_lib
from mrl_jax.shaping import potential

MODES = ("token", "sequence", "bounded")
BINS = 16


class Examples(NamedTuple):
  """Pairs of responses; see `features.Features`."""

  start: Float[Array, "*N D"]
  means: Float[Array, "*N 2 P D"]
  apart: Bool[Array, "*N P"]
  gap: Float[Array, "*N"]  # of the task's standardised rewards
  share: Float[Array, "*N"]  # of good ones among the reference's responses


class Terms(NamedTuple):
  """The objective's parts, before they are weighed."""

  task: Float[Array, ""]
  entropy: Float[Array, ""]  # minus it: in [-1, 0]
  consistency: Float[Array, ""]


@dataclasses.dataclass(frozen=True)
class Settings:
  """How a potential is trained."""

  steps: int = 3000  # at most; 0: leave it as it was born
  tasks: int = 16  # of a step
  pairs: int = 16  # of a task in a step
  lr: float = 1e-3
  alpha: float = 0.3  # weight that sequence and bounded will give it in RL
  entropy_weight: float = 0.05
  consistency_weight: float = 0.1
  inner_lr: float = 0.0  # of one step inside each task; 0: none
  every: int = 100  # steps between looks at the held-out tasks
  patience: int = 8  # such looks without a gain
  seed: int = 0


def terms(
  spec: potential.Spec,
  params: potential.Params,
  examples: Examples,
  alpha: float | int = 0.3,
) -> Terms:
  """The three terms of one task's pairs.

  token: L_task = mean softplus(-(g+ - g-)) over the prefixes at 1/4, 1/2 and
  3/4 that differ; L_con = mean (E_ref[g(s_t) - g(s_0)])^2, the expectation
  over pairs with weight `share` on the good response.
  sequence, bounded: L_task = mean softplus(-(dR + alpha dPhi)); L_con = mean
  within-prompt variance of Phi, share (1 - share) dPhi^2.
  Both: L_ent = -`histogram_entropy` of the values in use.

  MeRLa 2026, https://arxiv.org/abs/2607.26094; the token form is ours.
  """
  found = _values(spec, params, examples)
  good, bad = found[..., 0, :], found[..., 1, :]
  if spec.mode == "token":
    return _of_tokens(spec, params, examples, good[..., :-1], bad[..., :-1])
  rise = good[..., -1] - bad[..., -1]
  share = examples.share
  return Terms(
    task=jax.nn.softplus(-(examples.gap + alpha * rise)).mean(),
    entropy=-histogram_entropy(found[..., -1], spec.bound),
    consistency=(share * (1 - share) * rise**2).mean(),
  )


def _values(
  spec: potential.Spec, params: potential.Params, examples: Examples
) -> Float[Array, "*N 2 P"]:
  both = jnp.stack([examples.start] * 2, axis=-2)
  return potential.evaluate(spec, params, both, examples.means)


def _of_tokens(spec, params, examples, good, bad) -> Terms:
  birth = potential.evaluate(
    spec, params, examples.start, examples.start[..., None, :]
  )
  apart = examples.apart[..., :-1]
  cost = jax.nn.softplus(-(good - bad))
  count = jnp.maximum(apart.sum(), 1)
  share = examples.share[..., None]
  drift = share * (good - birth) + (1 - share) * (bad - birth)
  drift = drift.reshape(-1, drift.shape[-1]).mean(0)
  used = jnp.concatenate([good - birth, bad - birth], axis=-1)
  return Terms(
    task=jnp.where(apart, cost, 0.0).sum() / count,
    entropy=-histogram_entropy(used, spec.bound),
    consistency=(drift**2).mean(),
  )


def histogram_entropy(
  values: Float[Array, "..."], bound: float | int
) -> Float[Array, ""]:
  """The entropy of a soft histogram over [-B, B], as a share of the most.

  p_k = mean softmax_k(-((x - c_k) / w)^2 / 2), w the bins' width;
  H = -sum p_k log p_k / log 16, in [0, 1].
  """
  width = 2 * bound / BINS
  centres = -bound + width * (jnp.arange(BINS) + 0.5)
  distance = (values.reshape(-1, 1) - centres[None, :]) / width
  share = jax.nn.softmax(-(distance**2) / 2, axis=-1).mean(0)
  return -(share * jnp.log(jnp.maximum(share, 1e-30))).sum() / math.log(BINS)


def objective(
  spec: potential.Spec,
  params: potential.Params,
  examples: Examples,
  settings: Settings,
) -> tuple[Float[Array, ""], Terms]:
  """L_task + w_ent L_ent + w_con L_con, kernels within their cap."""
  held = potential.capped(params, spec.cap)
  parts = terms(spec, held, examples, settings.alpha)
  total = parts.task + settings.entropy_weight * parts.entropy
  return total + settings.consistency_weight * parts.consistency, parts


def gradient(
  spec: potential.Spec,
  params: potential.Params,
  examples: Examples,
  settings: Settings,
) -> tuple[potential.Params, Float[Array, ""]]:
  """The mean over tasks [M, N, ...] of their gradients, and the objective.

  With an inner rate, a task's gradient is that of its second half of pairs
  after a step on its first half, second derivatives left out.

  Finn et al. 2017 (first-order MAML), https://arxiv.org/abs/1703.03400.
  """
  one = jax.value_and_grad(lambda p, e: objective(spec, p, e, settings)[0])

  def of_task(task: Examples):
    if not settings.inner_lr:
      return one(params, task)
    half = task.gap.shape[0] // 2
    first, second = _take(task, slice(half)), _take(task, slice(half, None))
    _, step = one(params, first)
    network = jax.tree.map(
      lambda p, g: p - settings.inner_lr * g, params["network"], step["network"]
    )
    return one({**params, "network": network}, second)

  costs, grads = jax.vmap(of_task)(examples)
  return jax.tree.map(lambda g: g.mean(0), grads), costs.mean()


def _take(examples: Examples, rows: Any) -> Examples:
  return jax.tree.map(lambda x: x[rows], examples)


class Data(NamedTuple):
  """All pairs, and which task each is of."""

  examples: Examples  # [N, ...], NumPy
  task: np.ndarray  # [N] i32
  names: tuple[str, ...]  # of the tasks
  held_out: np.ndarray  # [tasks] bool


def data(
  found: features_lib.Features,
  tasks: list[str],
  gaps: Float[np.ndarray, "N"],
  shares: Float[np.ndarray, "N"],
  held_out: set[str],
) -> Data:
  """Features with what is known of their pairs."""
  names = tuple(dict.fromkeys(tasks))
  numbers = {name: number for number, name in enumerate(names)}
  gaps, shares = (np.asarray(x, np.float32) for x in (gaps, shares))
  return Data(
    Examples(*found, gaps, shares),
    np.asarray([numbers[task] for task in tasks], np.int32),
    names,
    np.asarray([name in held_out for name in names]),
  )


def standard(
  spec: potential.Spec, params: potential.Params, examples: Examples
) -> potential.Params:
  """The parameters with the states' own centre and scale."""
  seen = [examples.start, examples.means.reshape(-1, spec.width)]
  seen = np.concatenate([np.asarray(x, np.float64) for x in seen])
  scale = np.maximum(seen.std(0), 1e-3 * max(seen.std(), 1e-12))
  moments = {"centre": seen.mean(0), "scale": scale}
  return params | {k: jnp.asarray(v, jnp.float32) for k, v in moments.items()}


def train(
  spec: potential.Spec,
  data_: Data,
  settings: Settings,
  look: Callable[[int, dict[str, float | int]], None] = lambda step, values: (
    None
  ),
) -> tuple[potential.Params, list[dict[str, float | int]]]:
  """Trains on the tasks that are not held out, and keeps the best.

  Args:
    spec: of the potential, with its mode.
    data_: all pairs.
    settings: how.
    look: told of every look at the held-out tasks.

  Returns:
    Sealed parameters, and one record per look: "step", "train", "held_out",
    and its parts "task", "entropy", "consistency".
  """
  kept = ~data_.held_out[data_.task]
  params = potential.init(spec, jax.random.key(settings.seed))
  params = standard(spec, params, _take(data_.examples, kept))
  if not settings.steps:
    return potential.sealed(params, spec.cap), []
  groups = [
    np.flatnonzero(data_.task == number)
    for number in np.flatnonzero(~data_.held_out)
  ]
  unseen = jax.device_put(_take(data_.examples, ~kept))
  whole = jax.device_put(data_.examples)
  every = min(settings.every, settings.steps)
  settings = dataclasses.replace(settings, every=every)
  optimizer = optax.adam(settings.lr)
  run = jax.jit(functools.partial(_steps, spec, settings, optimizer))
  judge = jax.jit(lambda p: objective(spec, p, unseen, settings))
  network, rest = params["network"], {**params, "network": None}
  state = (network, optimizer.init(network))
  best, least, waited, history = network, math.inf, 0, []
  rng = np.random.default_rng(settings.seed)
  for step in range(every, settings.steps + 1, every):
    state, cost = run(state, rest, whole, _draw(rng, groups, settings))
    total, parts = judge({**rest, "network": state[0]})
    values = {"step": step, "train": float(cost), "held_out": float(total)}
    values |= {k: float(v) for k, v in parts._asdict().items()}
    history.append(values)
    look(step, values)
    if values["held_out"] < least:
      best, least, waited = state[0], values["held_out"], 0
    elif (waited := waited + 1) >= settings.patience:
      break
  return potential.sealed({**rest, "network": best}, spec.cap), history


def _draw(rng, groups, settings: Settings) -> np.ndarray:
  """Pairs of the next steps [every, tasks, pairs], tasks without repetition."""
  rows = []
  for _ in range(settings.every):
    tasks = rng.permutation(len(groups))[: settings.tasks]
    rows.append([rng.choice(groups[task], settings.pairs) for task in tasks])
  return np.asarray(rows)


def _steps(spec, settings, optimizer, state, rest, whole, rows):
  def step(state, chosen):
    network, moments = state
    examples = _take(whole, chosen)
    params = {**rest, "network": network}
    grads, cost = gradient(spec, params, examples, settings)
    change, moments = optimizer.update(grads["network"], moments)
    return (optax.apply_updates(network, change), moments), cost

  state, costs = jax.lax.scan(step, state, rows)
  return state, costs.mean()


def accuracy(
  spec: potential.Spec, params: potential.Params, data_: Data
) -> list[dict[str, Any]]:
  """How often the good prefix has more potential than the bad one.

  One record per task: "task", "held_out", and for each of `features.PLACES`
  the pairs whose prefixes differ there and the share of them that is right, a
  tie being half right.
  """
  examples = jax.device_put(data_.examples)
  run = jax.jit(functools.partial(_values, spec))
  found = np.asarray(run(params, examples))
  rise = found[:, 0] - found[:, 1]
  right = (rise > 0) + 0.5 * (rise == 0)
  records = []
  for number, name in enumerate(data_.names):
    mine = data_.task == number
    record = {"task": name, "held_out": bool(data_.held_out[number])}
    for place, label in enumerate(features_lib.PLACES):
      apart = mine & data_.examples.apart[:, place]
      share = float(right[apart, place].mean()) if apart.any() else None
      record[label] = {"pairs": int(apart.sum()), "right": share}
    records.append(record)
  return records
