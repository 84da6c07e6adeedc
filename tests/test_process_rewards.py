"""What steps earn: from a verifier's words to tokens, and on to credit."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl_jax import collate, compose, losses
from mrl_jax import config as config_lib
from mrl_jax.exchange import store
from mrl_jax.parallel import mesh as mesh_lib
from mrl_jax.parallel import sharding
from mrl_jax.tasks import arithmetic, dataset, verify
from mrl_jax.train import policy as policy_lib
from mrl_jax.train import report, rounds, spill, steps
from mrl_jax.transforms import advantages, clipping, weights
from mrl_jax.types import Source
from tests import factories, oracle, runs, test_collate

NAN = float("nan")
BOTH = pytest.mark.parametrize("against", ["return", "to_go"])
CHAIN = dataset.Problem("id", "3+4*2-1=", "743")
RIGHT, WRONG = verify.Outcome.correct, verify.Outcome.wrong
PIECES = (b"a", b" bc", b"\xe2\x82", b"\xac", b"\xff", None, b"", "é€".encode())


@functools.cache
def tokenizer(spaced=False):
  """Eight tokens, some of which are parts of a character, and EOS."""
  return dataclasses.replace(
    factories.member().tokenizer,
    token_bytes=(*PIECES, None),
    vocab_size=len(PIECES) + 1,
    holes=frozenset({6}),
    eos_ids=(8,),
    spaced=spaced,
  )


# From a text to rewards of its steps.


@pytest.mark.parametrize(
  ("text", "outcome", "reward", "ends"),
  [
    ("743", RIGHT, 1.0, (1, 2)),
    (" \n743 ", RIGHT, 1.0, (3, 4)),
    ("7430", WRONG, 2 / 3, (1, 2)),  # the last value is not the text's end
    ("743 x", WRONG, 2 / 3, (1, 2)),
    ("74", WRONG, 2 / 3, (1, 2)),
    ("793", WRONG, 1 / 3, (1,)),  # what is right by luck earns nothing
    ("7 43", WRONG, 1 / 3, (1,)),
    ("043", WRONG, 0.0, ()),
    ("", WRONG, 0.0, ()),
    ("  ", WRONG, 0.0, ()),
  ],
)
def test_a_chain_earns_by_value_up_to_the_first_wrong_one(
  text, outcome, reward, ends
):
  found = verify.grade(arithmetic.check_steps, text, CHAIN)
  assert found.outcome == outcome
  assert found.reward == pytest.approx(reward)
  assert found.steps == tuple((end, 1 / 3) for end in ends)


@given(st.text("743 0", max_size=6), st.integers(0, 6), st.text("743 0"))
def test_a_step_is_judged_by_what_is_written_until_then(text, cut, other):
  found = arithmetic.check_steps(text, CHAIN)
  assert (found.outcome == RIGHT) == arithmetic.check(text, CHAIN)
  cut = min(cut, len(text))
  changed = arithmetic.check_steps(text[:cut] + other, CHAIN)
  kept = [s for s in found.steps if s[0] <= cut]
  assert [s for s in changed.steps if s[0] <= cut] == kept


def test_one_value_is_an_outcome_and_the_task_is_asked_for_steps():
  one = dataset.Problem("id", "3+4=", "7")
  assert arithmetic.check_steps("7", one) == verify.CORRECT
  assert arithmetic.check_steps("70", one) == verify.WRONG
  plain, asked = arithmetic.make(), arithmetic.make(process=True)
  assert asked.problem(3) == plain.problem(3)
  assert plain.verify.check is arithmetic.check
  assert asked.verify.check is arithmetic.check_steps


@pytest.mark.parametrize(
  "steps_",
  [
    ((0, 0.5),),
    ((2, 0.5), (2, 0.5)),
    ((3, 0.5), (2, 0.5)),
    ((1, NAN),),
    ((1, math.inf),),
    ((1.5, 0.5),),
    ((6, 0.5),),  # the text has five characters
    ((1, 0.5, 2),),
    (1, 2),
  ],
)
def test_steps_that_cannot_be_are_errors(steps_):
  def check(completion, problem):
    return verify.Verdict(1.0, RIGHT, steps_)

  assert verify.grade(check, "abcde", CHAIN) == verify.ERROR


def test_steps_come_out_plain_and_an_unscored_verdict_has_none():
  raw = (np.int64(1), np.float32(0.5)), (5, 1)
  found = verify.grade(lambda *_: verify.Verdict(2, RIGHT, raw), "abcde", CHAIN)
  assert found == verify.Verdict(2.0, RIGHT, ((1, 0.5), (5, 1.0)))
  assert type(found.steps[0][0]) is int
  late = verify.TIMEOUT._replace(steps=((1, 0.5),))
  assert verify.grade(lambda *_: late, "abcde", CHAIN) == verify.ERROR


# From characters to tokens.


@settings(deadline=None)
@given(st.lists(st.integers(-1, 12), max_size=12), st.booleans())
def test_characters_are_those_of_the_decoded_text(ids, spaced):
  tokenizer_ = tokenizer(spaced)
  found = steps.characters(tokenizer_, ids)
  wanted = [len(tokenizer_.decode(ids[: n + 1])) for n in range(len(ids))]
  assert found.tolist() == wanted


def judged(tokens, verdict, prefix=0, tokenizer_=None):
  tokens_ = np.asarray(tokens[prefix:], np.int32)
  row = test_collate.rollout(tokens_, context=(0, *tokens[:prefix]))
  return steps.earned(
    tokenizer_ or tokenizer(), row._replace(prefix=prefix), verdict
  )


def test_a_step_is_earned_by_the_token_that_completes_its_last_character():
  # a |  bc | (half of) € | € | EOS
  tokens = [0, 1, 2, 3, 8]
  verdict = verify.Verdict(1.0, RIGHT, ((1, 0.25), (3, 0.5), (5, 0.125)))
  found = judged(tokens, verdict)
  assert found.dtype == np.float32
  assert found.tolist() == [0.25, 0.5, 0, 0.125, 0.125]
  assert judged(tokens, verdict, 2).tolist() == [0, 0.125, 0.125]
  assert judged(tokens, verdict, 4).tolist() == [0.125]
  assert judged(tokens, verdict._replace(steps=())) is None


def test_steps_in_one_token_add_up_and_a_wrong_end_may_cost():
  verdict = verify.Verdict(-1.0, WRONG, ((1, 0.5), (2, 0.25), (3, 1.0)))
  found = judged([7, 0], verdict)
  assert found.tolist() == [0.75, 1.0 - 2.75]


def test_verdicts_reach_the_shelf_the_batch_and_the_log(tmp_path):
  member = factories.member()
  rows, texts = [], ["743", "793", "043"]
  for text in texts:
    ids = [*member.tokenizer.encode(text), member.tokenizer.eos_ids[0]]
    rows.append(test_collate.rollout(ids)._replace(text=text))
  actor = policy_lib.Actor("p", "", None, member.tokenizer, *[None] * 3)
  check = dataset.Verifier(arithmetic.check_steps, quick=True)
  with verify.Pool(check) as pool:
    found = rounds.judge(pool, rows, [CHAIN], 3, actor)
    silent = rounds.judge(pool, rows, [CHAIN], 3)
  assert [row.earned for row in silent] == [None] * 3
  third = np.float32(1 / 3)
  assert found[0].earned.tolist() == pytest.approx([third, third, 0, third])
  assert found[1].earned.tolist() == pytest.approx([third, 0, 0, 0], abs=1e-9)
  assert found[2].earned is None
  shelf = spill.Shelf(tmp_path)
  shelf.put(0, found)
  back = list(shelf.rows())
  assert back[2].earned is None
  for row, other in zip(found[:2], back, strict=False):
    assert other.earned.dtype == np.float32
    assert other.earned.tobytes() == row.earned.tobytes()
  batch = collate.batch(back, earned=True)
  np.testing.assert_array_equal(batch.credit[0, :4], found[0].earned)
  assert not batch.credit[2].any() and not batch.credit[:, 4:].any()
  assert not collate.batch(back).credit.any()  # nobody has asked
  logged = list(report.rollouts(rounds.records.Round("p", 0, back)))
  assert logged[0]["earned"] == found[0].earned.tolist()
  assert "earned" not in logged[2]


# From what tokens earned to credit.


def draw(seed=0, rows=16, steps_=6, samples=4, **fields):
  """Groups of 4; one row unscored; each row's tokens earn its reward."""
  rng = np.random.default_rng(seed)
  batch = factories.batch(rows, steps_, samples, seed=seed)
  earned = rng.normal(size=(rows, steps_)) * (np.asarray(batch.weights) != 0)
  rewards = earned.sum(1)
  rewards[rng.integers(rows)] = np.nan
  fields = {"credit": earned, "rewards": rewards, **fields}
  return batch._replace(
    **{name: jnp.asarray(x, jnp.float32) for name, x in fields.items()}
  )


