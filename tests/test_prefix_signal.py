"""What is said of prefixes follows from their continuations."""

import json
import sys

import numpy as np
import pytest

from experiments.studies import prefix_signal
from experiments.studies import prefix_statistics as statistics
from mrl_jax import records
from mrl_jax.explore import prefixes
from mrl_jax.model import encoder
from mrl_jax.sampling import engine
from mrl_jax.tasks import countdown, dataset, verify
from mrl_jax.text import tokenizer as tokenizer_lib
from mrl_jax.train import policy as policy_lib
from mrl_jax.types import Distribution
from tests import runs

RULE = prefixes.Rule(boundary="tokens", gap=1, cuts=15, cap=0.75)
PROBLEM = dataset.Problem("c/1", "3,5,2=13;", "3+5*2")


@pytest.fixture(scope="module")
def tokenizer():
  return tokenizer_lib.load(*runs.learned("char"))


def row(tokenizer, text, right=False, entropy=0.5, problem=PROBLEM):
  tokens = np.asarray([*tokenizer.encode(text), tokenizer.eos_ids[0]], np.int32)
  entropies = np.broadcast_to(np.float32(entropy), tokens.shape)
  return records.Rollout(
    prompt_id=problem.id,
    sample=0,
    prompt=problem.prompt,
    context=tuple(tokenizer.encode(problem.prompt)),
    tokens=tokens,
    logprobs=np.zeros(len(tokens), np.float32),
    entropies=entropies,
    finished=True,
    text=text,
    answer=problem.answer,
    reward=float(right),
    outcome="correct" if right else "wrong",
  )


def found(tokenizer, rows, problems=(PROBLEM,)):
  samples = len(rows) // len(problems)
  return prefix_signal.find(rows, problems, samples, RULE, tokenizer.decode)


def test_the_surest_answer_of_a_hard_problem_is_cut(tokenizer):
  easy = PROBLEM._replace(id="c/0")
  short = PROBLEM._replace(id="c/2")
  rows = [
    *(row(tokenizer, "3+5*2", right, problem=easy) for right in (1, 1, 0)),
    row(tokenizer, "3*5-2", entropy=0.5),
    row(tokenizer, "3+5+2", entropy=0.1),
    row(tokenizer, "3*5-2", entropy=0.4),
    *(row(tokenizer, "9", problem=short) for _ in range(3)),
  ]
  hard, counts = found(tokenizer, rows, [easy, PROBLEM, short])
  assert counts == {"problems": 3, "hard": 2, "no_cut": 1}
  (one,) = hard
  assert one.problem == PROBLEM
  assert tokenizer.decode(one.draft.tokens[:5]) == "3+5+2"
  assert one.draft.places == [1, 2, 3, 4]
  assert [tokenizer.decode(d.tokens[:5]) for d in one.others] == ["3*5-2"] * 2


def test_entropies_are_smoothed_over_what_is_alike(tokenizer):
  ramp = np.arange(6) / 10
  rows = [
    row(tokenizer, "3+5+2", entropy=ramp),
    row(tokenizer, "3*5-2", entropy=0.7),
  ]
  hard, _ = found(tokenizer, rows)

  def known(embed):
    embedder = encoder.Embedder(embed, 20, False)
    (values,) = prefix_signal.measure_entropies(hard, rows, embedder, RULE)
    return values

  own = [0.0, 0.05, 0.1, 0.15]
  same = known(lambda responses: np.ones((len(responses), 20), np.float32))
  assert same["place"].tolist() == [1, 2, 3, 4]
  np.testing.assert_allclose(same["entropy"], own, atol=1e-6)
  np.testing.assert_allclose(same["smoothed"], np.mean(own), atol=1e-6)
  both = np.mean([*own, *(4 * [0.7])])
  np.testing.assert_allclose(same["remembered"], both, atol=1e-6)
  apart = known(
    lambda responses: np.eye(20, dtype=np.float32)[: len(responses)]
  )
  np.testing.assert_allclose(apart["smoothed"], own, atol=1e-3)
  np.testing.assert_allclose(apart["remembered"], own, atol=1e-3)


def test_a_direction_is_one_from_the_mean_where_the_embedder_says_so(tokenizer):
  rows = [row(tokenizer, "3+5+2", entropy=np.arange(6) / 10)] * 2
  hard, _ = found(tokenizer, rows)

  def embed(responses):  # far from zero, so all directions are alike
    lengths = [len(response.tokens) for response in responses]
    angles = np.asarray(lengths) * 1.0
    return 1000 + np.stack([np.cos(angles), np.sin(angles)], 1)

  for centre, alike in ((False, True), (True, False)):
    embedder = encoder.Embedder(embed, 2, centre)
    (values,) = prefix_signal.measure_entropies(hard, rows, embedder, RULE)
    assert (np.ptp(values["smoothed"]) < 1e-4) == alike


