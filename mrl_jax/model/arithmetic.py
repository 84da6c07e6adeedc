"""A decoder's own arithmetic: the FLOPs that no implementation can save.

Matrix products alone, two operations per multiplication and addition; a
causal query meets the keys before it and itself. In training the backward
pass costs twice the forward pass (Kaplan et al. 2020,
https://arxiv.org/abs/2001.08361, section 2.1): 6 N per token and attention.
Prompts are counted once for the completions that share them.
"""

from typing import NamedTuple

from mrl_jax.model import spec as spec_lib

BACKWARD = 2  # of the forward pass


class Rows(NamedTuple):
  """What a pass runs over."""

  prompts: int
  prompt: int  # tokens of each
  samples: int  # completions of each prompt
  completion: int  # tokens of each

  @property
  def completions(self) -> int:
    """Completion tokens in all."""
    return self.prompts * self.samples * self.completion

  @property
  def tokens(self) -> int:
    """All tokens, prompts once."""
    return self.prompts * self.prompt + self.completions


def layer_parameters(spec: spec_lib.Spec) -> int:
  """Parameters of a layer's matrices."""
  heads = (2 * spec.heads + 2 * spec.kv_heads) * spec.head_dim
  return spec.width * (heads + 3 * spec.mlp)


def forward(spec: spec_lib.Spec, rows: Rows) -> int:
  """States and logits of all completion tokens."""
  layers = 2 * spec.layers * layer_parameters(spec) * rows.tokens
  return layers + attention(spec, rows) + logits(spec, rows.completions)


def logits(spec: spec_lib.Spec, tokens: int) -> int:
  """The output projection of so many tokens."""
  return 2 * spec.vocab * spec.width * tokens


def attention(spec: spec_lib.Spec, rows: Rows) -> int:
  """Scores and their weighted sums: two products for each pair seen."""
  windows = spec.windows or (0,) * spec.layers
  total = sum(_pairs(rows, window) for window in windows)
  return 4 * spec.heads * spec.head_dim * total


def _pairs(rows: Rows, window: int) -> int:
  """Pairs of a query and a key that it sees, in one layer."""
  inside = _causal(0, rows.prompt, window)
  after = _causal(rows.prompt, rows.completion, window)
  return rows.prompts * (inside + rows.samples * after)


def _causal(before: int, count: int, window: int) -> int:
  """Keys seen by `count` queries, the first of which has `before` behind."""
  if not window or before + count <= window:
    return count * before + count * (count + 1) // 2
  growing = max(0, window - before)
  return (
    growing * before + growing * (growing + 1) // 2 + (count - growing) * window
  )


def training(spec: spec_lib.Spec, rows: Rows) -> int:
  """Loss and gradient, nothing computed twice."""
  return (1 + BACKWARD) * forward(spec, rows)


def prefill(spec: spec_lib.Spec, prompts: int, prompt: int) -> int:
  """Keys and values of the prompts and the states of their last tokens."""
  rows = Rows(prompts, prompt, 0, 0)
  layers = 2 * spec.layers * layer_parameters(spec) * rows.tokens
  return layers + attention(spec, rows)


def decode(spec: spec_lib.Spec, rows: int, behind: int) -> int:
  """One more token of so many rows, `behind` tokens after their start."""
  windows = spec.windows or (0,) * spec.layers
  seen = sum(min(behind + 1, w or behind + 1) for w in windows)
  products = 2 * spec.layers * layer_parameters(spec)
  attended = 4 * spec.heads * spec.head_dim * seen
  return rows * (products + attended) + logits(spec, rows)
