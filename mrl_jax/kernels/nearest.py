"""How far directions are from their nearest neighbours, group by group."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def novelty(
  embeddings: Float[Array, "N G E"],
  pool: Bool[Array, "N G"],
  memory: Float[Array, "N M E"],
  filled: Bool[Array, "N M"],
  warm: int,
) -> Float[Array, "N G"]:
  """The cosine distance of each row to what is nearest to it.

  nu_i = max(0, 1 - max_{e in memory or pooled siblings, not i} <e_i, e>)

  and 0 for the whole group until its memory holds `warm` entries, or where
  there is nothing to compare with.

  ExTra 2026, https://arxiv.org/abs/2606.24994.

  Args:
    embeddings: of unit norm, the G rows of each of N groups.
    pool: which rows their siblings are compared with.
    memory: of unit norm, what each group's prompt has seen before.
    filled: which of its slots hold something.
    warm: entries that a memory must hold.
  """
  dot = jax.lax.Precision.HIGHEST
  size = embeddings.shape[1]
  siblings = jnp.einsum("nge,nhe->ngh", embeddings, embeddings, precision=dot)
  others = pool[:, None, :] & ~jnp.eye(size, dtype=bool)[None]
  earlier = jnp.einsum("nge,nme->ngm", embeddings, memory, precision=dot)
  nearest = jnp.maximum(
    jnp.max(siblings, -1, where=others, initial=-jnp.inf),
    jnp.max(earlier, -1, where=filled[:, None, :], initial=-jnp.inf),
  )
  ready = (filled.sum(-1) >= warm)[:, None] & (nearest > -jnp.inf)
  return jnp.where(ready, jnp.clip(1.0 - nearest, 0.0), 0.0)
