"""Continuous batched sampling: rows take turns in a fixed number of slots.

A finished row leaves its slot and a waiting one enters, so that a few long
completions do not keep a batch of finished ones waiting. Prompts are computed
once for their G samples, a slotful at a time. The completion cache is as
large as the longest live row needs, and when nothing waits, the last rows are
gathered into fewer slots. What is drawn depends on a row's own key and
position alone: not on the slots, on the neighbours, or on the device count.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool

from mrl_jax import collate
from mrl_jax.model import transformer
from mrl_jax.parallel import processes, sharding
from mrl_jax.sampling import slots as slots_lib

# The names of draws.py are also this module's.
from mrl_jax.sampling.draws import draw as draw
from mrl_jax.sampling.draws import invert_cdf as invert_cdf
from mrl_jax.sampling.draws import row_keys as row_keys
from mrl_jax.sampling.draws import words as words
from mrl_jax.types import Distribution

FIRST_CAPACITY = 32  # completion tokens before the ring first grows
_GROWTH = 2  # the factor between two capacities
_ENTER = 8  # rows enter when one slot in so many is free
_FEWER = 4  # the factor between two numbers of slots


class Samples(NamedTuple):
  """Completions on the host; rows of prompt n are n*G .. (n+1)*G - 1."""

  tokens: np.ndarray  # [B, T] i32, EOS included, 0 beyond the length
  lengths: np.ndarray  # [B] i32
  logprobs: np.ndarray  # [B, T] f32, of the exact sampling distribution
  entropies: np.ndarray  # [B, T] f32, in nats, of the same distribution
  finished: np.ndarray  # [B] bool: stopped by an EOS id, not by the limit


Generate = Callable[[dict, Sequence[Sequence[int]], np.ndarray], Samples]


def make(
  model: transformer.Model,
  mesh: jax.sharding.Mesh,
  *,
  samples: int,
  limit: int,
  stop_ids: tuple[int, ...],
  allowed: Bool[np.ndarray, "V"],
  distribution: Distribution,
  seed: int,
  rows: int = 0,
) -> Generate:
  """Builds `generate(params, prompts, ids) -> Samples`.

  Args:
    model: the policy's pure functions.
    mesh: where rows are spread over the data and fsdp axes.
    samples: G, completions per prompt.
    limit: most completion tokens; a row that reaches it is unfinished.
    stop_ids: any of these ends a row and stays in it.
    allowed: vocabulary ids that may be sampled.
    distribution: temperature, top-k, top-p.
    seed: of the run.
    rows: slots, the most rows decoded at a time; 0 is all at once. Rounded
      up so that they spread evenly over the mesh.

  Returns:
    A function of the parameters, the prompts as lists of ids, and `ids`
    [B, W] uint32, the words that name each row (see `words`).
  """
  programs = slots_lib.make(
    model,
    limit=limit,
    stop_ids=stop_ids,
    allowed=allowed,
    distribution=distribution,
    seed=seed,
  )

  def generate(params, prompts, ids) -> Samples:
    count = len(prompts) * samples
    slots = min(rows or count, count)
    with jax.set_mesh(mesh):
      call = _Call(programs, mesh, params, slots, samples, limit)
      out, lengths = call.run(prompts, np.asarray(ids, np.uint32))
    return _samples(out, lengths, stop_ids)

  return generate


class _Call:
  """One call of `generate`: which row sits where, and what it has drawn."""

  def __init__(self, programs, mesh, params, slots, samples, limit):
    self.programs, self.params = programs, params
    self.unstacked = programs.unstack(params)
    self.samples, self.limit = samples, limit
    self.spread = mesh.shape["data"] * mesh.shape["fsdp"]
    self.placement = sharding.batch(mesh)
    slots = _rounded(slots, self.spread)
    self.rows = np.full(slots, -1)  # the row in each slot
    self.entered = np.zeros(slots, np.int64)
    self.most = max(1, slots // _ENTER)  # rows that enter at a time
    self.step = 0
    self.capacity = min(FIRST_CAPACITY, limit)
    self.state = None
    self.pantry = None  # the prompts computed last, and the first's number

  def run(self, prompts, ids):
    self.context, self.context_lengths = collate.left_pad(prompts)
    count = len(prompts) * self.samples
    self.ids = ids.reshape(count, -1)
    self.waiting = 0  # the first row that has not entered
    kinds = (np.int32, np.float32, np.float32)
    self.out = [np.zeros((count, self.limit), kind) for kind in kinds]
    self.lengths = np.zeros(count, np.int32)
    while True:
      self._enter()
      if not (self.rows >= 0).any():
        return self.out, self.lengths
      self._refit()
      self._decode()

  def _enter(self):
    """Fills the free slots with waiting rows."""
    free = np.flatnonzero(self.rows < 0)
    while len(free) and self.waiting < len(self.ids):
      hidden, prompts, first, end = self._prompts(self.waiting // self.samples)
      take = min(len(free), self.most, end * self.samples - self.waiting)
      rows = np.arange(self.waiting, self.waiting + take)
      places, free = free[:take], free[take:]
      self.rows[places], self.entered[places] = rows, self.step
      self.waiting += take
      if self.state is None:
        size = len(self.rows)
        self.state = self.programs.empty(hidden, prompts, size, self.capacity)
      # What is missing to a full hand goes to a slot that is none.
      spare = self.most - take
      places = np.pad(places, (0, spare), constant_values=len(self.rows))
      rows = np.pad(rows, (0, spare), mode="edge")
      picked = rows // self.samples - first
      self.state = self.programs.enter(
        self.state,
        hidden,
        prompts,
        picked.astype(np.int32),
        places.astype(np.int32),
        self.ids[rows],
      )

  def _prompts(self, number):
    """The pantry that has prompt `number`; computes it if it is the next."""
    count = len(self.context)
    if self.pantry is None or number >= self.pantry[-1]:
      size = min(max(1, len(self.rows) // self.samples), count)
      size = _rounded(size, self.spread)
      picked = np.minimum(np.arange(number, number + size), count - 1)
      placed = processes.place(
        (self.context[picked], self.context_lengths[picked]), self.placement
      )
      computed = self.programs.prefill(self.params, *placed)
      self.pantry = (*computed, number, min(number + size, count))
    return self.pantry

  def _refit(self):
    """Grows or shrinks the ring, and gathers the last rows together."""
    live = np.flatnonzero(self.rows >= 0)
    need = 1 + self.step - int(self.entered[live].min())
    capacity = self.capacity
    if need > capacity or 4 * need <= capacity:
      # What shrinks keeps room, or it would soon grow again.
      room = need if need > capacity else 2 * need
      capacity = FIRST_CAPACITY
      while capacity < room:
        capacity *= _GROWTH
      capacity = min(capacity, self.limit)
    slots = len(self.rows)
    if self.waiting == len(self.ids):
      while self._fewer(slots) >= len(live) and self._fewer(slots) < slots:
        slots = self._fewer(slots)
    if (capacity, slots) == (self.capacity, len(self.rows)):
      return
    kept = np.concatenate([live, np.flatnonzero(self.rows < 0)])[:slots]
    if slots == len(self.rows):
      kept = np.arange(slots)
    kept = kept.astype(np.int32)
    self.state = self.programs.refit(self.state, kept, capacity)
    self.rows, self.entered = self.rows[kept], self.entered[kept]
    self.capacity = capacity

  def _fewer(self, slots):
    return _rounded(max(1, slots // _FEWER), self.spread)

  def _decode(self):
    """One block; its tokens go to their rows and finished rows leave."""
    slots = len(self.rows)
    if self.waiting < len(self.ids):
      floor = slots - self.most
    else:
      fewer = self._fewer(slots)
      floor = fewer if fewer < slots else 0
    self.state, drawn = self.programs.block(
      self.unstacked, self.state, np.int32(floor)
    )
    *columns, counts, live, step = processes.fetch(
      (*drawn, self.state.live, self.state.cache.step)
    )
    times = np.arange(len(columns[0]))
    slot, time = np.nonzero(times[None, :] < counts[:, None])
    row = self.rows[slot]
    for out, column in zip(self.out, columns, strict=True):
      out[row, self.lengths[row] + time] = column[time, slot]
    held = self.rows >= 0
    self.lengths[self.rows[held]] += counts[held]
    self.rows[~live] = -1
    self.step = int(step)


def _rounded(count: int, multiple: int) -> int:
  return count + -count % multiple


def _samples(out, lengths, stop_ids) -> Samples:
  """Trims to the longest completion."""
  tokens, logprobs, entropies = (x[:, : max(1, lengths.max())] for x in out)
  last = tokens[np.arange(len(lengths)), lengths - 1]
  finished = np.isin(last, stop_ids)
  return Samples(tokens, lengths, logprobs, entropies, finished)
