"""Train and test of a generated task, by what a prompt says.

A prompt belongs to a split by its own hash, whatever seed and index made it,
so no prompt of the test split is ever trained on.
"""

import hashlib

SPLITS = ("train", "test")
_TEST_SHARE = 8  # one prompt in eight is held out


def check(split: str, size: int | None, seed: int) -> None:
  """Refuses what no generated task can be made with.

  Raises:
    ValueError: names the argument, its value and what is allowed.
  """
  if split not in SPLITS:
    raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
  if size is not None and size < 1:
    raise ValueError(f"size must be 1 or more, or None, got {size}")
  if seed < 0:
    raise ValueError(f"seed must be 0 or more, got {seed}")


def named(task: str, split: str) -> str:
  """The task's name with its split, as in the ids of problems."""
  return task + ("" if split == "train" else "-test")


def holds(split: str, prompt: str) -> bool:
  """Whether the prompt is of the split; a property of the text alone."""
  return is_test(prompt) == (split == "test")


def is_test(prompt: str) -> bool:
  """Whether a prompt is held out."""
  return hashlib.sha256(prompt.encode()).digest()[0] % _TEST_SHARE == 0
