"""What goes wrong in a verifier costs its row only, and leaves nothing."""

import collections
import functools
import importlib.util
import math
import os
import signal
import subprocess
import sys
import threading
import time

import bad_verifiers
import pytest

from mrl_jax.tasks import mathematics, verifiers, verify
from mrl_jax.tasks.dataset import Problem, Verifier

SECOND = Problem("p", "?", "42")


@pytest.fixture(scope="module")
def pool():
  """Two processes with a deadline that a loop meets soon."""
  verifier = verifiers.resolve("bad_verifiers:obey")
  with verify.Pool(verifier, workers=2, deadline_seconds=0.6) as pool:
    yield pool


@pytest.fixture(scope="module")
def math_pool():
  with verify.Pool(mathematics.verifier, 1, deadline_seconds=30.0) as pool:
    yield pool


def outcomes(pool, completions):
  verdicts = pool.score([(text, SECOND) for text in completions])
  return [verdict.outcome.value for verdict in verdicts]


def test_results_keep_the_order_of_the_items(pool):
  completions = ["42" if i % 3 == 0 else "7" for i in range(60)]
  want = ["correct" if i % 3 == 0 else "wrong" for i in range(60)]
  assert outcomes(pool, completions) == want
  assert outcomes(pool, []) == []


@pytest.mark.parametrize(
  "bad", ["loop", "loop in C", "ignore SIGTERM", "child"]
)
def test_a_loop_is_killed_and_costs_its_own_row(pool, bad):
  start = time.monotonic()
  got = outcomes(pool, ["42", bad, "7", "42", "42"])
  assert got == ["correct", "timeout", "wrong", "correct", "correct"]
  assert time.monotonic() - start < 10
  assert outcomes(pool, ["42", "7"]) == ["correct", "wrong"]


@pytest.mark.parametrize(
  "bad",
  ["exit", "sys.exit", "segfault", "memory", "raise", "none", "nan",
   "nonsense verdict", "infinite verdict", "nan verdict", "rewarded error"],
)  # fmt: skip
def test_what_goes_wrong_costs_its_own_row(pool, bad):
  got = outcomes(pool, ["42", bad, "7", "42"])
  assert got == ["correct", "error", "wrong", "correct"]
  verdict = pool.score([(bad, SECOND)])[0]
  assert math.isnan(verdict.reward)


def test_rewards_pass_through(pool):
  texts = ["half", "unparsed", "print", "own verdict"]
  half, unparsed, shout, own = pool.score([(text, SECOND) for text in texts])
  assert own == verify.Verdict(0.25, verify.Outcome.correct)
  assert half == verify.Verdict(0.5, verify.Outcome.wrong)
  assert unparsed == verify.UNPARSED
  assert shout == verify.CORRECT  # output does not disturb the pipe


def test_processes_are_kept_clean_and_few(pool):
  pids = {v.reward for v in pool.score([("pid", SECOND)] * 20)}
  again = {v.reward for v in pool.score([("pid", SECOND)] * 20)}
  assert len(pids | again) <= 2
  assert os.getpid() not in pids
  assert outcomes(pool, ["jax", "platform"]) == ["wrong", "correct"]


def test_the_tasks_import_no_jax():
  code = (
    "import sys; from mrl_jax.tasks import dataset, arithmetic, files, gym,"
    " verify, verifiers, mathematics; from mrl_jax import measure;"
    " sys.exit('jax' in sys.modules)"
  )
  assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_any_thread_gets_the_right_verdicts(pool, math_pool):
  """Two right answers, a wrong one and a loop, from four threads at once."""
  results = collections.defaultdict(list)

  def work(name):
    results[name] += outcomes(pool, ["42", "7", "loop", "42"])
    results[name] += outcomes(math_pool, ["\\boxed{84/2}", "7"])

  threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  want = ["correct", "wrong", "timeout", "correct", "correct", "wrong"]
  assert dict(results) == dict.fromkeys(range(4), want)


def test_a_loop_leaves_no_zombie_and_close_no_orphan():
  pool = verify.Pool(Verifier(bad_verifiers.obey), 2, deadline_seconds=0.3)
  pids = [int(v.reward) for v in pool.score([("pid", SECOND)] * 8)]
  assert outcomes(pool, ["loop", "child"]) == ["timeout", "timeout"]
  for pid in set(pids):
    assert not os.path.exists(f"/proc/{pid}")
  pids = {int(v.reward) for v in pool.score([("pid", SECOND)] * 8)}
  pool.close()
  pool.close()
  assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
  with pytest.raises(RuntimeError, match="closed"):
    pool.score([("42", SECOND)])


