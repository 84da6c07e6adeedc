"""Log-probs moved between tokens: against [U, T] overlaps, and laws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl_jax import collate
from mrl_jax.kernels import realign
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.parallel import sharding
from mrl_jax.text import align
from mrl_jax.types import Trace


def overlaps(source_ends, ends):
  """[U, T] f64: the share of each source token's bytes in each own token."""
  source_starts, starts = (np.append(0, e[:-1]) for e in (source_ends, ends))
  low = np.maximum(source_starts[:, None], starts[None, :])
  high = np.minimum(source_ends[:, None], ends[None, :])
  return np.maximum(high - low, 0) / (source_ends - source_starts)[:, None]


def draw(rng, source, own, total):
  """Ends of two random tokenizations of `total` bytes, each with bytes."""
  sides = [
    np.sort(rng.permutation(total - 1)[: count - 1] + 1)
    for count in (source, own)
  ]
  return [np.append(side, total) for side in sides]


def trace(rows, width, source_width):
  """A padded batch of (log-probs, alignment); None is a padding row."""
  nothing = np.zeros(0)
  columns = {
    name: collate.right_pad(
      [getattr(row[1], name) if row else nothing for row in rows],
      width,
      np.float32 if name.endswith(("part", "share")) else np.int32,
    )
    for name in Trace._fields[1:]
  }
  logprobs = collate.right_pad(
    [row[0] if row else nothing for row in rows], source_width, np.float32
  )
  made = Trace(logprobs=logprobs, **columns)
  return jax.tree.map(jnp.asarray, made)


def row(rng, source_ends, ends, finished=False):
  logprobs = -rng.exponential(size=len(source_ends)).astype(np.float32)
  return logprobs, align.align(source_ends, ends, finished)


@jax.jit
def everything(trace_):
  found = realign.collect(trace_)
  chunked = realign.collect_chunks(trace_)
  return found, chunked, realign.chunk_sums(found, trace_)


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=40)
def test_both_spreads_are_the_oracles(seed):
  rng = np.random.default_rng(seed)
  rows, wanted = [], []
  for _ in range(3):
    total = int(rng.integers(1, 60))
    sizes = rng.integers(1, min(total, 20) + 1, 2)
    source_ends, ends = draw(rng, *sizes, total)
    made = row(rng, source_ends, ends)
    chunked, sums = np.zeros(len(ends)), np.zeros(len(ends))
    lb = made[0].astype(np.float64)
    starts = np.append(0, ends[:-1])
    for theirs, mine in align.chunks(source_ends, ends):
      sums[mine] = lb[theirs].sum()
      share = (ends - starts)[mine] / (ends[mine[-1]] - starts[mine[0]])
      chunked[mine] = sums[mine] * share
    rows.append(made)
    wanted.append((lb @ overlaps(source_ends, ends), chunked, sums))
  found = everything(trace([*rows, None], 20, 20))
  for index, parts in enumerate(wanted):
    for got, want in zip(found, parts, strict=True):
      np.testing.assert_allclose(
        got[index, : len(want)], want, rtol=1e-5, atol=1e-6
      )
      assert not got[index, len(want) :].any()
  assert not any(got[-1].any() for got in found)


LONG = 32768


@pytest.mark.parametrize(
  ("source", "own", "total"),
  [
    (LONG, 20_000, 4 * LONG),
    (20_000, LONG, 4 * LONG),
    (LONG, 1, LONG),  # one receiver token has all
    (LONG, 3, LONG),
    (1, LONG, LONG),  # one source token is spread over all
    (LONG, LONG, LONG),
  ],
)
def test_mass_is_kept_at_32k_tokens(source, own, total):
  rng = np.random.default_rng(source + own)
  source_ends, ends = draw(rng, source, own, total)
  logprobs, alignment = row(rng, source_ends, ends)
  found = everything(trace([(logprobs, alignment)], own, source))
  collected, chunked, sums = (np.asarray(f[0], np.float64) for f in found)
  running = np.append(0, np.cumsum(logprobs, dtype=np.float64))
  for spread in (collected, chunked):
    np.testing.assert_allclose(spread.sum(), running[-1], rtol=1e-6)
  _, heads = np.unique(alignment.chunk_start, return_index=True)
  # A chunk begins with a whole source token and ends with one.
  begins = alignment.first[heads]
  wanted = np.diff(running[np.append(begins, source)])
  atol = 1e-5 * np.maximum(1e-3, np.abs(wanted))
  for spread in (collected, chunked):
    apart = np.add.reduceat(spread, heads) - wanted
    assert (np.abs(apart) <= atol).all()
  assert (np.abs(sums[heads] - wanted) <= atol).all()


