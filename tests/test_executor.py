"""Policies take turns or run at once; one that fails ends the run by name."""

import threading
import traceback

import pytest

from mrl_jax.train import executor


def test_inline_runs_each_phase_for_all_before_the_next():
  seen = []
  phases = [
    lambda name: seen.append(("act", name)),
    lambda name: seen.append(("study", name)),
  ]
  executor.inline(["a", "b"], phases)
  assert seen == [("act", "a"), ("act", "b"), ("study", "a"), ("study", "b")]


def test_partition_runs_policies_at_once():
  """Each waits for the other, which turns alone could never satisfy."""
  both = threading.Barrier(2, timeout=10)
  seen = []

  def meet(name):
    both.wait()
    seen.append(name)

  executor.Partition()(["a", "b"], [meet, meet])
  assert sorted(seen) == ["a", "a", "b", "b"]


def fails(name):
  if name == "bad":
    raise ZeroDivisionError("by what?")


@pytest.mark.parametrize("make", [lambda: executor.inline, executor.Partition])
def test_a_failure_names_the_policy_and_keeps_the_trace(make):
  with pytest.raises(executor.PolicyError, match="policy bad failed") as info:
    make()(["good", "bad"], [fails])
  assert "ZeroDivisionError: by what?" in str(info.value)
  trace = "".join(traceback.format_exception(info.value))
  assert "in fails" in trace


def test_a_failure_wakes_those_that_wait():
  partition = executor.Partition()
  later = []

  def phase(name):
    if name == "bad":
      raise ValueError("no")
    while not partition.cancelled():
      threading.Event().wait(0.01)

  with pytest.raises(executor.PolicyError, match="bad"):
    partition(["good", "bad"], [phase, later.append])
  assert later == []
