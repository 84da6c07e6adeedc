"""Two tokenizers over one text: real ones in every pair, and laws."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers_real
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments import bench_alignment
from mrl_jax.kernels import realign
from mrl_jax.text import align
from mrl_jax.types import Trace

BYTE_LEVEL = ("smollm2", "cl100k", "deepseek", "qwen")
LOSSLESS = (*BYTE_LEVEL, "mistral-v1", "mistral-v3")
NAMES = (*LOSSLESS, "unigram", "minilm")
TEXTS = (
  "",
  "hello world",
  "the cat, 42",
  " the cats are singing  and  the ",
  "日本語のテキスト 42，中文字符和한국어",
  "emoji 🙂‍↔️ family 👨‍👩‍👧‍👦 flag 🇨🇭!",
  "caf\u00e9 na\u00efve \u1ec7 \u0939\u093f\u0928\u094d\u0926\u0940 עברית",
  "def f(x):\n\treturn {x: [x**2]}  # 12345 != 1_000\n\n\n",
  "So $\\frac{12}{34} + 3.14159 = 1\\,234\\,567$.\r\n\r\n  Thus \\boxed{42}",
  " " * 17 + "\t\t\n" + " " * 40 + "x",
  "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa0000000000000000000",
  "say <|im_end|> now </s><think>x</think> [SEP]",
)
HYPOTHESIS = {
  "deadline": None,
  "suppress_health_check": list(HealthCheck),
  "database": None,
}


@pytest.fixture(scope="module")
def real(request, tmp_path_factory):
  return tokenizers_real.shared(request.config, tmp_path_factory)


def ends_of(*pieces):
  sizes = [len(p if isinstance(p, bytes) else p.encode()) for p in pieces]
  return np.cumsum(sizes, dtype=np.int32)


def spellings(real, text, finished):
  """The text in each tokenizer that can spell it, checked byte for byte."""
  found = {}
  for name in NAMES:
    loaded = real.load(name)
    told = align.retokenize(loaded, text, finished)
    if not loaded.spaced:
      reason = loaded.round_trip(text)
      assert told == reason if isinstance(told, str) else reason is None
    if isinstance(told, str):
      continue
    body = told.tokens[:-1] if finished else told.tokens
    pieces = [loaded.token_bytes[i] for i in body]
    joined = b"".join(pieces)
    shift = int(loaded.spaced and joined.startswith(b" "))
    assert joined[shift:] == text.encode()
    ends = list(itertools.accumulate(map(len, pieces), initial=0))[1:]
    ends = [end - shift for end in ends]
    if finished:
      assert told.tokens[-1] == loaded.eos_ids[0]
      ends.append(len(text.encode()))
    assert told.ends.tolist() == ends
    assert not loaded.control_ids.intersection(body.tolist())
    assert told.tokens.dtype == told.ends.dtype == np.int32
    spelled = align.spell(loaded, told.tokens, finished)
    assert spelled.text == told.text == text
    np.testing.assert_array_equal(spelled.tokens, told.tokens)
    np.testing.assert_array_equal(spelled.ends, told.ends)
    found[name] = told
  return found


def check_chunks(source_ends, ends, finished):
  """Chunks partition both sides in order, share their span, are smallest."""
  found = align.chunks(source_ends, ends, finished)
  source_ends, ends = map(np.ndarray.tolist, (source_ends, ends))
  for side, count in enumerate((len(source_ends), len(ends))):
    assert [i for chunk in found for i in chunk[side]] == list(range(count))
  assert all(theirs and mine for theirs, mine in found)
  at = 0
  for theirs, mine in found:
    assert source_ends[theirs[-1]] == ends[mine[-1]] >= at
    inner = {source_ends[i] for i in theirs} & {ends[i] for i in mine}
    assert not {end for end in inner if at < end < ends[mine[-1]]}
    at = ends[mine[-1]]
  if finished:
    assert found[-1] == ([len(source_ends) - 1], [len(ends) - 1])
    found.pop()
  if at:  # tokens without bytes make no chunk of their own
    assert all(
      ends[mine[-1]] > (ends[mine[0] - 1] if mine[0] else 0)
      for _, mine in found
    )


def shares(alignment, source_count):
  """[U, T] f64: what each own token collects of each source token."""
  found = np.zeros((source_count, len(alignment.first)))
  for t, (i, a, j, b) in enumerate(zip(*alignment[:4], strict=True)):
    found[i, t] += a
    found[j, t] += b
    found[i + 1 : j, t] += 1
  return found


def check_alignment(source_ends, ends, finished):
  found = align.align(source_ends, ends, finished)
  for name, column in found._asdict().items():
    part = name.endswith(("part", "share"))
    assert column.dtype == (np.float32 if part else np.int32)
  matrix = shares(found, len(source_ends))
  # Nothing is lost, nothing is gained, nothing leaves its chunk.
  np.testing.assert_allclose(matrix.sum(1), 1, rtol=1e-6)
  assert (matrix >= 0).all() and (matrix <= 1 + 1e-6).all()
  chunks = align.chunks(source_ends, ends, finished)
  for theirs, mine in chunks:
    np.testing.assert_allclose(
      matrix[np.ix_(theirs, mine)].sum(), len(theirs), rtol=1e-6
    )
    assert found.chunk_start[mine].tolist() == [mine[0]] * len(mine)
    assert found.chunk_stop[mine].tolist() == [mine[-1] + 1] * len(mine)
    np.testing.assert_allclose(found.byte_share[mine].sum(), 1, rtol=1e-6)
  split = sum((len(a), len(b)) != (1, 1) for a, b in chunks)
  assert align.residuals(found, len(source_ends)) == (len(chunks), split)
  # Tokens with bytes collect in proportion to the bytes that they share.
  starts, source_starts = (np.append(0, e[:-1]) for e in (ends, source_ends))
  low = np.maximum(source_starts[:, None], starts)
  overlap = np.maximum(np.minimum(source_ends[:, None], ends) - low, 0)
  width = source_ends - source_starts
  np.testing.assert_allclose(
    matrix[width > 0],
    (overlap / np.maximum(width, 1)[:, None])[width > 0],
    atol=1e-7,
  )
  return found


WIDTH = 256


@jax.jit
def spread(trace):
  return realign.collect(trace), realign.collect_chunks(trace)


def check_mass(alignment, source_ends, ends, finished, seed):
  """On the device: each chunk keeps its log-prob, however it is spread."""
  rng = np.random.default_rng(seed)
  logprobs = -rng.exponential(size=len(source_ends)).astype(np.float32)
  columns = [np.pad(x, (0, WIDTH - len(x)))[None] for x in alignment]
  padded = np.pad(logprobs, (0, WIDTH - len(logprobs)))[None]
  for values in spread(Trace(*map(jnp.asarray, (padded, *columns)))):
    values = np.asarray(values[0], np.float64)
    assert not values[len(ends) :].any()
    np.testing.assert_allclose(values.sum(), logprobs.sum(), rtol=1e-5)
    for theirs, mine in align.chunks(source_ends, ends, finished):
      wanted = logprobs[theirs].sum(dtype=np.float64)
      np.testing.assert_allclose(values[mine].sum(), wanted, rtol=1e-5)
      if len(theirs) == len(mine) == 1:
        assert values[mine[0]] == logprobs[theirs[0]]


# Real tokenizers.


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_every_pair_of_real_tokenizers(real, text, finished):
  found = spellings(real, text, finished)
  assert found.keys() >= set(LOSSLESS)
  for one, two in itertools.product(found, repeat=2):
    sides = found[one].ends, found[two].ends
    check_chunks(*sides, finished)
    alignment = check_alignment(*sides, finished)
    check_mass(alignment, *sides, finished, seed=len(text))
    if one == two:
      assert align.residuals(alignment, len(sides[0])).split == 0


def test_lossy_tokenizers_take_part_where_they_spell_the_text(real):
  assert "unigram" in spellings(real, "the cat, 42", True)
  wordpiece = spellings(real, "embeddings are unbelievably ok", True)
  assert wordpiece.keys() >= {"minilm", *LOSSLESS}
  assert wordpiece["minilm"].ends[0] == len("em")
  sides = wordpiece["cl100k"].ends, wordpiece["minilm"].ends
  check_chunks(*sides, True)
  check_mass(check_alignment(*sides, True), *sides, True, seed=0)


@pytest.mark.parametrize("finished", [True, False])
def test_any_text_in_every_pair(real, finished):
  piece = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
      [*"  \n\t07éλЖ日本🙂", "e\u0301", "👨‍👩‍👧", "the ", "\r\n"]
    ),
    st.integers(0, 10**9).map(str),
  )

  @settings(max_examples=15, **HYPOTHESIS)
  @given(st.lists(piece, max_size=8).map("".join))
  def check(text):
    found = spellings(real, text, finished)
    for one, two in itertools.product(found, repeat=2):
      sides = found[one].ends, found[two].ends
      check_chunks(*sides, finished)
      check_alignment(*sides, finished)

  check()


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_cut_completion_ends_at_the_last_whole_character(real, name):
  loaded = real.load(name)
  ids = loaded.encode(" 42 日本🙂 naïve 👨‍👩‍👧")
  for length in range(len(ids) + 1):
    told = align.spell(loaded, np.asarray(ids[:length], np.int32), False)
    kept = max(k for k in range(length + 1) if _whole(loaded, ids[:k]))
    assert told.tokens.tolist() == ids[:kept]
    assert told.text == loaded.decode_exact(ids[:kept])
    assert len(told.ends) == kept
    assert told.ends[-1:].tolist() == [len(told.text.encode())][:kept]


def _whole(loaded, ids):
  return loaded.decode_exact(ids) is not None


def test_a_completion_cut_inside_a_character_of_its_first_token(real):
  loaded = real.load("cl100k")
  lone = loaded.token_bytes.index(b"\xe6")
  told = align.spell(loaded, [lone], False)
  assert (told.text, len(told.tokens), len(told.ends)) == ("", 0, 0)
  assert align.spell(loaded, [lone, loaded.eos_ids[0]], True) == "undecodable"


def test_a_cut_between_tokens_that_share_characters(real):
  """E6 97 | A5 E6 | 9C AC: no token but the last ends a character."""
  loaded = real.load("cl100k")
  pieces = (b"\xe6\x97", b"\xa5\xe6", b"\x9c\xac")
  table = (*pieces, *loaded.token_bytes[3:])
  loaded = dataclasses.replace(loaded, token_bytes=table)
  (a,) = loaded.encode("a")
  for ids, text, ends in (
    ([0, 1], "", []),
    ([0, 1, 2], "日本", [2, 4, 6]),
    ([a, 0, 1], "a", [1]),
    ([0, 1, 2, 0, 1], "日本", [2, 4, 6]),
  ):
    told = align.spell(loaded, ids, False)
    assert (told.text, told.ends.tolist()) == (text, ends)
    assert told.tokens.tolist() == ids[: len(ends)]


# What is refused, and why.


def test_texts_that_a_tokenizer_does_not_spell_are_refused(real):
  def reason(name, text):
    return align.retokenize(real.load(name), text, True)

  assert reason("qwen", "cafe\u0301 x") == "changed"
  assert reason("unigram", "x²") == "changed"
  assert reason("unigram", "x² … ½") in ("changed", "unknown")
  assert reason("unigram", "日") == "unknown"
  for text in (" hello", "Hello", "don't", "two  spaces"):
    assert reason("minilm", text) == "changed"
  assert reason("minilm", "▁") == "unknown"
  for name in NAMES:
    assert reason(name, "a\ud800") == "surrogate"


def test_ids_that_are_no_text_are_refused(real):
  loaded = real.load("cl100k")
  eos = loaded.eos_ids[0]
  lone = loaded.token_bytes.index(b"\xe6")
  a, b = loaded.encode("a") + loaded.encode("b")
  for bad in (min(loaded.holes), loaded.vocab_size, 151_700, -1, lone):
    assert align.spell(loaded, [a, bad, b, eos], True) == "undecodable"
    assert align.spell(loaded, [a, bad, b], False) == "undecodable"
  # The end of a cut one may be a part of a character, and no other bytes.
  assert align.spell(loaded, [a, lone], False).text == "a"
  stray = loaded.token_bytes.index(b"\xff")
  assert align.spell(loaded, [a, stray], False) == "undecodable"
  qwen = real.load("qwen")
  assert align.spell(qwen, [64, 151_700], False) == "undecodable"


def test_control_tokens_are_refused_and_their_names_are_text(real):
  loaded = real.load("qwen")
  end, other = loaded.eos_ids
  (start,) = loaded.encode("<|im_start|>", controls=True)
  (think,) = loaded.encode("<think>", controls=True)
  a = loaded.encode("a")
  for control in (start, think, end, other):
    assert align.spell(loaded, [*a, control, *a, end], True) == "control"
    assert align.spell(loaded, [*a, control, *a], False) == "control"
  assert align.spell(loaded, [*a, end], False) == "control"
  for last in (end, other):  # any EOS ends it, and is kept
    told = align.spell(loaded, [*a, last], True)
    assert (told.text, told.tokens[-1], told.ends.tolist()) == (
      *("a", last),
      [1, 1],
    )
  for ids in (a, []):
    assert align.spell(loaded, ids, True) == "unended"
  told = align.retokenize(loaded, "say <|im_end|> now", False)
  assert not loaded.control_ids.intersection(told.tokens.tolist())
  assert len(told.tokens) > 3


def test_drifted_ids_are_aligned_and_never_zipped(real):
  """h|e|l|l|o says "hello", which is encoded as one or two other tokens."""
  loaded = real.load("cl100k")
  letters = [loaded.token_bytes.index(bytes([byte])) for byte in b"hello"]
  told = align.spell(loaded, letters, False)
  assert (told.text, told.tokens.tolist()) == ("hello", letters)
  again = align.retokenize(loaded, told.text, False)
  assert len(again.tokens) < 5
  sides = told.ends, again.ends
  assert align.chunks(*sides) == [
    (list(range(5)), list(range(len(again.tokens))))
  ]
  alignment = align.align(*sides, False)
  assert align.residuals(alignment, 5) == (1, 1)
  with pytest.raises(ValueError, match=r"count=1: .* onto 5 source tokens"):
    align.residuals(alignment, 1)


def test_the_benchmark_measures_both_parts(real):
  pair = real.load("smollm2"), real.load("mistral-v3")
  found = bench_alignment.host(*pair, length=200, count=2)
  assert found["source_tokens"] == 400
  assert 0 < found["split_chunks"] < 1
  assert found["tokens_per_cpu_second"]["mean"] > 0
  with pytest.raises(ValueError, match="length=100000: a text has"):
    bench_alignment.host(*pair, length=100_000, count=1)
  assert bench_alignment.device(2, 16, reps=1)["cpu_seconds"] > 0


# Ends alone.


def test_split_characters():
  source = ends_of(*(bytes([byte]) for byte in "日本 42".encode()))
  own = ends_of(b"\xe6\x97", b"\xa5\xe6", b"\x9c", b"\xac", " ", "4", "2")
  rest = [([4 + i], [2 + i]) for i in range(5)]
  assert align.chunks(source, own) == [([0, 1], [0]), ([2, 3], [1]), *rest]
  mirrored = [(mine, theirs) for theirs, mine in align.chunks(source, own)]
  assert align.chunks(own, source) == mirrored
  alignment = check_alignment(own, source, False)
  assert alignment.first_part.tolist() == [0.5] * 4 + [1.0] * 5
  assert align.residuals(alignment, 7) == (7, 2)


def test_a_prefix_without_bytes_shifts_nothing():
  source = ends_of("h", b"\xc3", b"\xa9", "ll", "o")
  own = ends_of("", "h", b"\xc3", b"\xa9", "l", "lo")
  wanted = [([0], [0, 1]), ([1], [2]), ([2], [3]), ([3, 4], [4, 5])]
  assert align.chunks(source, own) == wanted
  assert align.chunks(own, source) == [(b, a) for a, b in wanted]
  told = check_alignment(source, own, False)
  assert shares(told, 5)[0].tolist() == [0, 1, 0, 0, 0, 0]
  # The peer's prefix has a log-prob: the token that follows collects it.
  told = check_alignment(own, source, False)
  assert shares(told, 6)[:2, 0].tolist() == [1, 1]
  both = ends_of("", "h", "i"), ends_of("", "hi")
  assert align.chunks(*both) == [([0, 1, 2], [0, 1])]


def test_tokens_without_bytes_at_the_end_and_alone():
  source, own = ends_of("a", "b", "", ""), ends_of("a", "b")
  for finished, wanted in (
    (False, [([0], [0]), ([1, 2, 3], [1])]),
    (True, [([0], [0]), ([1, 2], [1]), ([3], [2])]),
  ):
    mine = ends_of("a", "b", "") if finished else own
    assert align.chunks(source, mine, finished) == wanted
    check_alignment(source, mine, finished)
    check_alignment(mine, source, finished)
  nothing = ends_of("", "", "")
  assert align.chunks(nothing, nothing[:1]) == [([0, 1, 2], [0])]
  assert align.chunks(nothing, nothing[:2], True) == [([0, 1], [0]), ([2], [1])]
  check_alignment(nothing, nothing[:2], True)
  empty = nothing[:0]
  assert align.chunks(empty, empty) == []
  assert [len(column) for column in align.align(empty, empty, False)] == [0] * 7
  assert align.chunks(nothing[:1], nothing[:1], True) == [([0], [0])]


@settings(max_examples=150, **HYPOTHESIS)
@given(st.data(), st.integers(0, 30), st.booleans())
def test_any_two_cuttings_of_a_span(data, total, finished):
  """Tokens without bytes may stand anywhere, on either side."""
  ends = st.lists(st.integers(0, total), max_size=12).map(sorted)
  sides = [
    np.asarray([*data.draw(ends), *[total] * (1 + finished)], np.int32)
    for _ in range(2)
  ]
  check_chunks(*sides, finished)
  alignment = check_alignment(*sides, finished)
  for i, side in enumerate(sides):  # EOS collects from EOS alone
    if finished:
      assert (alignment.first, alignment.chunk_start)[i][-1] == len(side) - 1


@pytest.mark.parametrize(
  ("source", "own", "finished", "message"),
  [
    ([1, 3], [1, 2], False, "must be of one text: 2 tokens end at byte 3"),
    ([], [1], False, "0 tokens end at byte 0, 1 at byte 1"),
    ([0], [], False, "1 tokens end at byte 0, 0 at"),
    ([2, 1, 3], [3], False, "source_ends must not decrease"),
    ([-1, 3], [3], False, "source_ends must not decrease, from 0 on"),
    ([3], [2, 1, 3], False, "ends must not decrease"),
    ([3, 3], [1, 3], True, "finished=True: ends must end in an EOS"),
    ([3], [3, 3], True, "finished=True: source_ends must end in an EOS"),
    ([], [0], True, "finished=True: source_ends must end"),
  ],
)
def test_ends_that_are_not_of_one_text_raise(source, own, finished, message):
  sides = [np.asarray(side, np.int32) for side in (source, own)]
  for call in (align.align, align.chunks):
    with pytest.raises(ValueError, match=message):
      call(*sides, finished)
