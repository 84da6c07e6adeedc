"""What a policy remembers and tries again, by hand and through a run."""

import json

import jax
import numpy as np
import pytest

from mrl_jax import config as config_lib
from mrl_jax import records
from mrl_jax.exchange import publish
from mrl_jax.explore import explorer, novelty, prefixes, queue
from mrl_jax.model import encoder
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.tasks import arithmetic, dataset, verify
from mrl_jax.train import explorers, report
from mrl_jax.train import rounds as rounds_lib
from tests import factories, oracle

EOS = 1
TOKENS = prefixes.Rule(boundary="tokens", gap=1, warmup=0, slots=2)


def direction(text):
  """A stand-in for an embedder: letters by count."""
  return np.asarray([text.count(c) + 0.0 for c in "abcd"], np.float32)


def embed(responses):
  rows = [direction(response.text) for response in responses]
  return np.asarray(rows, np.float32).reshape(len(rows), 4)


def decode(ids):
  return "".join("abcd"[i - 10] for i in ids if i >= 10)


def make(**rules):
  embedder = encoder.Embedder(embed, 4, False)
  return explorer.Explorer("p", 2, 0, decode, embedder, **rules)


def row(prompt, text, right=False, entropy=(), context=(5, 6), **more):
  tokens = [*("abcd".index(c) + 10 for c in text), EOS]
  entropies = entropy or (0.5,) * len(tokens)
  return records.Rollout(
    prompt_id=prompt,
    sample=0,
    prompt="",
    context=tuple(context),
    tokens=np.asarray(tokens, np.int32),
    logprobs=np.zeros(len(tokens), np.float32),
    entropies=np.asarray(entropies, np.float32),
    finished=True,
    text=text,
    answer="",
    reward=float(right),
    outcome="correct" if right else "wrong",
    **more,
  )


def slots(*names):
  return [
    explorer.Slot(dataset.Problem(name, "", f"answer of {name}"), n, (5, 6))
    for n, name in enumerate(names)
  ]


def observe(made, state, own, slots_, number=0):
  return made.observe(state, records.Round("p", number, own), slots_)


def test_novelty_of_hand_made_answers():
  made = make(novelty=novelty.Rule())
  state = made.start()
  here = slots("x", "y")
  own = [row("x", "a", True), row("x", "b"), row("y", "c"), row("y", "c")]
  found, state = observe(made, state, own, here)
  assert np.asarray(found.novelty).tolist() == [0, 0, 0, 0]  # memories empty
  own = [
    row("x", "c", True),
    row("x", "ab"),
    row("y", "cd", True),
    row("y", "c"),
  ]
  found, state = observe(made, state, own, here)
  rows = novelty.unit(embed([encoder.Response((), (), r.text) for r in own]))
  earlier = novelty.unit(np.stack([direction(c) for c in "abcc"]))
  expected = [
    *oracle.novelty(rows[:2], [True] * 2, earlier[:2], 2),
    *oracle.novelty(rows[2:], [True] * 2, earlier[2:], 2),
  ]
  np.testing.assert_allclose(found.novelty, expected, atol=1e-6)
  root = 1 / np.sqrt(2)
  np.testing.assert_allclose(
    expected, [1.0, 1 - root, 1 - root, 0.0], atol=1e-6
  )
  assert found.values["explore/warm"] == 1
  np.testing.assert_allclose(
    found.values["explore/novelty"], (2 - root) / 2, rtol=1e-6
  )


def test_a_hard_prompts_surest_answer_is_cut_where_entropy_is_lowest():
  made = make(prefixes=TOKENS)
  own = [
    row("x", "abcd", entropy=(0.9, 0.9, 0.9, 0.9, 0.9)),
    row("x", "dcab", entropy=(0.5, 0.1, 0.9, 0.9, 0.0)),  # the surest
    row("y", "a", True),
    row("y", "b", True),
  ]
  found, state = observe(made, made.start(), own, slots("x", "y"), 3)
  assert found.values["explore/hard"] == 1
  (item,) = state.queue.items
  # h is .5, .3, .5 after 1, 2, 3 tokens; 4 would be the last and is dropped.
  assert decode(item.prefix) == "dc"
  np.testing.assert_allclose(item.entropies, [0.5, 0.1], rtol=1e-6)
  assert (item.root, item.position, item.context) == ("x", 0, (5, 6))
  assert item.problem == dataset.Problem("x~3", "", "answer of x")
  assert (item.depth, item.round, item.passed) == (1, 3, 0.0)
  kept = state.cuts.entries["x"]
  np.testing.assert_allclose(kept[:, -1], [0.5, 0.3, 0.5], rtol=1e-6)
  heads = novelty.unit(np.stack([direction(t) for t in ("d", "dc", "dca")]))
  np.testing.assert_allclose(kept[:, :-1], heads, rtol=1e-6)


