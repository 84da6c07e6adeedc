"""Eight emulated CPU devices, rank promotion refused, shapes checked.

Nearly all of the suite's time is compilation. So programs are compiled
without optimisation, and a program that was compiled once is kept for all
tests and processes of the checkout. Where MRL_TEST_GPU is set, as by
experiments.bench_gpu, JAX takes what it finds and compiles as it would in a
run.
"""

import os
import pathlib

_FLAGS = ["--xla_force_host_platform_device_count=8"]
if not os.environ.get("MRL_TEST_GPU"):
  os.environ["JAX_PLATFORMS"] = "cpu"
  _FLAGS.append("--xla_backend_optimization_level=0")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS])

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_rank_promotion", "raise")
_CACHE = pathlib.Path(__file__).parent.parent / ".pytest_cache" / "jax"
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
install_import_hook("mrl_jax", "beartype.beartype")