@functools.cache
def prepared(**options):
  """Both transforms, one after the other, compiled once."""
  against = options.pop("against", "return")
  return jax.jit(
    compose.chain(
      advantages.group_advantages(**options),
      advantages.return_to_go(against=against, **options),
    )
  )


def worth(batch):
  return np.where(batch.weights != 0, losses.token_advantages(batch), 0.0)


@BOTH
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("ddof", [0, 1])
def test_a_token_is_worth_the_return_to_go(against, normalize, ddof):
  options = {"normalize": normalize, "ddof": ddof, "against": against}
  for seed in range(5):
    batch = draw(seed)
    found = prepared(**options)(batch)
    wanted = oracle.return_to_go(
      np.asarray(batch.rewards),
      batch.credit,
      (batch.weights != 0).sum(1).tolist(),
      batch.group.tolist(),
      **options,
    )
    np.testing.assert_allclose(worth(found), wanted, atol=2e-5)
    assert np.isfinite(found.credit).all()
    unscored = np.isnan(batch.rewards)
    assert unscored.any() and not found.credit[unscored].any()
    assert not found.credit[batch.weights == 0].any()


@BOTH
def test_what_is_earned_at_the_end_alone_is_grpo_to_the_bit(against):
  batch = draw(3)
  last = (np.asarray(batch.weights) != 0).sum(1) - 1
  earned = np.zeros(batch.credit.shape)
  earned[np.arange(16), last] = np.nan_to_num(batch.rewards)
  batch = batch._replace(credit=jnp.asarray(earned, jnp.float32))
  tail = (clipping.clip_range(0.2, 0.2), weights.token_mean())
  silent = batch._replace(credit=jnp.zeros_like(batch.credit))
  said = factories.scores(batch)

  def learn(prepare, rows):
    def f(logprobs):
      rows_ = compose.chain(*prepare, *tail)(rows)
      scores = said._replace(logprobs=logprobs)
      return losses.objective(losses.policy_gradient())(scores, rows_)

    return jax.jit(jax.value_and_grad(f))(said.logprobs)

  plain = learn((advantages.group_advantages(),), silent)
  both = advantages.group_advantages(), advantages.return_to_go(against=against)
  jax.tree.map(np.testing.assert_array_equal, learn(both, batch), plain)
  assert np.abs(plain[1]).sum() > 0
  jax.tree.map(np.testing.assert_array_equal, learn(both, silent), plain)