@pytest.mark.parametrize(
  ("choice", "expected"), [("highest", "d"), ("restart", "")]
)
def test_controls_cut_elsewhere(choice, expected):
  made = make(prefixes=TOKENS._replace(choice=choice))
  own = [row("x", "ddab", entropy=(0.9, 0.1, 0.1, 0.1, 0.1))] * 2
  _, state = observe(made, made.start(), own, slots("x"))
  (item,) = state.queue.items
  assert decode(item.prefix) == expected
  assert item.whole == (5, 6, *item.prefix)


def test_a_random_cut_is_a_function_of_seed_policy_round_and_prompt():
  made = make(prefixes=TOKENS._replace(choice="random"))
  names = [f"p{n}" for n in range(40)]
  own = [r for name in names for r in [row(name, "abcdabcd")] * 2]

  def lengths(number):
    _, state = observe(made, made.start(), own, slots(*names), number)
    return [len(item.prefix) for item in state.queue.items]

  assert lengths(0) == lengths(0)
  assert lengths(0) != lengths(1)
  assert set(lengths(0)) == {1, 2, 3, 4, 5, 6}  # three quarters of nine


def test_a_still_hard_item_is_cut_deeper_until_it_is_too_deep():
  made = make(prefixes=TOKENS._replace(depth=2))
  state = made.start()
  _, state = observe(made, state, [row("x", "abcd")] * 2, slots("x"))
  filled, state = made.fill(state, 1, slots("y", "x"))
  item = filled[-1].item
  assert len(filled) == 2
  assert filled[0].problem.id == "y"
  assert filled[-1].context == item.whole
  assert not state.queue.items
  head = decode(item.prefix)
  own = [row("y", "a", True)] * 2 + [
    row(
      "x~0", "dcab", context=item.whole, root="x", prefix=len(item.prefix)
    )._replace(text=head + "dcab")
  ] * 2
  found, state = observe(made, state, own, filled, 1)
  (deeper,) = state.queue.items
  assert deeper.depth == 2
  assert deeper.prefix[: len(item.prefix)] == item.prefix
  assert len(deeper.prefix) > len(item.prefix)
  assert len(deeper.entropies) == len(deeper.prefix)
  assert deeper.root == "x"
  assert deeper.problem.answer == "answer of x"
  assert found.values["explore/regenerated"] == 1
  assert found.values["explore/parent_pass"] == 0
  filled, state = made.fill(state, 2, slots("y"))
  own = [
    row(
      deeper.problem.id,
      "dd",
      context=deeper.whole,
      root="x",
      prefix=len(deeper.prefix),
    )
  ] * 2
  found, state = observe(made, state, own, filled, 2)
  assert found.values["explore/too_deep"] == 1
  assert not state.queue.items


def test_nothing_is_tried_again_before_the_warm_up_and_slots_are_bounded():
  made = make(prefixes=TOKENS._replace(warmup=3))
  names = ("u", "v", "w", "x")
  own = [r for name in names for r in [row(name, "abcd")] * 2]
  _, state = observe(made, made.start(), own, slots(*names))
  same, kept = made.fill(state, 2, slots(*names))
  assert same == slots(*names)
  assert kept is state
  filled, after = made.fill(state, 3, slots(*names))
  assert [s.problem.id for s in filled] == ["u", "v", "u~0", "v~0"]
  assert [i.root for i in after.queue.items] == ["w", "x"]
  assert len(state.queue.items) == 4  # a state does not change


def test_a_full_queue_drops_its_oldest_and_counts():
  made = make(prefixes=TOKENS._replace(queue=3))
  names = ("u", "v", "w", "x")
  own = [r for name in names for r in [row(name, "abcd")] * 2]
  found, state = observe(made, made.start(), own, slots(*names))
  assert [i.root for i in state.queue.items] == ["v", "w", "x"]
  assert found.values["explore/queue_dropped"] == 1


def test_answers_that_cannot_be_cut_are_counted():
  made = make(prefixes=TOKENS)
  silent = row("y", "ab", entropy=(np.nan,) * 3)
  own = [row("x", "a"), row("x", "a"), silent, silent]
  found, state = observe(made, made.start(), own, slots("x", "y"))
  assert found.values["explore/no_cut"] == 1
  assert found.values["explore/no_entropy"] == 1
  assert not state.queue.items


