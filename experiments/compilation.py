"""Compiled programs are kept between runs.

JAX can keep what XLA compiled on disk. A program depends on the processor
that it was compiled for, so each kind of processor has a folder of its own:
a home directory may be shared between machines.
"""

import hashlib
import os
import pathlib
import platform

import jax


def keep(where: str) -> str | None:
  """Turns the cache on; returns its folder, or None where it is off.

  Args:
    where: a folder or URL; none; or auto, which is $JAX_COMPILATION_CACHE_DIR
      if that is set, else a folder in the user's cache.
  """
  if where == "none":
    jax.config.update("jax_enable_compilation_cache", False)
    return None
  if where == "auto":
    where = jax.config.jax_compilation_cache_dir or str(_folder())
  jax.config.update("jax_compilation_cache_dir", where)
  return where


def _folder() -> pathlib.Path:
  base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(base) / "mrl_jax" / _processor()


def _processor() -> str:
  """Names the kind of processor: its architecture and what it can do."""
  about = platform.machine() + platform.processor()
  info = pathlib.Path("/proc/cpuinfo")
  if info.exists():
    kinds = ("flags", "Features", "model name")
    lines = [x for x in info.read_text().splitlines() if x.startswith(kinds)]
    about += "".join(sorted({*lines}))
  digest = hashlib.sha256(about.encode()).hexdigest()
  return f"{platform.machine()}-{digest[:12]}"
