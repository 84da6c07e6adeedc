"""Where an answer is cut: hard prompts, boundaries, smoothed entropies."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl_jax.explore import novelty, prefixes
from tests import oracle

RULE = prefixes.Rule(gap=2)
TOKENS = RULE._replace(boundary="tokens", gap=1)


def test_hard_is_a_pass_rate_of_one_in_g_or_less():
  correct = np.asarray(
    [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]],
    bool,
  )
  scored = np.ones((5, 4), bool)
  scored[3, 2:] = False  # 1 of 2 is more than 1 in 4
  scored[4] = False  # nothing is known
  found = prefixes.hard(correct, scored)
  assert found.tolist() == [True, True, False, False, False]


def test_lines_by_hand():
  pieces = ["a", "\n", "\n", "b", ".\n", "c", "d\n", "e", "f", "g", "h", ""]
  # Ends of lines: after 2, 3, 5, 7 tokens. 3 is too near to 2; the last of
  # 2, 5, 7 is dropped.
  assert prefixes.boundaries(pieces, True, RULE) == [2, 5]
  assert prefixes.boundaries(pieces, True, RULE._replace(gap=3)) == [3]
  assert prefixes.boundaries(pieces, True, RULE._replace(cuts=2)) == [2]
  assert prefixes.boundaries(pieces, True, RULE._replace(cap=0.4)) == [2]
  assert prefixes.boundaries(pieces, True, RULE, start=3) == [5]
  assert prefixes.boundaries(["a", "b", "c"], True, RULE) == []


def test_tokens_by_hand():
  pieces = [*"7432", ""]
  assert prefixes.boundaries(pieces, True, TOKENS) == [1, 2, 3]
  # Without EOS the fourth token may be cut after too, and the last is dropped;
  # 3 of 4 tokens are three quarters.
  assert prefixes.boundaries(pieces[:4], False, TOKENS) == [1, 2, 3]
  assert prefixes.boundaries(pieces, True, TOKENS._replace(cap=0.5)) == [1, 2]
  assert prefixes.boundaries(pieces, True, TOKENS, start=2) == [3]
  assert prefixes.boundaries(["7", ""], True, TOKENS) == []


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_boundaries_keep_their_promises(data):
  pieces = data.draw(st.lists(st.sampled_from(["a", "b\n", "\n"]), max_size=60))
  finished = data.draw(st.booleans())
  rule = prefixes.Rule(
    boundary=data.draw(st.sampled_from(prefixes.BOUNDARIES)),
    gap=data.draw(st.integers(1, 9)),
    cuts=data.draw(st.integers(2, 15)),
    cap=data.draw(st.floats(0.1, 0.9)),
  )
  start = data.draw(st.integers(0, len(pieces)))
  found = prefixes.boundaries(pieces, finished, rule, start)
  ends = [start, *found]
  assert all(b - a >= rule.gap for a, b in zip(ends, found, strict=False))
  assert len(found) < rule.cuts
  for place in found:
    assert place <= rule.cap * len(pieces)
    assert rule.boundary == "tokens" or "\n" in pieces[place - 1]
    assert place < len(pieces)


def test_prefix_entropies_are_running_means():
  found = prefixes.prefix_entropies(np.asarray([1.0, 3.0, 2.0, 9.0]), [1, 3])
  np.testing.assert_allclose(found, [1.0, 2.0])


def test_the_smoothed_choice_by_hand():
  near, far = np.asarray([1.0, 0.0]), np.asarray([0.0, 1.0])
  rows = np.stack([near, far])
  # Alone, each is its own neighbour, nearly: the least entropy wins.
  assert (
    prefixes.choose(rows, np.asarray([0.5, 0.4]), np.zeros((0, 3)), RULE) == 1
  )
  # Four earlier prefixes like the second one were written in doubt.
  earlier = np.tile([0.0, 1.0, 2.0], (4, 1))
  assert prefixes.choose(rows, np.asarray([0.5, 0.4]), earlier, RULE) == 0
  highest = RULE._replace(choice="highest")
  assert prefixes.choose(rows, np.asarray([0.5, 0.4]), earlier, highest) == 1
  weight = np.exp(-10.0)  # of what is at right angles, at temperature 0.1
  expected = (0.5 + 0.4 * weight + 4 * 2.0 * weight) / (1 + 5 * weight)
  found = prefixes.smooth(
    np.concatenate([earlier[:, :2], rows]),
    np.concatenate([earlier[:, 2], [0.5, 0.4]]),
    0.1,
  )
  np.testing.assert_allclose(found[-2], expected, rtol=1e-12)
  np.testing.assert_allclose(
    found[-1], (0.5 * weight + 0.4 + 8.0) / (5 + weight), rtol=1e-12
  )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_smoothing_is_the_oracle(seed):
  rng = np.random.default_rng(seed)
  count = int(rng.integers(1, 9))
  rows = novelty.unit(rng.normal(size=(count, 5)))
  values = rng.exponential(size=count)
  found = prefixes.smooth(rows, values, 0.1)
  np.testing.assert_allclose(found, oracle.smooth(rows, values, 0.1))
  assert (found >= values.min() - 1e-9).all()
  assert (found <= values.max() + 1e-9).all()
  np.testing.assert_allclose(prefixes.smooth(rows, values, 1e9), values.mean())


@pytest.mark.parametrize("choice", prefixes.CHOICES)
def test_which_choices_read_what_prefixes_mean(choice):
  embeds = prefixes.Rule(choice=choice).embeds
  assert embeds == (choice in ("lowest", "highest"))