def test_the_mean_of_the_first_round_is_taken_off_where_it_should_be():
  made = make(novelty=novelty.Rule())
  made = made._replace(embedder=encoder.Embedder(embed, 4, True))
  own = [row("x", "aab"), row("x", "ab")]
  _, state = observe(made, made.start(), own, slots("x"))
  np.testing.assert_allclose(state.mean, [1.5, 1.0, 0, 0])
  _, after = observe(made, state, [row("x", "c"), row("x", "d")], slots("x"))
  np.testing.assert_array_equal(after.mean, state.mean)
  kept = after.seen.entries["x"]
  expected = novelty.unit(
    np.stack([direction("c"), direction("d")]), state.mean
  )
  np.testing.assert_array_equal(kept, expected)


def test_what_peers_say_is_counted_over_the_tasks_prompts_alone():
  plain = row("x", "a", True)
  again = row("x~0", "b", root="x", prefix=1)
  round_ = records.Round(
    "p", 0, (plain, again), peers={"x": records.Tally(2.0, 1.0, 1.0)}
  )
  values = report.exchanged(round_, {}, ("values",), {"q": 2})
  assert values["values/shared"] == 1


def test_an_embedder_that_is_not_there_is_named(tmp_path):
  mesh = mesh_lib.make(1, 1, 1, devices=jax.devices()[:1])
  with pytest.raises(config_lib.ConfigError, match=r"--embedder=.*nowhere"):
    explorers.embedder(str(tmp_path / "nowhere"), None, None, mesh)


def test_a_state_comes_back_from_json_and_arrays():
  made = make(novelty=novelty.Rule(), prefixes=TOKENS)
  names = ("u", "v")
  own = [r for name in names for r in [row(name, "abcd"), row(name, "dcba")]]
  _, state = observe(made, made.start(), own, slots(*names))
  state = state._replace(mean=np.asarray([0.1, 0.2, 0.3, 0.4], np.float32))
  plain, arrays = explorer.pack(state)
  plain = json.loads(json.dumps(plain))
  problems = [slot.problem for slot in slots(*names)]
  again = explorer.unpack(made.start(), plain, arrays, problems.__getitem__)
  assert again.queue == state.queue
  np.testing.assert_array_equal(again.mean, state.mean)
  for part in ("seen", "cuts"):
    left, right = getattr(again, part), getattr(state, part)
    assert list(left.entries) == list(right.entries)
    for name in names:
      np.testing.assert_array_equal(left.entries[name], right.entries[name])
  with pytest.raises(ValueError, match="the task has changed"):
    explorer.unpack(made.start(), plain, arrays, problems[::-1].__getitem__)
  start = made.start()
  packed = explorer.pack(start)
  assert explorer.unpack(start, *packed, problems.__getitem__) == start


def test_a_continued_prefix_is_graded_against_its_own_answer():
  """Its slot displaced another prompt, whose answer differs."""
  task = arithmetic.make(3, 3)
  problems = [task.problem(n) for n in range(3)]
  assert len({p.answer for p in problems}) == 3
  here = [explorer.Slot(p, n, (5,)) for n, p in enumerate(problems)]
  item = queue.Item(
    problem=problems[0]._replace(id="again"),
    root=problems[0].id,
    position=0,
    context=(5,),
    prefix=(7,),
    entropies=(0.1,),
    depth=1,
    round=0,
    passed=0.0,
  )
  made = make(prefixes=TOKENS)
  state = made.start()._replace(queue=queue.Queue((item,)))
  filled, _ = made.fill(state, 0, here[1:])
  assert [s.problem.answer for s in filled] == [
    problems[1].answer,
    problems[0].answer,
  ]
  rows = [
    row(slot.problem.id, "")._replace(text=text)
    for slot in filled
    for text in (problems[0].answer, problems[2].answer)
  ]
  with verify.Pool(task.verify) as pool:
    chosen = [slot.problem for slot in filled]
    judged = rounds_lib.judge(pool, rows, chosen, 2)
  # Displaced was problem 2: its answer is wrong here, that of 0 is right.
  assert [r.reward for r in judged] == [0, 0, 1, 0]


def test_peers_are_told_nothing_of_what_was_earned_after_a_prefix():
  member = factories.member()
  ids = member.tokenizer.encode("74")
  plain = row("x", "", True)._replace(
    tokens=np.asarray([*ids, member.tokenizer.eos_ids[0]], np.int32),
    logprobs=np.zeros(3, np.float32),
  )
  again = plain._replace(prompt_id="x~0", root="x", prefix=1)
  kinds = frozenset(records.KINDS)
  for own, count in (((plain, again), 3), ((again,), 0)):
    told, withheld = publish.publish(
      records.Round("p", 0, own), member, 0, kinds
    )
    assert {r.header.prompt_id for r in told} <= {"x"}
    assert (len(told), len(withheld)) == (count, 0)
