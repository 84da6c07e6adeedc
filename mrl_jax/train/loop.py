"""The loop: every policy generates, answers are verified, every policy learns.

A round is one pass of that. Its prompts are the next ones in the task's
order and the same for all policies, so experience can be joined on the
prompt id. A run is a function of its configuration: killed at any point and
started again in the same folder, it repeats the rounds since the last
checkpoint and leaves the same logs and parameters, bit for bit.
"""

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mrl_jax import config as config_lib
from mrl_jax import diagnostics, records
from mrl_jax.tasks import dataset, verify
from mrl_jax.train import checkpoint, metrics
from mrl_jax.train import policy as policy_lib
from mrl_jax.train import state as state_lib

States = dict[str, state_lib.TrainState]


class Hooks(NamedTuple):
  """What a display hears of; each may do nothing."""

  phase: Callable[[str, str], None]  # policy, name of the phase
  round: Callable[[int, Mapping[str, Mapping[str, float]]], None]
  message: Callable[[str], None]


class Cursor(NamedTuple):
  """Where the run stands: all host state that is not in the logs."""

  round: int = 0  # the next one
  position: int = 0  # of the next prompt in the task's order
  dropped: int = 0  # prompts skipped: over the limit for some policy
  waiting: tuple[int, ...] = ()  # positions put off to the next round


def run(
  config: config_lib.Config,
  policies: Sequence[policy_lib.Policy],
  states: States,
  order: dataset.Order,
  pool: verify.Pool,
  log_for: Callable[[dict[str, Any] | None], metrics.Log],
  checkpoints: checkpoint.Checkpoints,
  hooks: Hooks,
) -> tuple[States, bool]:
  """Trains from the last checkpoint, if any, to the last round.

  Args:
    config: the run's configuration.
    policies: built from it, in its order.
    states: their initial states, by name; donated.
    order: the task's prompts.
    pool: verifies completions.
    log_for: opens the log, cut back to a state if one is given.
    checkpoints: of this run.
    hooks: the display.

  Returns:
    The final states, and whether the last round was reached: SIGTERM and
    SIGINT finish the round, save and return.
  """
  cursor, log_state = Cursor(), None
  latest = checkpoints.latest()
  if latest is not None:
    targets = {
      p.name: state_lib.abstract(states[p.name], p.shardings) for p in policies
    }
    states, host = checkpoints.restore(latest, targets)
    cursor, log_state = Cursor(**host["cursor"]), host["log"]
    hooks.message(f"resumed after round {cursor.round - 1}")
  log = log_for(log_state)
  with _Interrupt(hooks) as interrupt:
    while cursor.round < config.rounds and not interrupt.asked:
      states, cursor = _round(
        config, policies, states, order, pool, log, hooks, cursor
      )
      last = cursor.round == config.rounds or interrupt.asked
      every = config.save_every
      if last or (every and cursor.round % every == 0):
        hooks.phase("", "save")
        host = {"cursor": cursor._asdict(), "log": log.state()}
        checkpoints.save(cursor.round, states, host)
  log.close()
  return states, cursor.round >= config.rounds


def _round(config, policies, states, order, pool, log, hooks, cursor):
  problems, contexts, cursor = take(config, policies, order, cursor)
  number = cursor.round
  rounds, seconds = {}, {}
  for policy in policies:
    hooks.phase(policy.name, "generate")
    with _Clock() as clock:
      rows = policy_lib.sample(
        policy.actor,
        states[policy.name].params,
        problems,
        contexts[policy.name],
        number,
        config.samples,
      )
    hooks.phase(policy.name, "verify")
    with _Clock() as verifying:
      rows = judge(pool, rows, problems, config.samples)
    rounds[policy.name] = records.Round(policy.name, number, tuple(rows))
    seconds[policy.name] = [clock.seconds, verifying.seconds]
  shown = {}
  for policy in policies:
    name = policy.name
    hooks.phase(name, "update")
    with _Clock() as clock:
      states[name], reports = policy_lib.learn(
        policy, states[name], rounds[name], config.updates
      )
    values = summarize(rounds[name], reports, config.samples)
    values["dropped_prompts"] = cursor.dropped
    times = timings(rounds[name], [*seconds[name], clock.seconds])
    log.metrics(name, number, values)
    log.timings(name, number, times)
    if config.save_rollouts:
      log.rollouts(_records(rounds[name]))
    shown[name] = {**values, **times}
  hooks.round(number, shown)
  return states, cursor._replace(round=number + 1)


