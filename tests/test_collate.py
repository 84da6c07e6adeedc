"""Rollouts to batches: masks keep EOS, padding is inert, groups are told."""

import jax
import numpy as np
import pytest

from mrl_jax import collate, records
from mrl_jax.types import Source


def rollout(tokens, prompt="p", context=(4,), reward=1.0):
  tokens = np.asarray(tokens, np.int32)
  return records.Rollout(
    prompt_id=prompt,
    sample=0,
    prompt="",
    context=tuple(context),
    tokens=tokens,
    logprobs=np.full(len(tokens), -1.0, np.float32),
    entropies=np.zeros(len(tokens), np.float32),
    finished=True,
    text="",
    answer="",
    reward=reward,
    outcome="",
  )


def test_eos_stays_in_the_loss_where_it_is_also_the_padding():
  """[5, 7, 2, 2, 2] of true length 3, with pad = eos = 2."""
  batch = collate.batch([rollout([5, 7, 2]), rollout([5, 7, 2, 2, 2])])
  assert batch.weights[0, :5].tolist() == [1, 1, 1, 0, 0]
  assert batch.weights[1, :5].tolist() == [1, 1, 1, 1, 1]
  assert not batch.weights[:, 5:].any()


def test_prompts_stand_to_the_left_and_completions_to_the_right():
  batch = collate.batch([rollout([1, 2], context=(7, 8, 9)), rollout([3])])
  width = batch.context.shape[1]
  assert batch.context[0].tolist() == [0] * (width - 3) + [7, 8, 9]
  assert batch.context_lengths.tolist() == [3, 1]
  assert batch.tokens[0, :3].tolist() == [1, 2, 0]


def test_rows_of_one_prompt_share_a_group_and_nothing_else_is_set():
  names = ["a", "a", "b", "c", "c"]
  batch = collate.batch([rollout([1], prompt=n) for n in names])
  assert batch.group.tolist() == [0, 0, 1, 2, 2]
  assert set(batch.source) == {int(Source.OWN)}
  assert np.isnan(batch.advantages).all()
  assert np.isnan(batch.clip_low).all()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100, 129])
def test_every_leaf_leads_with_the_rows(length):
  batch = collate.batch([rollout([1] * length)] * 3)
  for leaf in jax.tree.leaves(batch):
    assert len(leaf) == 3
