"""One of several processes of a test: python -m tests.process_program ...

Its arguments are a function of this module, the coordinator's port, the
number of processes, which of them this is, and a folder.
"""

import os
import pathlib
import sys
import types

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mrl_jax import config as config_lib
from mrl_jax import records
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.parallel import processes
from mrl_jax.tasks import dataset, verify
from mrl_jax.train import rounds, stage
from tests import test_collate


def primitives(folder: pathlib.Path) -> None:
  agreement()
  shares()
  large()
  arrays()
  levels(folder)
  filtering(folder)


def agreement() -> None:
  me, called = processes.index(), []
  assert processes.agreed(lambda: called.append(me) or {"i": me}) == {"i": 0}
  assert called == [0] * processes.leads()
  assert processes.gathered(lambda: me) == [*range(processes.count())]
  assert processes.some(me == 2) and not processes.some(me > 9)
  for error in (KeyError("lost"), config_lib.ConfigError("mesh", 1, "2")):
    for who in (0, 2):
      told = raised(lambda who=who, error=error: fails(who, error))
      assert str(error) in told, told
  assert "0's" in raised(lambda: processes.agreed(lambda: fail(me == 0)))


def fails(who: int, error: Exception) -> None:
  def find():
    if processes.index() == who:
      raise error

  processes.gathered(find)


def fail(leader: bool) -> None:
  raise OSError("0's disk" if leader else "nobody looks here")


def raised(call) -> str:
  try:
    call()
  except Exception as error:
    return str(error)
  raise AssertionError("nothing was raised")


def shares() -> None:
  seen = []

  def work(items):
    seen.extend(items)
    return [10 * item for item in items]

  items = list(range(10))  # five groups of two: one process has two of them
  assert processes.divided(items, work, 2) == [10 * item for item in items]
  assert len(seen) in (2, 4) and seen[0] % 2 == 0
  every = processes.gathered(lambda: list(seen))
  assert [item for part in every for item in part] == items
  assert processes.divided([], work) == []


def large() -> None:
  """In several pieces, the last of them short."""
  rng, processes._MOST = np.random.default_rng(0), 1 << 12
  data = rng.bytes(3 * processes._MOST + 5)
  assert processes.agreed(lambda: data) == data
  mine = data[: 1 + 700 * processes.index()]
  assert processes.gathered(lambda: mine)[3] == data[:2101]


def arrays() -> None:
  mesh = mesh_lib.make(1, 2, 2)
  tree = {
    "a": np.arange(8.0, dtype=np.float32).reshape(4, 2),
    "b": np.arange(4),
  }
  split = NamedSharding(mesh, PartitionSpec(("fsdp", "tensor")))
  placed = processes.place(tree, split)
  assert not placed["a"].is_fully_addressable
  assert placed["a"].addressable_shards[0].data.shape == (1, 2)
  placed["c"] = jax.jit(lambda x: x.sum())(placed["b"])
  found = processes.fetch({**placed, "d": 3})
  assert np.array_equal(found["a"], tree["a"]), found
  assert np.array_equal(found["b"], tree["b"]), found
  assert (found["c"], found["d"]) == (6, 3)
  assert all(isinstance(found[name], np.ndarray) for name in "abc")


def levels(folder: pathlib.Path) -> None:
  """A disk that lost a file, one of another run, one that was cut off."""
  me = processes.index()
  folder = folder / str(me)
  folder.mkdir(parents=True)
  large = b"several pieces" * 1000
  whole = {"part-0": b"zero", "part-1": b"one", "scores": large}
  mine = [
    whole,
    {"part-0": b"zero"},
    {**whole, "part-2": b"of another run"},
    {**whole, "part-1": b"on"},
  ][me]
  for name, data in mine.items():
    (folder / name).write_bytes(data)
  processes.level(folder)
  found = {path.name: path.read_bytes() for path in folder.iterdir()}
  assert found == whole, found


def filtering(folder: pathlib.Path) -> None:
  """One group is dropped on host 0 and three on host 1: steps stay alike."""
  samples, groups = 2, 16  # four groups are each process's to judge
  teaches_nothing = [1, 3, 0, 0][processes.index()]
  judged = []

  class Pool:
    def score(self, items):
      judged.extend(items)
      wrong = samples * teaches_nothing
      return [
        verify.WRONG if i < wrong or i % samples else verify.CORRECT
        for i in range(len(items))
      ]

  problems = [dataset.Problem(f"t/{i}", "1+1=", "2") for i in range(groups)]
  rows = [
    test_collate.rollout([1, 2, 3])._replace(prompt_id=f"t/{i // samples}")
    for i in range(groups * samples)
  ]
  rows = rounds.judge(Pool(), rows, problems, samples)
  assert len(judged) == 4 * samples
  round_ = records.Round("p", 0, tuple(rows))
  plan = stage.plan(
    round_,
    stage.Schedule(1, groups, 4),
    samples,
    seed=0,
    shuffle=True,
    drop=True,
    multiple=1,
  )
  assert plan.dropped == 4 and len(plan.updates) == 4
  policy = types.SimpleNamespace(
    samples=samples, recipe=types.SimpleNamespace(earned=False)
  )
  made = stage.Stage(policy, round_, plan, folder)
  shapes = [
    [leaf.shape for leaf in jax.tree.leaves(made._rows(number))]
    for number in range(len(plan.updates))
  ]
  assert shapes == shapes[:1] * 4
  every = processes.gathered(lambda: (plan, shapes))
  assert every == [(plan, shapes)] * processes.count()


def one_fails(folder: pathlib.Path) -> None:
  """Process 1 fails while the others wait for it in a step of all."""
  del folder
  processes.barrier("all are there")
  if processes.index() == 1:
    raise RuntimeError("process 1 fell over")
  processes.agreed(lambda: 0)


def all_fail(folder: pathlib.Path) -> None:
  del folder
  sys.exit(2)


def main(name, port, count, index, folder) -> None:
  processes._SHUTDOWN = 3
  processes.start(f"127.0.0.1:{port}", int(count), int(index))
  globals()[name](pathlib.Path(folder))


def check(completion: str, problem: dataset.Problem) -> bool:
  """A verifier that finds some groups all wrong, other ones on each host.

  It is asked group after group, of which a round has four for each process.
  """
  asked = _asked.setdefault(problem.id, len(_asked))
  _counts[problem.id] = _counts.get(problem.id, 0) + 1
  if asked % 4 < int(os.environ["ALL_WRONG"]):
    return False
  return _counts[problem.id] % 2 == 1


_asked: dict[str, int] = {}
_counts: dict[str, int] = {}

if __name__ == "__main__":
  processes.together(lambda: main(*sys.argv[1:]))