@BOTH
def test_a_group_of_equal_returns_and_foreign_rows_get_no_credit(against):
  batch = draw(1)
  equal = jnp.where(batch.group == 2, 0.7, batch.rewards)
  source = jnp.where(jnp.arange(16) == 1, int(Source.RESCUE), batch.source)
  found = prepared(against=against)(
    batch._replace(rewards=equal, source=source)
  )
  assert not found.credit[batch.group == 2].any()
  assert not found.credit[1].any()
  assert found.credit[0].any()
  nobody = batch._replace(rewards=jnp.full((16,), jnp.nan))
  assert not prepared(against=against)(nobody).credit.any()


@BOTH
def test_order_padding_and_devices_change_nothing(against):
  batch, prepare = draw(2), prepared(against=against)
  wanted = worth(prepare(batch))
  order = np.random.default_rng(0).permutation(16)
  moved = jax.tree.map(lambda x: x[order], batch)
  np.testing.assert_allclose(worth(prepare(moved)), wanted[order], atol=1e-5)
  wide = batch._replace(
    **{
      name: jnp.pad(getattr(batch, name), ((0, 0), (0, 3)))
      for name in ("tokens", "weights", "behavior_logprobs", "credit")
    }
  )
  found = worth(prepare(wide))
  np.testing.assert_allclose(found[:, :6], wanted, atol=1e-5)
  assert not found[:, 6:].any()
  place = sharding.batch(mesh_lib.make(8, 1, 1))
  spread = worth(prepare(jax.device_put(batch, place)))
  np.testing.assert_allclose(spread, wanted, atol=1e-5)