def test_equal_tokens_have_exactly_their_log_probs():
  rng = np.random.default_rng(0)
  ends = np.cumsum(rng.integers(1, 7, 5000))
  ends = np.append(ends, ends[-1])
  logprobs, alignment = row(rng, ends, ends, finished=True)
  for spread in everything(trace([(logprobs, alignment)], 5008, 5008)):
    assert (np.asarray(spread[0, :5001]) == logprobs).all()
    assert not spread[0, 5001:].any()


def test_a_whole_token_beside_split_ones_is_exact():
  source_ends, ends = np.asarray([2, 5, 9, 9]), np.asarray([2, 3, 5, 9, 9])
  logprobs = np.asarray([-0.1, -0.7, -1 / 3, -1e-7], np.float32)
  alignment = align.align(source_ends, ends, True)
  found, chunked, _ = everything(trace([(logprobs, alignment)], 8, 4))
  for spread in (found, chunked):
    assert (np.asarray(spread)[0, [0, 3, 4]] == logprobs[[0, 2, 3]]).all()
    np.testing.assert_allclose(spread[0, 1:3], [-0.7 / 3, -1.4 / 3], rtol=1e-6)


def test_what_lies_outside_a_span_is_not_read():
  """A running sum would carry a non-finite number, or lose digits to 1e8."""
  for junk in (-jnp.inf, jnp.nan, -1e8):
    values = jnp.asarray([[junk, 0.1, 0.2, 0.3, junk, 0.5]], jnp.float32)
    start = jnp.asarray([[1, 1, 2, 5, 4, 3]])
    stop = jnp.asarray([[4, 3, 4, 6, 4, 2]])
    found = realign.span_sums(values, start, stop)
    np.testing.assert_allclose(found[0], [0.6, 0.3, 0.5, 0.5, 0, 0], rtol=1e-6)
  # A part of 0 reads nothing either: the last of one token, padding.
  alignment = align.align(np.asarray([1, 3]), np.asarray([1, 2, 3]), False)
  bad = (np.asarray([-np.inf, -1.0], np.float32), alignment)
  found = realign.collect(trace([bad, None], 4, 2))
  assert found[0].tolist() == [-np.inf, -0.5, -0.5, 0]
  assert found[1].tolist() == [0, 0, 0, 0]


def test_rows_are_spread_over_devices_without_talking():
  mesh = mesh_lib.make(8, 1, 1)
  rng = np.random.default_rng(3)
  rows = [row(rng, *draw(rng, 30, 25, 90)) for _ in range(15)]
  whole = trace([*rows, None], 32, 32)
  spread = jax.device_put(whole, sharding.batch(mesh))
  compiled = everything.lower(spread).compile()
  for word in ("all-gather", "all-reduce", "collective-permute", "all-to-all"):
    assert word not in compiled.as_text()
  for got, want in zip(compiled(spread), everything(whole), strict=True):
    assert len(got.sharding.device_set) == 8
    np.testing.assert_array_equal(got, want)


def test_no_array_of_source_by_own_tokens():
  made = trace(
    [
      row(
        np.random.default_rng(0),
        *draw(np.random.default_rng(1), 900, 700, 3000),
      )
    ],
    704,
    912,
  )
  shapes = set()

  def visit(jaxpr):
    for equation in jaxpr.eqns:
      shapes.update(v.aval.shape for v in equation.outvars)
      for inner in jax.core.jaxprs_in_params(equation.params):
        visit(inner)

  visit(jax.make_jaxpr(everything)(made).jaxpr)
  assert max(np.prod(shape) for shape in shapes) <= 2 * 2 * 912
