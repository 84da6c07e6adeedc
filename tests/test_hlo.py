"""Programs read from their text: what runs, how often, what it costs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax.parallel import costs, hlo
from mrl_jax.parallel import mesh as mesh_lib


def compiled(function, *arguments, mesh=None):
  with jax.set_mesh(mesh or mesh_lib.make(1, 1, 1, jax.devices()[:1])):
    return hlo.parse(jax.jit(function).lower(*arguments).compile().as_text())


def weights(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def scanned(ws, x):
  """Five products, in a loop inside a loop of three."""

  def inner(x, _):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0], None

  return jax.lax.scan(inner, x, None, length=3)[0]


def test_a_loops_body_counts_as_often_as_it_runs():
  module = compiled(scanned, weights(5, 16, 16), weights(8, 16))
  cost = costs.measure(module, 1)
  assert cost.flops == 3 * 5 * 2 * 8 * 16 * 16
  loops = [s for s in hlo.read(module) if s.instruction.op == "while"]
  assert sorted(hlo.trips(module, s.instruction) for s in loops) == [3, 5]


def test_trips_that_only_the_run_knows_are_said_not_to_be_known():
  def until(x):
    return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ x, x)

  module = compiled(until, weights(4, 4))
  (loop,) = (
    s.instruction for s in hlo.read(module) if s.instruction.op == "while"
  )
  assert hlo.trips(module, loop) is None
  once, seven = (costs.measure(module, 1, n).flops for n in (1, 7))
  assert (once, seven) == (2 * 4**3, 7 * 2 * 4**3)


UNROLLED = """HloModule m

%body (p: (u32[], f32[4])) -> (u32[], f32[4]) {
  %p = (u32[], f32[4]) parameter(0)
  %i = u32[] get-tuple-element(%p), index=0
  %two = u32[] constant(2)
  %next = u32[] add(%i, %two)
  %x = f32[4] get-tuple-element(%p), index=1
  %call = f32[4] custom-call(%x), custom_call_target="tpu_custom_call", m={
"text with a brace": {
}}
  ROOT %out = (u32[], f32[4]) tuple(%next, %call)
}

%condition (p: (u32[], f32[4])) -> pred[] {
  %p.1 = (u32[], f32[4]) parameter(0)
  %i.1 = u32[] get-tuple-element(%p.1), index=0
  %seven = u32[] constant(7)
  ROOT %less = pred[] compare(%i.1, %seven), direction=LT
}

