"""Does the entropy of a prefix say how well it can be continued?

  python -m experiments.studies.prefix_signal --policies=DIR --out=FILE
  python -m experiments.studies.prefix_signal --run=WORKDIR --out=FILE

Prefix regeneration cuts a hard prompt's surest answer where the smoothed
entropy is least, in the hope that the policy can go on from there. Here the
hope is measured. Held-out problems that a policy solves at most once in G
samples are cut at every place, and every prefix is continued many times: the
share of right ones is its pass rate. Reported are rank correlations of
entropy with pass rate, over all prefixes and within each problem, and the pass
rate of the prefix that each rule would choose. A long prefix of a wrong answer
is rarely one that can be saved, and entropy goes with length; so the place of
the cut, and a start from nothing, are measured as predictor and as rule too.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from experiments import evaluate, tasks
from experiments import flags as flags_lib
from experiments.studies import prefix_statistics as statistics
from mrl_jax import config as config_lib
from mrl_jax import records
from mrl_jax.explore import draft as draft_lib
from mrl_jax.explore import explorer, novelty, prefixes
from mrl_jax.model import encoder
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.tasks import dataset
from mrl_jax.train import explorers
from mrl_jax.train import policy as policy_lib

FIELDS = (
  *evaluate.FIELDS,
  *("embedder", "regenerate_boundary", "regenerate_gap", "regenerate_cuts"),
  *("regenerate_cap", "regenerate_temperature"),
)


class Hard(NamedTuple):
  """A problem that is hardly ever solved, and its answer to be cut."""

  problem: dataset.Problem
  draft: draft_lib.Draft
  others: list[draft_lib.Draft]  # of the group's other answers


def find(
  rows: Sequence[records.Rollout],
  problems: Sequence[dataset.Problem],
  samples: int,
  rule: prefixes.Rule,
  decode,
) -> tuple[list[Hard], dict[str, int]]:
  """The hard problems that can be cut, and counts of all."""
  shape = (len(problems), samples)
  correct = np.asarray([row.outcome == "correct" for row in rows])
  scored = np.isfinite([row.reward for row in rows])
  hard = prefixes.hard(correct.reshape(shape), scored.reshape(shape))
  counts = {"problems": len(problems), "hard": int(hard.sum())}
  found = []
  for at in np.flatnonzero(hard).tolist():
    group = rows[at * samples : (at + 1) * samples]

    def cut(part, at=at):
      return draft_lib.make(part, problems[at], at, 0, None, rule, decode)

    draft = cut(group)
    if isinstance(draft, str):
      counts[draft] = counts.get(draft, 0) + 1
      continue
    each = [cut([row]) for row in group]
    others = [
      other
      for other in each
      if not isinstance(other, str) and other.tokens != draft.tokens
    ]
    found.append(Hard(problems[at], draft, others))
  return found, counts


def measure_entropies(
  found: Sequence[Hard],
  rows: Sequence[records.Rollout],
  embedder: encoder.Embedder,
  rule: prefixes.Rule,
) -> list[dict[str, np.ndarray]]:
  """What is known of each problem's J prefixes before any is continued.

  `entropy` is h; `smoothed` is (W h) over the answer's own prefixes, as on a
  first visit; `remembered` has those of the group's other answers beside
  them, as if the prompt had come back often.
  """
  mean = None
  if embedder.centre:
    whole = [
      encoder.Response(row.context, row.tokens.tolist(), row.text)
      for row in rows
    ]
    mean = embedder.embed(whole).mean(0, dtype=np.float64)
  drafts = [draft for hard in found for draft in (hard.draft, *hard.others)]
  embeddings = embedder.embed([r for d in drafts for r in d.responses()])
  ends = np.cumsum([len(draft.places) for draft in drafts])
  parts = iter(np.split(novelty.unit(embeddings, mean), ends[:-1]))
  known = []
  for hard in found:
    group = (hard.draft, *hard.others)
    directions = np.concatenate([next(parts) for _ in group])[: rule.size]
    values = [prefixes.prefix_entropies(d.entropies, d.places) for d in group]
    entropies, count = np.concatenate(values)[: rule.size], len(values[0])

    def smoothed(stop, vectors=directions, values=entropies):
      return prefixes.smooth(vectors[:stop], values[:stop], rule.temperature)

    known.append(
      {
        "place": np.asarray(hard.draft.places, np.float64),
        "entropy": values[0],
        "smoothed": smoothed(count),
        "remembered": smoothed(None)[:count],
      }
    )
  return known


def continued(
  found: Sequence[Hard],
  actor: policy_lib.Actor,
  params: Any,
  pool,
  samples: int,
  parts: int,
) -> list[np.ndarray]:
  """[1 + J, parts] pass rates of each problem: from nothing, then prefixes.

  Each part is the mean of `samples` continuations of their own seeds.
  """
  slots = []
  for hard in found:
    for place in (0, *hard.draft.places):
      item = hard.draft.cut(place)
      for part in range(parts):
        id = f"{hard.problem.id}@{place}.{part}"
        problem = hard.problem._replace(id=id)
        slots.append(explorer.Slot(problem, item.position, item.whole, item))
  if not slots:
    return []
  rows = evaluate.draw(actor, params, slots, pool, samples)
  right = np.asarray([row.outcome == "correct" for row in rows])
  rates = right.reshape(-1, parts, samples).mean(2)
  ends = np.cumsum([1 + len(hard.draft.places) for hard in found])
  return np.split(rates, ends[:-1])


def study(
  actor: policy_lib.Actor,
  params: Any,
  problems: Sequence[dataset.Problem],
  pool,
  config: config_lib.Config,
  mesh: jax.sharding.Mesh,
  samples: int,
  parts: int,
) -> dict[str, Any]:
  """One policy's counts, and a record of every prefix."""
  rule = prefixes.Rule(
    boundary=config.regenerate_boundary,
    gap=config.regenerate_gap,
    cuts=config.regenerate_cuts,
    cap=config.regenerate_cap,
    temperature=config.regenerate_temperature,
  )
  rows = evaluate.score(actor, params, problems, pool, config, samples)
  found, counts = find(rows, problems, samples, rule, actor.tokenizer.decode)
  embedder = explorers.embedder(config.embedder, actor.model, params, mesh)
  known = measure_entropies(found, rows, embedder, rule)
  rates = continued(found, actor, params, pool, samples, parts)
  cuts = []
  for hard, values, rate in zip(found, known, rates, strict=True):
    cuts.append(
      {
        "problem": hard.problem.id,
        "start": rate[0].tolist(),
        "rates": rate[1:].tolist(),
        **{name: value.tolist() for name, value in values.items()},
      }
    )
  counts.update(cut=len(cuts), continuations=parts * samples)
  return {**counts, "prompts": cuts}


def main() -> int:
  values = flags.FLAGS
  config = evaluate.configured(values, FIELDS)
  mesh = mesh_lib.make(*config.mesh)
  task = tasks.load(config)
  count = min(values.problems, task.size or values.problems)
  problems = [task.problem(index) for index in range(count)]
  results = {}
  with tasks.pool(config, task) as pool:
    for actor, params in evaluate.actors(config, values, mesh):
      results[actor.name] = study(
        actor, params, problems, pool, config, mesh, values.n, values.parts
      )
  out = pathlib.Path(values.out)
  out.write_text(json.dumps({"task": task.name, "policies": results}) + "\n")
  for name, result in results.items():
    numbers = {k: v for k, v in result.items() if k != "prompts"}
    print(f"{name}: {numbers}")
    print(statistics.table(result["prompts"]))
  return 0


if __name__ == "__main__":
  evaluate.define(FIELDS)
  flags.DEFINE_string("out", None, "The JSON file to write.", required=True)
  flags.DEFINE_integer("parts", 2, "Times n continuations of each prefix.", 2)
  flags_lib.run(main)
