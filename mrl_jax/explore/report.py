"""Exploration in numbers, the same on every machine."""

from collections.abc import Sequence

import numpy as np

from mrl_jax.explore import memory, queue

Values = dict[str, int | float]


def novelty(
  found: np.ndarray,
  correct: np.ndarray,
  warm: np.ndarray,
  seen: memory.Memory,
) -> Values:
  """How new the right rollouts of groups with a full memory are.

  Args:
    found: [N, G], their nu.
    correct: [N, G] bool.
    warm: [N] bool, whose memory was full enough.
    seen: the memory after the round.
  """
  values: Values = {
    "explore/warm": float(warm.mean()),
    "explore/remembered": len(seen.entries),
    "explore/evicted": seen.evicted,
  }
  nu = found[correct & warm[:, None]]
  if nu.size:
    values["explore/novelty"] = float(nu.mean(dtype=np.float64))
    for share in (10, 50, 90):
      point = float(np.percentile(nu.astype(np.float64), share))
      values[f"explore/novelty_p{share}"] = point
  return values


def regenerated(
  items: Sequence[queue.Item | None], correct: np.ndarray
) -> Values:
  """How the groups that continue a prefix fare against their parents.

  Args:
    items: what each of the N groups continues, if it does.
    correct: [N, G] bool.
  """
  tried = [n for n, item in enumerate(items) if item is not None]
  values: Values = {"explore/regenerated": len(tried)}
  if tried:
    mine = [items[n] for n in tried]
    rates = correct[tried].mean(1)
    values.update(
      {
        "explore/regenerated_pass": float(rates.mean()),
        "explore/parent_pass": float(np.mean([i.passed for i in mine])),
        "explore/regenerated_solved": float((rates > 0).mean()),
        "explore/prefix": float(np.mean([len(i.prefix) for i in mine])),
        "explore/depth": float(np.mean([i.depth for i in mine])),
      }
    )
  return values


def waiting(queue_: queue.Queue, queued: int, number: int) -> Values:
  """How long the queue is and how old its items are, in rounds.

  Args:
    queue_: after the round.
    queued: items that the round added.
    number: of the round.
  """
  ages = [number - item.round for item in queue_.items]
  return {
    "explore/queued": queued,
    "explore/queue": len(ages),
    "explore/queue_age": float(np.mean(ages)) if ages else 0.0,
    "explore/queue_age_max": max(ages, default=0),
    "explore/queue_dropped": queue_.dropped,
  }
