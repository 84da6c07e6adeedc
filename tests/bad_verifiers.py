"""Verifiers that misbehave on demand; the pool's processes import these."""

import os
import signal
import subprocess
import sys
import time

import numpy as np

from mrl_jax.tasks import verify


def obey(completion, problem):
  """Does what the completion says; a plain one is compared to the answer."""
  match completion:
    case "loop":
      while True:
        pass
    case "loop in C":
      return 0 < 3 ** (10**9)
    case "ignore SIGTERM":
      signal.signal(signal.SIGTERM, signal.SIG_IGN)
      while True:
        time.sleep(1)
    case "child":
      return subprocess.call([sys.executable, "-c", "while True: pass"])
    case "exit":
      os._exit(3)
    case "sys.exit":
      sys.exit(0)
    case "segfault":
      os.kill(os.getpid(), signal.SIGSEGV)
    case "memory":
      return len(bytearray(8 << 30)) > 0
    case "raise":
      raise ValueError("as told")
    case "none":
      return None
    case "nan":
      return float("nan")
    case "half":
      return np.float32(0.5)
    case "unparsed":
      return verify.UNPARSED
    case "nonsense verdict":
      return verify.Verdict("hello", "nope")
    case "infinite verdict":
      return verify.Verdict(float("inf"), verify.Outcome.correct)
    case "nan verdict":
      return verify.Verdict(float("nan"), verify.Outcome.wrong)
    case "rewarded error":
      return verify.Verdict(1.0, verify.Outcome.error)
    case "own verdict":
      return verify.Verdict(np.float32(0.25), "correct")
    case "print":
      print("x" * 100_000)
      return True
    case "pid":
      return float(os.getpid())
    case "jax":
      return "jax" in sys.modules or "grain" in sys.modules
    case "platform":
      return os.environ["JAX_PLATFORMS"] == "cpu"
  return completion == problem.answer


not_a_function = 3
