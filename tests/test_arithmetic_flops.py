"""A model's arithmetic, against a count of pairs one by one."""

import dataclasses

import pytest

from mrl_jax.model import arithmetic, catalog

SPEC = catalog.get("qwen3-0.6b")


def pairs(prompt, samples, completion, window):
  """Counts every query and key."""
  total = 0
  for length, start, copies in (
    (prompt, 0, 1),
    (prompt + completion, prompt, samples),
  ):
    for query in range(start, length):
      for key in range(query + 1):
        total += copies * (not window or query - key < window)
  return total


@pytest.mark.parametrize("window", [0, 1, 3, 8, 40])
@pytest.mark.parametrize("prompt", [1, 5, 12])
def test_attention_counts_the_pairs(window, prompt):
  spec = dataclasses.replace(
    SPEC, windows=(window,) * SPEC.layers if window else ()
  )
  rows = arithmetic.Rows(2, prompt, 3, 7)
  wanted = 2 * pairs(prompt, 3, 7, window)
  each = 4 * spec.layers * spec.heads * spec.head_dim
  assert arithmetic.attention(spec, rows) == each * wanted


def test_a_forward_pass_is_two_flops_per_parameter_and_token():
  rows = arithmetic.Rows(4, 16, 8, 16)
  without = arithmetic.forward(SPEC, rows) - arithmetic.attention(SPEC, rows)
  matrices = SPEC.layers * arithmetic.layer_parameters(SPEC)
  assert matrices == 440401920  # the 0.44 B that are not the embedding
  logits = 2 * SPEC.vocab * SPEC.width * 4 * 8 * 16
  assert without == 2 * matrices * (4 * 16 + 4 * 8 * 16) + logits
  assert arithmetic.training(SPEC, rows) == 3 * arithmetic.forward(SPEC, rows)


@pytest.mark.parametrize("window", [0, 4])
def test_decoding_all_tokens_after_prefill_is_one_forward_pass(window):
  spec = dataclasses.replace(SPEC, windows=(window,) * SPEC.layers)
  steps = sum(arithmetic.decode(spec, 6, 9 + t) for t in range(5))
  whole = arithmetic.forward(spec, arithmetic.Rows(2, 9, 3, 5))
  assert arithmetic.prefill(spec, 2, 9) + steps == whole
