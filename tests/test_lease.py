"""Leases under real threads; every wait has a deadline of its own."""

import random
import signal
import threading
import time

import pytest

from mrl_jax.parallel import lease

DEADLINE = 20.0  # seconds; far above what any test needs


def start(function, *arguments):
  thread = threading.Thread(target=function, args=arguments, daemon=True)
  thread.start()
  return thread


def join(threads):
  end = time.monotonic() + DEADLINE
  for thread in threads:
    thread.join(max(end - time.monotonic(), 0.0))
  assert not any(thread.is_alive() for thread in threads), "deadlock"


def until(condition):
  end = time.monotonic() + DEADLINE
  while not condition():
    assert time.monotonic() < end, "timeout"
    time.sleep(0.001)


def test_disjoint_leases_are_held_at_the_same_time():
  devices = lease.Devices(range(4))
  both = threading.Barrier(2, timeout=DEADLINE)
  met = []

  def work(ids):
    with devices.lease(ids):
      both.wait()  # passes only when both are inside
      met.append(ids)

  join([start(work, [0, 1]), start(work, [2, 3])])
  assert len(met) == 2


def test_overlapping_leases_exclude_each_other():
  devices = lease.Devices(range(3))
  order = []
  entered, go = threading.Event(), threading.Event()

  def first():
    with devices.lease([0, 1]):
      entered.set()
      assert go.wait(DEADLINE)
      order.append("first")

  def second():
    with devices.lease([1, 2]) as waited:
      order.append("second")
      assert waited > 0

  threads = [start(first)]
  assert entered.wait(DEADLINE)
  threads.append(start(second))
  until(lambda: devices.waiting() == 1)
  go.set()
  join(threads)
  assert order == ["first", "second"]


@pytest.mark.parametrize("seed", range(3))
def test_random_sets_neither_clash_nor_deadlock(seed):
  devices = lease.Devices(range(6))
  owners = [None] * 6
  rounds = [0] * 8

  def work(number):
    rng = random.Random(1000 * seed + number)
    for _ in range(150):
      ids = rng.sample(range(6), rng.randint(1, 6))  # in any order
      with devices.lease(ids):
        assert all(owners[i] is None for i in ids)
        for i in ids:
          owners[i] = number
        if rng.random() < 0.2:
          time.sleep(0)
        assert all(owners[i] == number for i in ids)
        for i in ids:
          owners[i] = None
      rounds[number] += 1

  join([start(work, number) for number in range(8)])
  assert rounds == [150] * 8


def test_a_wide_request_is_not_overtaken():
  """Narrow policies ask again and again, and still queue behind a wide one."""
  devices = lease.Devices(range(4))
  stop = threading.Event()
  log = []

  def narrow(i):
    while not stop.is_set():
      with devices.lease([i]):
        log.append(i)

  def wide():
    with devices.lease(range(4)):
      log.append("wide")
      stop.set()

  with devices.lease([3]):
    threads = [start(narrow, i) for i in range(3)]
    until(lambda: len(log) > 100)
    threads.append(start(wide))
    # Their devices are free: only the request before theirs holds them up.
    until(lambda: devices.waiting() == 4)
    before = len(log)
  join(threads)
  assert log[before] == "wide"


def test_requests_are_served_in_the_order_in_which_they_came():
  devices = lease.Devices(range(2))
  entered, go = threading.Event(), threading.Event()
  order = []

  def holder():
    with devices.lease([0]):
      entered.set()
      assert go.wait(DEADLINE)

  def work(name, ids):
    with devices.lease(ids):
      order.append(name)

  threads = [start(holder)]
  assert entered.wait(DEADLINE)
  requests = [("wide", [0, 1]), ("second", [1]), ("third", [0, 1])]
  for count, request in enumerate(requests, 1):
    threads.append(start(work, *request))
    until(lambda count=count: devices.waiting() == count)
  assert order == []  # device 1 is free, but "wide" came before "second"
  go.set()
  join(threads)
  assert order == ["wide", "second", "third"]


def test_closing_wakes_all_who_wait_and_names_the_error():
  devices = lease.Devices(range(2))
  entered, go = threading.Event(), threading.Event()
  told, finished = [], []

  def holder():
    with devices.lease([0, 1]):
      entered.set()
      assert go.wait(DEADLINE)
    finished.append(True)

  def waiter(ids):
    try:
      with devices.lease(ids):
        pytest.fail("a closed lease was given")
    except lease.Stopped as error:
      told.append(error)

  threads = [start(holder)]
  assert entered.wait(DEADLINE)
  waiters = [start(waiter, ids) for ids in ([0], [1], [0, 1])]
  until(lambda: devices.waiting() == 3)
  cause = ValueError("policy char failed")
  devices.close(cause)
  devices.close(KeyError("later"))
  join(waiters)  # while the holder is still inside
  assert [error.__cause__ for error in told] == [cause] * 3
  assert "policy char failed" in str(told[0])
  go.set()
  join(threads)
  assert finished  # a lease that is held ends in peace
  with pytest.raises(lease.Stopped), devices.lease([0]):
    pass


def test_an_interrupted_wait_leaves_the_queue():
  """Ctrl-C in a waiting thread must not block those behind it."""
  devices = lease.Devices(range(2))
  entered, go, served = (threading.Event() for _ in range(3))

  def holder():
    with devices.lease([0]):
      entered.set()
      assert go.wait(DEADLINE)

  def behind():
    until(lambda: devices.waiting() == 1)
    with devices.lease([1]):
      served.set()

  def interrupt(*_):
    raise InterruptedError

  threads = [start(holder)]
  assert entered.wait(DEADLINE)
  threads.append(start(behind))
  before = signal.signal(signal.SIGALRM, interrupt)
  signal.setitimer(signal.ITIMER_REAL, 0.3)
  try:
    with pytest.raises(InterruptedError), devices.lease([0, 1]):
      pytest.fail("the lease was given")
  finally:
    signal.signal(signal.SIGALRM, before)
  assert served.wait(DEADLINE / 4)  # device 1 was free all along
  go.set()
  join(threads)


def test_an_error_inside_gives_the_devices_back():
  devices = lease.Devices([7])
  with pytest.raises(KeyError), devices.lease([7]):
    raise KeyError("inside")
  with devices.lease([7]):
    pass
  assert devices.waiting() == 0


def test_a_second_lease_in_one_thread_is_refused():
  devices = lease.Devices(range(2))
  with (
    devices.lease([0]),
    pytest.raises(RuntimeError, match=r"\[1\].*still holds \[0\]"),
    devices.lease([1]),
  ):
    pass
  with devices.lease([1]):
    pass


@pytest.mark.parametrize("ids", [[], [0, 0], [0, 5]])
def test_wrong_ids_are_named(ids):
  devices = lease.Devices(range(2))
  with (
    pytest.raises(ValueError, match=r"must be one or more.*\[0, 1\]"),
    devices.lease(ids),
  ):
    pass
  with pytest.raises(ValueError, match="at least one"):
    lease.Devices([])
