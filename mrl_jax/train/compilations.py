"""How many programs this process has compiled, and which.

A run compiles in its first rounds and then should not: a round that still
does met a new shape, or a function that is built anew each time. JAX tells
of each program that it asks the compiler for; one that the cache on disk
holds counts as well, since it is traced and loaded again.
"""

import functools
from collections.abc import Sequence

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


def names() -> Sequence[str]:
  """The programs compiled since the first call, in order; it grows."""
  return _names()


@functools.cache
def _names() -> list[str]:
  found: list[str] = []

  def listen(event: str, _: float, **about: str | int) -> None:
    if event == _EVENT:
      found.append(str(about.get("fun_name", "")))

  jax.monitoring.register_event_duration_secs_listener(listen)
  return found
