"""Times what it costs to read a peer's completions in other tokens.

  python -m experiments.bench --tokenizers=SOURCE,RECEIVER

On the host: `spell` by the producer, then `retokenize` and `align` by the
receiver, on completions of English, code and mathematics. On the device:
`realign.collect` and `chunk_sums` on a batch of such rows. CPU seconds are
the number to compare on a shared machine; the host part uses one core. The
text comes from Python's own documentation and sources, so nothing is
downloaded, and no completion is timed twice: a tokenizer remembers words.
"""

import inspect
import pathlib
import pydoc_data.topics
import statistics
import time
from typing import Any

import jax
import numpy as np

from mrl_jax.kernels import realign
from mrl_jax.text import align
from mrl_jax.text import tokenizer as tokenizer_lib
from mrl_jax.types import Trace


def measure(
  source: str, receiver: str, length: int = 1000, count: int = 100
) -> dict[str, Any]:
  """Both parts, for the tokenizers of two Hugging Face directories."""
  pair = tokenizer_lib.load(source), tokenizer_lib.load(receiver)
  return {
    "vocabularies": [tokenizer.vocab_size for tokenizer in pair],
    "host": host(*pair, length, count),
    "device": device(),
  }


def texts(count: int, seed: int = 0) -> list[str]:
  """Documents of English, code and worked mathematics, about 6 kB each."""
  rng = np.random.default_rng(seed)
  english = "\n".join(pydoc_data.topics.topics.values())
  code = "\n".join(map(inspect.getsource, (statistics, inspect, pathlib)))
  found = []
  for _ in range(count):
    parts = [_cut(rng, english, 2500), _cut(rng, code, 1500)]
    parts += [_worked(rng) for _ in range(12)]
    found.append("\n\n".join(parts[i] for i in rng.permutation(len(parts))))
  return found


def host(
  source: tokenizer_lib.Tokenizer,
  receiver: tokenizer_lib.Tokenizer,
  length: int = 1000,
  count: int = 100,
) -> dict[str, Any]:
  """CPU seconds per completion, and the source's tokens per CPU second.

  Args:
    source: the producer's tokenizer.
    receiver: another one.
    length: tokens of a completion, EOS included.
    count: completions that are timed, after a tenth as many others.
  """
  warm = max(1, count // 10)
  rows = []
  for text in texts(warm + count):
    ids = source.encode(text)
    if len(ids) < length - 1:
      raise ValueError(f"length={length}: a text has {len(ids)} tokens only")
    rows.append([*ids[: length - 1], source.eos_ids[0]])
  seconds = []
  own = chunks = split = 0
  for index, ids in enumerate(rows):
    clock = [time.process_time()]
    told = align.spell(source, ids, finished=True)
    clock.append(time.process_time())
    again = align.retokenize(receiver, told.text, finished=True)
    clock.append(time.process_time())
    alignment = align.align(told.ends, again.ends, finished=True)
    clock.append(time.process_time())
    if index < warm:
      continue
    seconds.append(np.diff(clock))
    residuals = align.residuals(alignment, len(ids))
    own += len(again.tokens)
    chunks += residuals.chunks
    split += residuals.split
  spent = np.asarray(seconds)  # [count, 3]
  # Means are what a run pays; medians are free of whoever else computes here.
  mean, median = spent.mean(0), np.median(spent, axis=0)
  names = ("spell", "retokenize", "align")
  return {
    "completions": count,
    "source_tokens": count * length,
    "receiver_tokens": own,
    "split_chunks": round(split / chunks, 4),
    "cpu_seconds": {
      name: {"mean": round(float(m), 6), "median": round(float(n), 6)}
      for name, m, n in zip(names, mean, median, strict=True)
    },
    "tokens_per_cpu_second": {  # of the receiver: retokenize and align
      "mean": round(length / mean[1:].sum()),
      "median": round(length / median[1:].sum()),
    },
  }


def device(rows: int = 64, steps: int = 1024, reps: int = 20) -> dict[str, Any]:
  """CPU seconds of one `collect` and one `chunk_sums`, jitted together."""
  rng = np.random.default_rng(0)

  def ends():
    inner = rng.choice(4 * steps - 1, steps - 1, replace=False) + 1
    return np.append(np.sort(inner), 4 * steps)

  made = [align.align(ends(), ends(), finished=False) for _ in range(rows)]
  columns = [np.stack(column) for column in zip(*made, strict=True)]
  logprobs = -rng.exponential(size=(rows, steps)).astype(np.float32)
  trace = jax.device_put(Trace(logprobs, *columns))

  @jax.jit
  def run(trace):
    found = realign.collect(trace)
    return found, realign.chunk_sums(found, trace)

  jax.block_until_ready(run(trace))
  walls, cpus = [], []
  for _ in range(reps):
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(run(trace))
    walls.append(time.perf_counter() - wall)
    cpus.append(time.process_time() - cpu)
  return {
    "rows": rows,
    "steps": steps,
    "wall_seconds": round(statistics.median(walls), 5),
    "cpu_seconds": round(statistics.median(cpus), 5),
  }


def _cut(rng: np.random.Generator, text: str, size: int) -> str:
  start = int(rng.integers(len(text) - size))
  return text[start : start + size]


def _worked(rng: np.random.Generator) -> str:
  """A few lines of the kind that a model writes when it reasons."""
  a, b, c = (int(x) for x in rng.integers(2, 999, 3))
  return (
    f"We need $x$ such that ${a}x + {b} = {c}$. Subtracting ${b}$ from both"
    f" sides gives ${a}x = {c - b}$, so $x = \\frac{{{c - b}}}{{{a}}}"
    f" \\approx {(c - b) / a:.3f}$.\nCheck: ${a} \\cdot {b} = {a * b}$."
  )
