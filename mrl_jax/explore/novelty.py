"""How new a rollout is: its distance to what its prompt has seen before.

Every prompt remembers the embeddings of its last rollouts, right and wrong
alike. A rollout's novelty is the cosine distance to the nearest of those and
of its siblings. Added to the advantage of right answers after the group's
normalisation, it lets a group that solved its prompt in every sample still
learn: to keep more than one way of solving it.

ExTra 2026, https://arxiv.org/abs/2606.24994.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from mrl_jax.explore import memory as memory_lib
from mrl_jax.kernels import nearest

_BLOCK = 256  # groups of a call: bounds the device's memory, fixes the shape
_novelty = jax.jit(nearest.novelty, static_argnums=4)


class Rule(NamedTuple):
  """What is remembered, and what a rollout's novelty is worth."""

  weight: float = 0.1  # alpha
  size: int = 0  # embeddings that a prompt remembers; 0: G
  correct: bool = False  # remember and compare with right rollouts alone
  before: bool = False  # add to the reward, before normalisation
  prompts: int = 65536  # with a memory

  def memory(self, samples: int) -> memory_lib.Memory:
    """The empty memory of a policy with G samples per prompt.

    Raises:
      ValueError: it could never hold the G entries that novelty waits for.
    """
    if self.size and self.size < samples:
      raise ValueError(f"size={self.size} must be 0 or at least G={samples}")
    return memory_lib.Memory(self.size or samples, self.prompts)


def unit(embeddings: np.ndarray, mean: np.ndarray | None = None) -> np.ndarray:
  """[N, E] f32 directions, of the distance to `mean`; a zero row stays 0."""
  rows = np.asarray(embeddings, np.float64)
  if mean is not None:
    rows = rows - np.asarray(mean, np.float64)
  norms = np.linalg.norm(rows, axis=-1, keepdims=True)
  return (rows / np.maximum(norms, 1e-12)).astype(np.float32)


def score(
  memory: memory_lib.Memory,
  names: Sequence[str],
  embeddings: np.ndarray,
  correct: np.ndarray,
  rule: Rule,
) -> tuple[np.ndarray, memory_lib.Memory]:
  """Each row's novelty, and the memory once it has seen them all.

  All rows are compared with the memory as it was, so their order does not
  matter where two groups have one prompt.

  Args:
    memory: what the prompts have seen.
    names: the prompts of N groups.
    embeddings: [N, G, E], of unit norm.
    correct: [N, G] bool.
    rule: what counts.

  Returns:
    nu [N, G] float32, and the new memory.
  """
  pool = correct if rule.correct else np.ones_like(correct)
  parts = [
    _block(
      memory, names[i : i + _BLOCK], embeddings[i:][:_BLOCK], pool[i:][:_BLOCK]
    )
    for i in range(0, len(names), _BLOCK)
  ]
  pushed = memory.push(
    [
      (name, rows[keep])
      for name, rows, keep in zip(names, embeddings, pool, strict=True)
    ]
  )
  return np.concatenate(parts), pushed


def _block(memory, names, embeddings, pool) -> np.ndarray:
  """Novelties of at most `_BLOCK` groups, in one call."""
  count, samples, width = embeddings.shape
  earlier, filled = memory.padded(names, width)
  more = (-count) % min(_BLOCK, 1 << (count - 1).bit_length())
  grow = [(0, more)]
  found = _novelty(
    np.pad(embeddings, [*grow, (0, 0), (0, 0)]),
    np.pad(pool, [*grow, (0, 0)]),
    np.pad(earlier, [*grow, (0, 0), (0, 0)]),
    np.pad(filled, [*grow, (0, 0)]),
    samples,
  )
  return np.asarray(found)[:count]