def test_an_idle_process_that_dies_costs_nothing():
  with verify.Pool(Verifier(bad_verifiers.obey), 1, 5.0) as pool:
    pid = int(pool.score([("pid", SECOND)])[0].reward)
    os.kill(pid, 9)
    time.sleep(0.1)
    assert outcomes(pool, ["42", "7"]) == ["correct", "wrong"]


@pytest.mark.parametrize("at_work", [False, True])
def test_processes_end_with_their_parent(at_work):
  """Kill -9 of the parent, with the process idle or deep in a loop."""
  code = (
    "import bad_verifiers, sys; from mrl_jax.tasks import verify, dataset\n"
    "pool = verify.Pool(dataset.Verifier(bad_verifiers.obey), 1, 0.7)\n"
    "p = dataset.Problem('p', '?', '42')\n"
    "print(int(pool.score([('pid', p)])[0].reward), flush=True)\n"
    f"{at_work} and pool.score([('loop in C', p)]); sys.stdin.read()\n"
  )
  environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
  parent = subprocess.Popen(
    [sys.executable, "-c", code],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    env=environment,
  )
  pid = int(parent.stdout.readline())
  time.sleep(0.2)
  parent.kill()
  parent.communicate()
  deadline = time.monotonic() + 10
  while _alive(pid) and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not _alive(pid)


def _alive(pid):
  try:
    with open(f"/proc/{pid}/stat") as stat:
      return stat.read().rpartition(")")[2].split()[0] != "Z"
  except FileNotFoundError:
    return False


def test_an_interrupt_leaves_nothing_behind():
  """Ctrl-C while a verifier loops; the pool still works afterwards."""
  with verify.Pool(
    Verifier(bad_verifiers.obey), 1, deadline_seconds=30
  ) as pool:
    pid = int(pool.score([("pid", SECOND)])[0].reward)
    done = threading.Event()

    def interrupt():  # again, where a callback has swallowed the first
      while not done.wait(1):
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
      pool.score([("loop", SECOND)])
    done.set()
    assert not os.path.exists(f"/proc/{pid}")
    assert outcomes(pool, ["42", "7"]) == ["correct", "wrong"]


def test_quick_verifiers_need_no_process():
  check = lambda completion, problem: completion == problem.answer  # noqa: E731
  pool = verify.Pool(Verifier(check, quick=True))
  assert outcomes(pool, ["42", "7"]) == ["correct", "wrong"]
  broken = verify.Pool(Verifier(functools.partial(int, base=99), quick=True))
  assert outcomes(broken, ["42"]) == ["error"]


def test_what_cannot_be_sent_or_loaded_is_one_error(tmp_path):
  with pytest.raises(ValueError, match="module-level"):
    verify.Pool(Verifier(lambda completion, problem: True))
  source = tmp_path / "vanishing.py"
  source.write_text("def check(completion, problem):\n  return True\n")
  spec = importlib.util.spec_from_file_location("vanishing", source)
  module = importlib.util.module_from_spec(spec)
  sys.modules["vanishing"] = module
  spec.loader.exec_module(module)
  with (
    verify.Pool(Verifier(module.check), 1) as pool,
    pytest.raises(RuntimeError, match=r"could not be loaded[\s\S]*vanishing"),
  ):
    pool.score([("42", SECOND)])
  for arguments in [{"workers": 0}, {"deadline_seconds": 0.0}]:
    with pytest.raises(ValueError, match=next(iter(arguments))):
      verify.Pool(verifiers.exact, **arguments)


@pytest.mark.parametrize(
  ("spec", "message"),
  [
    ("exakt", r"exact.*numeric.*math.*'exakt'"),
    ("no_such_module:f", "no_such_module"),
    ("bad_verifiers:obay", r"no function 'obay'.*obey"),
    ("bad_verifiers:not_a_function", "no function"),
    (":f", "module:function"),
    (".x:f", "module:function"),
    ("..:f", "module:function"),
    ("a..b:f", "module:function"),
    ("a b:f", "module:function"),
    ("bad_verifiers:", "module:function"),
  ],
)
def test_unknown_verifiers_are_refused(spec, message):
  with pytest.raises(ValueError, match=message):
    verifiers.resolve(spec)


def test_built_in_verifiers_by_name():
  assert verifiers.resolve("exact") is verifiers.exact
  assert verifiers.resolve("numeric") is verifiers.numeric
  assert verifiers.resolve("math") is mathematics.verifier
  assert not mathematics.verifier.quick