ENTRY %main (a: (u32[], f32[4])) -> (u32[], f32[4]) {
  %a = (u32[], f32[4]) parameter(0)
  ROOT %w = (u32[], f32[4]) while(%a), condition=%condition, body=%body
}
"""


def test_an_unrolled_loop_counts_its_strides():
  """The compiler unrolls by two, and kernels bring text of many lines."""
  module = hlo.parse(UNROLLED)
  assert hlo.trips(module, module.computations["main"]["w"]) == 4
  assert costs.measure(module, 1).kernels == 4


def test_a_text_that_is_no_program():
  with pytest.raises(ValueError, match="no ENTRY"):
    hlo.parse("nothing")


@pytest.mark.parametrize(
  ("line", "flops"),
  [
    # A plain product, as XLA writes it for TPUs: [16, 8] x [8, 32].
    ("f32[16,32] convolution(%a, %b), dim_labels=bf_io->bf", 2 * 16 * 8 * 32),
    # Eight products of [4, 8] x [8, 2]: the batch is a spatial dimension that
    # is spread so that only pairs of one batch meet.
    (
      "f32[8,4,2] convolution(%c, %d), window={size=8 stride=7 pad=0_0 "
      "lhs_dilate=8}, dim_labels=0bf_0io->0bf",
      8 * 2 * 4 * 8 * 2,
    ),
    # A convolution over five positions with a window of three.
    (
      "f32[1,5,2] convolution(%e, %f), window={size=3 pad=1_1}, "
      "dim_labels=b0f_0io->b0f",
      2 * 2 * 3 * (3 * 5 - 2),
    ),
  ],
)
def test_products_count_pairs_that_meet(line, flops):
  operands = {
    "a": (16, 8),
    "b": (8, 32),
    "c": (8, 4, 8),
    "d": (8, 8, 2),
    "e": (1, 5, 3),
    "f": (3, 3, 2),
  }
  within = {
    name: hlo.Instruction(
      name, "parameter", (hlo.Shape("f32", dims, False),), (), ""
    )
    for name, dims in operands.items()
  }
  text = f"HloModule m\nENTRY %m (a: f32[]) -> f32[] {{\n  %o = {line}\n}}\n"
  (made,) = hlo.parse(text).computations["m"].values()
  assert costs.products(made, within) == flops


def test_shapes():
  text = "(bf16[2,3]{1,0:T(8,128)S(1)}, s32[], /*index=2*/pred[7]{0})"
  found = hlo.shapes(text)
  assert [(s.kind, s.dims, s.fast) for s in found] == [
    ("bf16", (2, 3), True),
    ("s32", (), False),
    ("pred", (7,), False),
  ]
  assert [s.bytes for s in found] == [12, 4, 7]


def test_collectives_are_counted_with_what_arrives():
  """All-gather of a [64, 16] weight over 8 devices, in a loop of five."""
  mesh = mesh_lib.make(1, 8, 1)
  place = jax.sharding.NamedSharding(
    mesh, jax.sharding.PartitionSpec(None, "fsdp")
  )
  ws = jax.ShapeDtypeStruct((5, 64, 64), jnp.float32, sharding=place)
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
  x = jax.ShapeDtypeStruct((1024, 64), jnp.float32, sharding=rows)

  def run(ws, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0].sum()

  cost = costs.measure(compiled(run, ws, x, mesh=mesh), 8)
  gathered = [m for m in cost.moved if m.kind == "all-gather"]
  assert sum(m.bytes for m in gathered) == 5 * 7 * 64 * 8 * 4
  reduced = [m for m in cost.moved if m.kind == "all-reduce"]
  assert [m.group for m in reduced] == [8]
  assert reduced[0].bytes == round(2 * 4 * 7 / 8)


@pytest.mark.parametrize(
  ("text", "size"),
  [
    ("replica_groups={{0,1,2},{3,4,5}}", 3),
    ("replica_groups=[4,2]<=[8]", 2),
    ("replica_groups=mesh['a'=4,'b'=2] {'b'}", 2),
    ("replica_groups=mesh['a'=4,'b'=2] {'a','b'}", 8),
    ("replica_groups={}", 16),
  ],
)
def test_groups(text, size):
  assert costs._group(text, 16) == size


def test_logits_that_travel_are_told_from_the_table():
  def moved(*dims):
    shape = hlo.Shape("bf16", dims, False)
    return costs.Moved("all-gather", shape, 8, 1, 1)

  table, part, logits = moved(1000, 64), moved(500, 16), moved(8, 13, 1000)
  cut = moved(13, 500)
  everything = costs.Cost(
    0,
    0,
    0,
    (
      table,
      part,
      logits,
      cut,
      moved(
        64,
      ),
    ),
    0,
  )
  found = costs.vocabulary_arrays(everything, 1000, 64, (2, 4))
  assert found == [cut, logits] or found == [logits, cut]


def test_traffic_is_what_xla_counts_where_nothing_is_sliced():
  def run(a, b):
    return jnp.tanh(a @ b) * 2

  arguments = weights(256, 256), weights(256, 256)
  program = jax.jit(run).lower(*arguments).compile()
  wanted = program.cost_analysis()["bytes accessed"]
  found = costs.measure(hlo.parse(program.as_text()), 1).bytes
  np.testing.assert_allclose(found, wanted, rtol=0.01)
