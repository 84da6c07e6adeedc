"""An update whose microbatches are as wide as their longest row, not as all's.

The rows of an update are as wide as its longest completion. Where lengths
differ much, most of what is computed is padding. Here an update's groups, or
pieces of them, are sorted by length before they are split into microbatches,
and each microbatch is cut to its own width, in quarters of the whole, so that
at most four programs are compiled. The objective is a weighted sum whose
weights are made before the split, so only the order of its terms changes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jaxtyping import Bool, Int

from mrl_jax import diagnostics
from mrl_jax.kernels import veto as veto_lib
from mrl_jax.model import transformer
from mrl_jax.parallel import processes, sharding
from mrl_jax.train import state as state_lib
from mrl_jax.train import update as update_lib
from mrl_jax.types import Batch, BatchTransform, Distribution, TokenLoss

# Its last argument is the width of each microbatch.
Update = Callable[
  [state_lib.TrainState, Batch, int, tuple[int, ...]],
  tuple[state_lib.TrainState, Any],
]
PARTS = 4  # of the whole width, in which widths are told apart
_STEP = 8  # tokens that a width is a multiple of


class Cut(NamedTuple):
  """How the rows of an update stand, and how wide its microbatches are."""

  rows: np.ndarray  # [B], which row of the batch stands at each place
  share: int  # rows in turn that have one prompt
  widths: tuple[int, ...]


def cut(
  lengths: Int[np.ndarray, "B"],
  share: int,
  count: int,
  whole: int,
  pieces: int = 1,
) -> Cut:
  """Rows of similar length together.

  A group is sorted by length and cut into pieces, which then go different
  ways: its prompt is computed once for each. With one piece it stays whole.

  Args:
    lengths: of the completions, group by group.
    share: rows of a group.
    count: of microbatches.
    whole: the width of the batch.
    pieces: of a group; as many of them as divide its rows.
  """
  pieces = math.gcd(pieces, share)
  groups = np.arange(len(lengths)).reshape(-1, share)
  ranked = np.argsort(lengths[groups], axis=1, kind="stable")
  if pieces > 1:
    groups = np.take_along_axis(groups, ranked, axis=1)
  groups = groups.reshape(-1, share // pieces)
  longest = lengths[groups].max(1)
  groups = groups[order(longest.tolist(), count)]
  found = widths(lengths[groups].max(1).tolist(), count, whole)
  return Cut(groups.reshape(-1), share // pieces, found)


def order(lengths: Sequence[int], count: int) -> list[int]:
  """How groups are to stand so that microbatches hold similar lengths.

  `update.split` gives group n to microbatch n % count, so the shortest
  groups stand at 0, count, 2 count ...

  Args:
    lengths: of each group's longest completion; a multiple of count.
    count: of microbatches.
  """
  ranked = np.argsort(np.asarray(lengths), kind="stable")
  return ranked.reshape(count, -1).T.reshape(-1).tolist()


def widths(lengths: Sequence[int], count: int, whole: int) -> tuple[int, ...]:
  """The width of each microbatch of groups that stand in such an order."""
  longest = np.asarray(lengths).reshape(-1, count).max(0)
  step = -(-whole // PARTS)
  step += -step % _STEP
  cut = np.maximum(1, -(-longest // step)) * step
  return tuple(np.minimum(cut, whole).tolist())


def narrow(batch: Batch, width: int) -> Batch:
  """The first `width` completion tokens of all rows."""

  def cut(x):
    return None if x is None else x[:, :width]

  fields = (
    *("tokens", "weights", "behavior_logprobs", "credit"),
    *("old_logprobs", "ref_logprobs"),
  )
  trace, shaping = batch.trace, batch.shaping
  if trace is not None:
    kept = trace.logprobs
    trace = jax.tree.map(cut, trace)._replace(logprobs=kept)
  if shaping is not None:
    shaping = shaping._replace(potentials=cut(shaping.potentials))
  changed = {name: cut(getattr(batch, name)) for name in fields}
  return batch._replace(trace=trace, shaping=shaping, **changed)


def make(
  model: transformer.Model,
  optimizer: optax.GradientTransformation,
  prepare: BatchTransform,
  loss: TokenLoss,
  shardings: state_lib.TrainState,
  mesh: jax.sharding.Mesh,
  *,
  allowed: Bool[np.ndarray, "V"],
  distribution: Distribution,
  microbatches: int,
  veto: veto_lib.Rule | None = None,
) -> Update:
  """Builds `update(state, batch, share, widths) -> (state, report)`.

  The state and the report are those of `update.make`, to rounding.
  """
  gradient = update_lib.make_gradient(
    model, loss, allowed=allowed, distribution=distribution, veto=veto
  )
  rows, everywhere = sharding.batch(mesh), sharding.replicated(mesh)
  kept = (everywhere, everywhere, shardings.params)

  def begin(batch: Batch):
    return prepare(batch), diagnostics.shaping(batch)

  def part(params, batch: Batch, index, share: int, width: int):
    split = update_lib.split(batch, microbatches, share)
    mine = jax.tree.map(lambda x: x[index], split)
    return gradient(params, narrow(mine, width), share)

  def more(params, carry, batch: Batch, index, share: int, width: int):
    return update_lib.add(carry, part(params, batch, index, share, width))

  def end(state, batch: Batch, found, shaped):
    return update_lib.apply(optimizer, state, batch, found, shaped)

  begin = jax.jit(begin, in_shardings=rows, out_shardings=(rows, everywhere))
  part = jax.jit(part, static_argnums=(3, 4), out_shardings=kept)
  more = jax.jit(
    more, static_argnums=(4, 5), donate_argnums=1, out_shardings=kept
  )
  end = jax.jit(end, donate_argnums=0, out_shardings=(shardings, everywhere))

  def update(state, batch: Batch, share: int, widths_: tuple[int, ...]):
    batch, shaped = begin(batch)
    found = None
    for number, width in enumerate(widths_):
      index = processes.place(np.int32(number), everywhere)
      if found is None:
        found = part(state.params, batch, index, share, width)
      else:
        found = more(state.params, found, batch, index, share, width)
    return end(state, batch, found, shaped)

  return update
