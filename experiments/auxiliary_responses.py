"""Right and wrong responses to the prompts of auxiliary tasks.

They are a policy's own, or made: the solution, and something likely wrong. No
response is taken without its task's verifier. What gives no pair is counted.
"""

import collections
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from experiments import evaluate
from experiments.auxiliary_tasks import Variant
from mrl_jax import config as config_lib
from mrl_jax import records
from mrl_jax.explore import explorer
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.shaping import pairs
from mrl_jax.tasks import dataset, verify
from mrl_jax.train import policy as policy_lib

_OF_A_PROMPT = 2  # pairs at most
_SLOTS = 2048  # responses sampled at a time
_TOGETHER = 19  # tasks sampled in one go

# Prompts that gave no pair, by (family, reason).
Skipped = collections.Counter[tuple[str, str]]
Tell = Callable[[int], None]  # so many more tasks are done


def corrupted(
  tasks: Sequence[Variant],
  count: int,
  seed: int,
  skipped: Skipped,
  tell: Tell = lambda done: None,
) -> list[pairs.Pair]:
  """Up to `count` pairs of each task, the wrong one made from the right one.

  Args:
    tasks: the tasks.
    count: prompts of a task.
    seed: of prompts and errors.
    skipped: counts what gave no pair.
    tell: told of tasks that are done.
  """
  found = []
  for group in _alike(tasks):
    with _pool(group) as pool:
      for task in group:
        found += _corrupted(task, count, seed, pool, skipped)
        tell(1)
  return found


def _corrupted(task, count, seed, pool, skipped) -> Iterator[pairs.Pair]:
  generator = np.random.default_rng([seed, *map(ord, task.name)])
  problems = task.problems(seed, count)
  wrong = task.wrong(problems, generator)
  tried = [
    (text, problem)
    for problem, texts in zip(problems, wrong, strict=True)
    for text in (problem.answer, *texts)
  ]
  verdicts = iter(pool.score(tried))
  for problem, texts in zip(problems, wrong, strict=True):
    solution, *judged = itertools.islice(verdicts, 1 + len(texts))
    bad = [
      text
      for text, verdict in zip(texts, judged, strict=True)
      if verdict.outcome == verify.Outcome.wrong
    ]
    if solution.outcome != verify.Outcome.correct:
      skipped[_family(task), "its solution is not right"] += 1
    elif not bad:
      skipped[_family(task), "no response to it is wrong"] += 1
    else:
      yield pairs.Pair(task.name, problem.prompt, problem.answer, bad[0])


def sampled(
  tasks: Sequence[Variant],
  policy: str,
  count: int,
  samples: int,
  seed: int,
  skipped: Skipped,
  tell: Tell = lambda done: None,
) -> list[pairs.Pair]:
  """The policy's own right and wrong answers to `count` prompts of each task.

  A prompt with both gives up to two pairs, each of other texts. The share of
  a pair is the prompt's pass rate.

  Args:
    tasks: the tasks.
    policy: a Hugging Face directory.
    count: prompts of a task.
    samples: answers to a prompt.
    seed: of prompts, samples and pairing.
    skipped: counts what gave no pair.
    tell: told of tasks that are done.
  """
  mesh = mesh_lib.make(-1, 1, 1)
  found: dict[str, list[pairs.Pair]] = {task.name: [] for task in tasks}
  for group in _alike(tasks):
    config = config_lib.Config(
      workdir="unused",
      policies=(policy,),
      seed=seed,
      completion_limit=group[0].limit,
      rows=_SLOTS,
    )
    actor, params = policy_lib.load_actor(config, 0, mesh, samples)
    with _pool(group) as pool:
      for hand in _hands(group):
        asked = [
          (task, slot)
          for task in hand
          for slot in _slots(task, count, actor, config, skipped)
        ]
        drawn = _drawn(asked, actor, params, pool, samples)
        for task, problem, answers in drawn:
          found[task.name] += _paired(task, problem, answers, skipped)
        tell(len(hand))
  return [pair for task in tasks for pair in found[task.name]]


def _pool(group: Sequence[Variant]) -> verify.Pool:
  """With so long a deadline that a busy machine finds the same pairs."""
  return verify.Pool(group[0].verifier, deadline_seconds=120)


def _alike(tasks: Sequence[Variant]) -> list[list[Variant]]:
  """Those of one verifier and limit together."""
  found: dict[tuple, list[Variant]] = {}
  for task in tasks:
    found.setdefault((task.verifier, task.limit), []).append(task)
  return list(found.values())


def _hands(tasks: Sequence[Variant]) -> list[Sequence[Variant]]:
  """Long and short prompts together: the fewer shapes, the less is compiled."""
  count = -(-len(tasks) // _TOGETHER)
  return [tasks[number::count] for number in range(count)]


def _slots(task, count, actor, config, skipped) -> Iterator[explorer.Slot]:
  """The problems whose prompts the policy can read."""
  for number, problem in enumerate(task.problems(config.seed, count)):
    if actor.tokenizer.round_trip(problem.prompt) == "unknown":
      skipped[_family(task), "its prompt is not in the vocabulary"] += 1
      continue
    context = policy_lib.render(actor, problem.prompt, config)
    yield explorer.Slot(problem, number, context)


def _drawn(asked, actor, params, pool, samples) -> Iterator[tuple]:
  """Each task and problem with the policy's verified answers."""
  if not asked:
    return
  slots = [slot for _, slot in asked]
  rows = evaluate.draw(actor, params, slots, pool, samples)
  for number, (task, slot) in enumerate(asked):
    first = number * samples
    yield task, slot.problem, rows[first : first + samples]


def _paired(
  task: Variant,
  problem: dataset.Problem,
  answers: Sequence[records.Rollout],
  skipped: Skipped,
) -> list[pairs.Pair]:
  """Pairs of different texts; what did not end is no response."""
  texts: dict[str, list[str]] = {}
  for row in answers:
    if row.finished and row.text.strip():
      texts.setdefault(row.outcome, []).append(row.text)
  right, wrong = (
    list(dict.fromkeys(texts.get(outcome.value, ())))
    for outcome in (verify.Outcome.correct, verify.Outcome.wrong)
  )
  if not (right and wrong):
    missing = "wrong" if right else "right"
    skipped[_family(task), f"no response to it is {missing}"] += 1
    return []
  correct = verify.Outcome.correct.value
  share = sum(row.outcome == correct for row in answers) / len(answers)
  return [
    pairs.Pair(
      task.name,
      problem.prompt,
      right[number % len(right)],
      wrong[number % len(wrong)],
      share=share,
    )
    for number in range(min(_OF_A_PROMPT, max(len(right), len(wrong))))
  ]


def _family(task: Variant) -> str:
  return task.name.split("/")[0]