def test_each_prefix_is_continued_and_graded_with_it(tokenizer):
  """A policy that writes `+5*2` after `3`, and nothing anywhere else."""
  start = tokenizer.encode(PROBLEM.prompt)
  seen = []

  def generate(params, contexts, words):
    seen.extend(tuple(word) for word in words.tolist())
    rows = len(contexts) * samples
    tokens = np.zeros((rows, 8), np.int32)
    lengths = np.ones(rows, np.int32)
    for at, context in enumerate(contexts):
      prefix = tokenizer.decode(list(context[len(start) :]))
      ids = tokenizer.encode({"3": "+5*2"}.get(prefix, ""))
      ids = [*ids, tokenizer.eos_ids[0]]
      for one in range(at * samples, (at + 1) * samples):
        tokens[one, : len(ids)] = ids
        lengths[one] = len(ids)
    zeros = np.zeros(tokens.shape, np.float32)
    return engine.Samples(tokens, lengths, zeros, zeros, np.ones(rows, bool))

  samples = 2
  model = policy_lib.Actor(
    *("p", "", None, tokenizer, np.ones(1, bool), Distribution(), generate)
  )
  rows = [row(tokenizer, "3+5+2"), row(tokenizer, "3+5+2")]
  hard, _ = found(tokenizer, rows)
  with verify.Pool(verify.Verifier(countdown.check, quick=True)) as pool:
    (rates,) = prefix_signal.continued(hard, model, {}, pool, samples, 3)
  assert rates.tolist() == [[0] * 3, [1] * 3, [0] * 3, [0] * 3, [0] * 3]
  assert len(set(seen)) == len(seen) == 5 * samples * 3  # each with its seed


def prompt(rates, **values):
  count = len(rates)
  base = {key: list(range(count)) for key in statistics.PREDICTORS}
  return {"problem": "", "start": [0.5, 0.3], "rates": rates, **base, **values}


def test_rules_choose_by_what_they_are_named_after():
  rates = [[r, r] for r in (0.1, 0.9, 0.4, 0.6)]
  one = prompt(
    rates,
    entropy=[3, 2, 1, 4],
    smoothed=[3, 1, 2, 4],
    remembered=[1, 2, 3, 4],
  )
  expected = {
    "lowest": 0.9,
    "lowest_remembered": 0.1,
    "lowest_raw": 0.4,
    "highest": 0.6,
    "random": 0.5,
    "first": 0.1,
    "last": 0.6,
    "best": 0.9,
    "restart": 0.4,
  }
  assert set(expected) == set(statistics.RULES)
  for rule, rate in expected.items():
    assert statistics.chosen(one, rule) == pytest.approx(rate), rule


def test_luck_is_not_the_best_prefixs_merit():
  lucky = prompt([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
  assert statistics.chosen(lucky, "best") == 0.0


def test_correlations_are_of_ranks_within_prompts_and_over_all():
  fall = prompt([[r, r] for r in (0.9, 0.5, 0.1)])
  rise = prompt([[r, r] for r in (0.0, 0.01, 1.0)])
  flat = prompt([[0.5, 0.5]] * 3)
  short = prompt([[0.1, 0.1], [0.2, 0.2]])
  many = [fall, rise, flat, short]
  assert statistics.within(many, "entropy") == pytest.approx([-1, 1])
  value, low, high = statistics.overall([fall] * 5, "entropy", draws=20)
  assert value == low == high == pytest.approx(-1)
  value, low, high = statistics.overall([fall, rise], "entropy", draws=50)
  assert (low, high) == pytest.approx((-1, 1))
  assert -0.5 < value < 0.5


def test_what_is_said_beyond_the_place_is_told_apart():
  generator = np.random.default_rng(0)

  def make(own):
    place = generator.normal(size=40)
    entropy = place + generator.normal(size=40)
    rate = -place + generator.normal(size=40) - own * (entropy - place)
    rates = np.stack([rate, rate], 1).tolist()
    return prompt(rates, place=place.tolist(), entropy=entropy.tolist())

  for own, beyond in ((0, False), (1, True)):
    prompts = [make(own) for _ in range(20)]
    assert statistics.overall(prompts, "entropy", draws=100)[2] < -0.2
    _, low, high = statistics.overall(prompts, "entropy", "place", draws=100)
    assert (high < -0.2) == beyond
    assert (low < 0 < high) == (not beyond)


def test_the_table_has_every_predictor_and_rule():
  text = statistics.table([prompt([[r, r] for r in (0.9, 0.5, 0.1)])] * 4)
  for words in (*statistics.PREDICTORS.values(), *statistics.RULES.values()):
    assert f"| {words} |" in text
  assert "| random | 0.500 [0.500, 0.500] |  | 0.100" in text
  assert "no hard prompt" in statistics.table([])


def test_the_command_measures_a_policy(tmp_path):
  out = tmp_path / "signal.json"
  done = runs.run(
    [
      *(sys.executable, "-m", "experiments.studies.prefix_signal"),
      *(f"--policies={runs.learned('char')[0]}", f"--out={out}"),
      *("--problems=12", "--n=4", "--completion_limit=10"),
      '--task_args={"min_operations": 3, "max_operations": 7}',
      *("--regenerate_boundary=tokens", "--regenerate_gap=1"),
    ]
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert "smoothed, own prefixes" in done.stdout
  result = json.loads(out.read_text())["policies"]["char"]
  assert 0 < result["cut"] <= result["hard"] < result["problems"] == 12
  assert len(result["prompts"]) == result["cut"]
  for one in result["prompts"]:
    rates = np.asarray(one["rates"])
    assert rates.shape == (len(one["place"]), 2)
    assert not (rates * 4 % 1).any()
    assert len(one["entropy"]) == len(one["smoothed"]) == len(rates)
    assert np.ptp(one["smoothed"]) <= np.ptp(one["entropy"])