def take(
  config: config_lib.Config,
  policies: Sequence[policy_lib.Policy],
  order: dataset.Order,
  cursor: Cursor,
) -> tuple[list[dataset.Problem], dict[str, list[tuple[int, ...]]], Cursor]:
  """The next prompts that fit every policy, and their ids in each."""
  problems: list[dataset.Problem] = []
  contexts: dict[str, list[tuple[int, ...]]] = {p.name: [] for p in policies}
  queue, put_off = list(cursor.waiting), []
  position, dropped = cursor.position, cursor.dropped
  seen: set[str] = set()
  while len(problems) < config.prompts:
    if not queue:
      queue, position = [position], position + 1
    at = queue.pop(0)
    problem = order.at(at)
    if problem.id in seen:  # a round across the end of an epoch
      put_off.append(at)
      continue
    ids = {
      p.name: policy_lib.render(p.actor, problem.prompt, config)
      for p in policies
    }
    if any(len(i) > config.prompt_limit for i in ids.values()):
      dropped += 1
      if dropped > 1000 * (len(problems) + 1):
        raise config_lib.ConfigError(
          "prompt_limit", config.prompt_limit, "no prompt of the task fits"
        )
      continue
    seen.add(problem.id)
    problems.append(problem)
    for name, row in ids.items():
      contexts[name].append(row)
  waiting = (*queue, *put_off)
  return (
    problems,
    contexts,
    cursor._replace(position=position, dropped=dropped, waiting=waiting),
  )


def judge(
  pool: verify.Pool,
  rows: Sequence[records.Rollout],
  problems: Sequence[dataset.Problem],
  samples: int,
) -> list[records.Rollout]:
  """The rollouts with their rewards and outcomes."""
  items = [(row.text, problems[i // samples]) for i, row in enumerate(rows)]
  verdicts = pool.score(items)
  return [
    row._replace(reward=float(v.reward), outcome=str(v.outcome.value))
    for row, v in zip(rows, verdicts, strict=True)
  ]


def summarize(
  round_: records.Round, reports: Sequence[Any], samples: int
) -> dict[str, float]:
  """The round's numbers, none of which depends on the clock."""
  rows = round_.own
  rewards = np.asarray([r.reward for r in rows]).reshape(-1, samples)
  right = np.asarray([r.outcome == verify.Outcome.correct.value for r in rows])
  right = right.reshape(-1, samples)
  lengths = np.asarray([len(r.tokens) for r in rows])
  scored = np.isfinite(rewards)
  any_scored = scored.any(axis=1)
  spread = np.where(scored, rewards, -np.inf).max(1) - np.where(
    scored, rewards, np.inf
  ).min(1)
  values = {
    "reward": float(rewards[scored].mean()) if scored.any() else math.nan,
    "pass@1": float(right.mean()),
    f"pass@{samples}": float(right.any(axis=1).mean()),
    "length": float(lengths.mean()),
    "entropy": float(
      np.concatenate([r.entropies for r in rows]).mean(dtype=np.float64)
    ),
    "degenerate": float((spread[any_scored] <= 1e-6).mean())
    if any_scored.any()
    else math.nan,
    "unscored": int((~scored).sum()),
    "truncated": float(np.mean([not r.finished for r in rows])),
  }
  for outcome in verify.Outcome:
    count = sum(r.outcome == outcome.value for r in rows)
    values[f"outcome/{outcome.value}"] = count
  values.update(diagnostics.summarize([r["tokens"] for r in reports]))
  if reports:
    for name in ("loss", "grad_norm"):
      values[name] = float(np.mean([r[name] for r in reports]))
    values["updates"] = int(reports[-1]["step"])
    values["skipped"] = int(reports[-1]["skipped"])
  return values


def timings(
  round_: records.Round, seconds: Sequence[float]
) -> dict[str, float]:
  """Seconds per phase, and tokens per second of sampling and of all."""
  generate, verifying, update = seconds
  tokens = sum(len(row.tokens) for row in round_.own)
  return {
    "seconds/generate": generate,
    "seconds/verify": verifying,
    "seconds/update": update,
    "generated_per_second": tokens / max(generate, 1e-9),
    "tokens_per_second": tokens / max(sum(seconds), 1e-9),
  }


def _records(round_: records.Round):
  for row in round_.own:
    yield {
      "policy": round_.policy,
      "round": round_.number,
      "prompt_id": row.prompt_id,
      "sample": row.sample,
      "prompt": row.prompt,
      "completion": row.text,
      "tokens": row.tokens.tolist(),
      "logprobs_mean": float(row.logprobs.mean(dtype=np.float64)),
      "entropy_mean": float(row.entropies.mean(dtype=np.float64)),
      "reward": row.reward,
      "outcome": row.outcome,
      "finish": "stop" if row.finished else "length",
      "answer": row.answer,
    }


class _Clock:
  """Wall seconds of a block."""

  def __enter__(self) -> "_Clock":
    self._start = time.perf_counter()
    return self

  def __exit__(self, *unused) -> None:
    self.seconds = time.perf_counter() - self._start


class _Interrupt:
  """Turns the first SIGTERM or SIGINT into a request; the second ends."""

  def __init__(self, hooks: Hooks):
    self._hooks = hooks
    self._old: dict[int, Any] = {}
    self.asked = False

  def __enter__(self) -> "_Interrupt":
    for number in (signal.SIGTERM, signal.SIGINT):
      try:
        self._old[number] = signal.signal(number, self._ask)
      except ValueError:  # not the main thread: the caller handles signals
        break
    return self

  def _ask(self, number, frame) -> None:
    del frame
    self.asked = True
    signal.signal(number, self._old[number])
    self._hooks.message("stopping after this round; again to stop at once")

  def __exit__(self, *unused) -> None:
    for number, handler in self._old.items():
      signal.signal(number, handler)