@BOTH
def test_microbatches_add_up(against):
  rows = compose.chain(clipping.clip_range(0.2, 0.2), weights.token_mean())(
    prepared(against=against)(draw(4))
  )
  objective = losses.objective(losses.policy_gradient())
  said = factories.scores(rows)
  whole = objective(said, rows)
  assert abs(whole) > 1e-3
  total = 0.0
  for part in (slice(0, 3), slice(3, 16)):  # whatever the groups
    total += objective(*jax.tree.map(lambda x, p=part: x[p], (said, rows)))
  np.testing.assert_allclose(total, whole, rtol=1e-5)


def enumerated(chance, samples=2, length=3):
  """Every group of `samples` answers of three values, and how likely it is.

  A value is right with the given chance and earns 1/3 while all before it
  are right; an answer ends with its first wrong value.
  """
  answers = [(1,) * n + (0,) for n in range(length)] + [(1,) * length]
  groups = list(itertools.product(answers, repeat=samples))
  flat = [answer for group in groups for answer in group]
  lengths = np.asarray([len(answer) for answer in flat])
  mask = np.arange(length) < lengths[:, None]
  right = np.zeros((len(flat), length))
  for row, answer in zip(right, flat, strict=True):
    row[: len(answer)] = answer
  likely = np.where(right > 0, chance, 1 - chance)
  likely = np.where(mask, likely, 1.0).prod(1).reshape(-1, samples).prod(1)
  batch = factories.rows(
    mask,
    credit=right / length,
    rewards=right.sum(1) / length,
    group=np.arange(len(flat)) // samples,
  )
  scores = np.where(mask, right - chance, 0.0)  # d log p / d logit
  return batch, likely, scores


def moments_of(values, likely, scores, samples=2):
  """Mean and variance of the gradient, over all groups, value by value."""
  found = (np.asarray(values, np.float64) * scores).reshape(
    len(likely), samples, -1
  )
  found = found.mean(1)
  mean = (likely[:, None] * found).sum(0)
  return mean, (likely[:, None] * (found - mean) ** 2).sum(0)


@BOTH
def test_the_expected_gradient_is_grpos(against):
  """Where one scale, 1, serves all groups: none counts as degenerate."""
  batch, likely, scores = enumerated(0.7)
  assert likely.sum() == pytest.approx(1)
  options = {"normalize": False, "degenerate_range": -1.0}
  plain = advantages.group_advantages(**options)(batch)
  found = prepared(against=against, **options)(batch)
  silent = plain._replace(credit=jnp.zeros_like(plain.credit))
  wanted, _ = moments_of(losses.token_advantages(silent), likely, scores)
  got, _ = moments_of(losses.token_advantages(found), likely, scores)
  assert np.abs(wanted).min() > 0.01
  np.testing.assert_allclose(got, wanted, atol=1e-6)


def test_against_the_mean_to_go_there_is_less_noise():
  for chance in (0.5, 0.7, 0.9):
    batch, likely, scores = enumerated(chance)
    plain = advantages.group_advantages(normalize=False)(batch)
    plain = plain._replace(credit=jnp.zeros_like(plain.credit))
    found = prepared(normalize=False, against="to_go")(batch)
    noise = [
      moments_of(losses.token_advantages(b), likely, scores)[1].sum()
      for b in (found, plain)
    ]
    assert noise[0] < noise[1], chance


def test_what_cannot_be_is_refused():
  with pytest.raises(ValueError, match="against='mean'"):
    advantages.return_to_go(against="mean")
  with pytest.raises(ValueError, match="ddof=-1"):
    advantages.return_to_go(ddof=-1)


def test_the_flag_reaches_the_losses(tmp_path):
  """A run that learns from steps, and one whose steps are only summed."""
  policy = runs.policy(tmp_path / "tiny", "char")

  def train(name, **flags):
    config = config_lib.Config(
      workdir=str(tmp_path / name),
      policies=(policy,),
      task_args='{"min_operations": 2, "max_operations": 2, "process": true}',
      rounds=2,
      prompts=8,
      samples=(4,),
      completion_limit=6,
      lr=(0.01,),
      mesh=(1, 1, 1),
      shares=(1,),
      **flags,
    )
    found, states = runs.train(config, store.Memory())
    return found["tiny"], jax.tree.leaves(states["tiny"].params)

  whole, plain = train("none")
  steps, other = train("return", process="return")
  assert steps[0]["reward"] == whole[0]["reward"]
  assert steps[0]["grad_norm"] != whole[0]["grad_norm"]
  assert not all(map(np.array_equal, plain, other))
