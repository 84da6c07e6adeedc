"""What runs inside one of a pool's processes: `grade`, item after item.

It ends when the pipe to its parent closes. While an item runs, the kernel
holds an alarm against the case that the parent is gone too: an interpreter
that loops in C code cannot notice that by itself.
"""

import multiprocessing.connection
import pickle
import resource
import signal
import sys
import traceback

from mrl_jax.tasks import verify

_SLACK_SECONDS = 2.0  # the parent's own deadline comes first


def main(descriptor: int) -> None:
  """Serves the pool at the other end of the socket `descriptor`."""
  pipe = multiprocessing.connection.Connection(descriptor)
  try:
    deadline, memory, check = pipe.recv()
    if memory is not None:
      resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    check = pickle.loads(check)
  except EOFError:
    return
  except BaseException:
    pipe.send(traceback.format_exc())
    return
  pipe.send(None)
  while True:
    try:
      completion, problem = pipe.recv()
    except EOFError:
      return
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, deadline + _SLACK_SECONDS)
    verdict = verify.grade(check, completion, problem)
    signal.setitimer(signal.ITIMER_REAL, 0)
    pipe.send(verdict)


if __name__ == "__main__":
  main(int(sys.argv[1]))
