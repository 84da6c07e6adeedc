"""The built-in verifiers judge answers right, and read or refuse any text."""

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl_jax.tasks import (
  extract,
  mathematics,
  tokens,
  values,
  verifiers,
  verify,
)
from mrl_jax.tasks.dataset import Problem


@pytest.fixture(scope="module")
def math_pool():
  with verify.Pool(mathematics.verifier, 1, deadline_seconds=30.0) as pool:
    yield pool


def judge(check, completion, gold):
  return check(completion, Problem("p", "?", gold)).outcome.value


WRONGLY_TRUE = [
  ("1/2^98", "1/2^99"),
  ("1/2^{998}", "1/2^{999}"),
  ("10^{-40}", "10^{-41}"),
  ("1e-30", "0"),
  ("$4$", "$4\\sqrt(2)$"),
  ("$4\\sqrt(2)$", "$4$"),
  ("2", "2\\pi"),
  ("2", "2^{10}"),
  ("a", "ab"),
  ("\\frac{a}{b}", "\\frac{a}{b}c"),
  ("9", "4 5"),
  ("9", "(4)(5)"),
  ("(1,2)", "{1,2}"),
  ("{1,2}", "(1,2)"),
  ("$(1,2)$", "$\\{1,2\\}$"),
  ("[1,2]", "(1,2)"),
  ("[1,2)", "(1,2]"),
  ("(1,2)", "(2,1)"),
  ("1,2", "1,2,3"),
  ("\\{1,2\\}", "\\{1\\}"),
  ("x>3", "x\\ge 3"),
  ("x>3", "x<3"),
  ("seat", "east"),
  ("ko", "\\boxed{ok}"),
  ("on", "\\boxed{no}"),
  ("on", "\\text{No}"),
  ("si", "\\boxed{is}"),
  ("101_2", "110_2"),
  ("101_2", "101_3"),
  ("101_2", "5"),
  ("101", "101_2"),
  ("1", "\\sin 90"),
  ("\\sin 30^\\circ", "\\sin 60^\\circ"),
  ("-2", "\\sqrt[3]{8}"),
  ("-2", "\\sqrt{-4}"),
  ("5 million", "5"),
  ("5", "\\boxed{5 \\text{ million}}"),
  ("12:30", "12:31"),
  ("69", "\\boxed{x - 3 = 69}"),
  ("72", "\\boxed{72 - 3 = 69}"),
  ("2 xyz", "2"),
  ("5\\text{ m}", "5\\text{ cm}"),
  ("\\pi", "3.14159265358979"),
  ("\\boxed{\\frac{1}{3}}", "\\boxed{\\frac{1}{2}}"),
  (
    "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
    "\\begin{pmatrix}2\\\\1\\end{pmatrix}",
  ),
]
WRONGLY_FALSE = [
  ("pi/2", "\\boxed{\\dfrac{\\pi}{2}}"),
  ("-2*pi", "\\boxed{-2\\pi}"),
  ("sqrt(2)/2", "\\boxed{\\frac{1}{\\sqrt{2}}}"),
  ("x^2+1", "\\boxed{1+x^2}"),
  ("\\text{east}", "\\boxed{\\text{East}}"),
  ("1,2,3", "\\boxed{\\{3,2,1\\}}"),
  ("50\\%", "\\boxed{0.5}"),
  ("50\\%", "50"),
  ("1,234", "1234"),
  ("2^99", "2^{99}"),
  ("2**3", "8"),
  ("2\\frac{1}{3}", "7/3"),
  ("0.1\\overline{6}", "1/6"),
  ("x=3", "3"),
  ("5", "x = 5"),
  ("y=2x+1", "2x+1=y"),
  ("2y=4x", "y=2x"),
  ("x>3", "3<x"),
  ("-1<x<2", "2>x>-1"),
  ("[1,2)", "x \\in [1,2)"),
  ("(-\\infty,2]\\cup[3,\\infty)", "[3,\\infty)\\cup(-\\infty,2]"),
  ("3 \\pm \\sqrt2", "3-\\sqrt{2}, 3+\\sqrt{2}"),
  ("(x+1)(x-1)", "x^2-1"),
  ("\\sin^2 x+\\cos^2 x", "1"),
  ("e^{i\\pi}", "-1"),
  ("|x|", "\\sqrt{x^2}"),
  ("\\binom{5}{2}", "10"),
  ("\\sum_{i=1}^{3} i", "6"),
  ("6", "\\boxed{\\sum_{i=1}^{3} i}"),
  (
    "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
    "\\begin{bmatrix}1\\\\ \\frac{4}{2}\\end{bmatrix}",
  ),
  (
    "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
    "\\begin{pmatrix}1\\\\[4pt] 2\\end{pmatrix}",
  ),
  (
    "\\begin{pmatrix}1&3\\\\2&4\\end{pmatrix}",
    "\\boxed{\\begin{pmatrix}1 & 3 \\\\ [0.5em] 2&4\\end{pmatrix}}",
  ),
  ("no", "\\boxed{No}"),
  ("OK", "\\text{ok}"),
  ("xy", "yx"),
  ("AB", "\\boxed{A \\cdot B}"),
  ("1/2", "\\cos 60^\\circ"),
  ("1/2", "$\\sin{30^{\\circ}}$"),
  ("\\tan 45°", "1"),
  ("\\sin^2 (30^\\circ + 15^\\circ)", "1/2"),
  ("90", "90^\\circ"),
  ("90^{\\circ}", "\\boxed{90°}"),
  ("-2", "\\sqrt[3]{-8}"),
  ("-3/2", "\\boxed{\\sqrt[3]{-\\frac{27}{8}}}"),
  ("-1", "\\sqrt[5]{-1}"),
  ("f(x)=2x", "2x"),
  ("1500", "1.5e3"),
  ("4", "So $x=3$ and then $y=4$."),
  ("10000", "10\\,000"),
  ("1\\,234\\,567", "\\boxed{1{,}234{,}567}"),
  ("5", "5\\text{ apples}"),
  ("12", "\\boxed{12\\text{ red marbles}}"),
  ("5 million", "\\boxed{5{,}000{,}000}"),
  ("12:30", "12:30"),
  ("3:2", "3 : 2"),
  ("101_2", "\\boxed{101_{2}}"),
  ("2A_{16}", "2a_{16}"),
  ("101_{\\text{two}}", "101_{two}"),
  ("72", "\\boxed{m\\angle ABC = 72}"),
  ("69", "The answer is $72 - 3 = 69$"),
  ("70000", "The answer is 70,000 dollars."),
  ("3/4", "answer: 3/4 cup"),
  ("5", "\\boxed{5 cats}"),
  ("2 xyz", "2xyz"),
  ("2 pi", "2\\pi"),
  ("72", "<answer>Total cost: $72</answer>"),
  ("72", "So the total is **72 clips**."),
  ("72", "The answer is 72, in total, so that is it."),
  ("(1,2)", "The answer is (1, 2)."),
  ("\\frac{\\pi}{2}", "So we get $\\frac{\\pi}{2}$ radians."),
  ("C", "The answer is C."),
]


def test_math_is_never_wrongly_true(math_pool):
  items = [(text, Problem("p", "?", gold)) for gold, text in WRONGLY_TRUE]
  got = [verdict.outcome.value for verdict in math_pool.score(items)]
  assert dict(zip(WRONGLY_TRUE, got, strict=True)) == dict.fromkeys(
    WRONGLY_TRUE, "wrong"
  )


def test_math_is_never_wrongly_false(math_pool):
  items = [(text, Problem("p", "?", gold)) for gold, text in WRONGLY_FALSE]
  got = [verdict.outcome.value for verdict in math_pool.score(items)]
  assert dict(zip(WRONGLY_FALSE, got, strict=True)) == dict.fromkeys(
    WRONGLY_FALSE, "correct"
  )


def test_math_counts_outcomes_apart(math_pool):
  items = [
    ("\\boxed{5}", Problem("a", "?", "5")),
    ("\\boxed{6}", Problem("a", "?", "5")),
    ("\\boxed{", Problem("a", "?", "5")),
    ("<answer></answer> 5", Problem("a", "?", "5")),
    ("5", Problem("b", "?", "\\frac{1}{")),
    ("5", Problem("b", "?", "")),
  ]
  verdicts = math_pool.score(items)
  assert [verdict.outcome.value for verdict in verdicts] == [
      "correct", "wrong", "unparsed", "unparsed", "gold_unparsed",
      "gold_unparsed",
  ]  # fmt: skip
  assert [v.reward for v in verdicts[:4]] == [1.0, 0.0, 0.0, 0.0]
  # An unreadable gold answer takes every row of its group out.
  assert all(math.isnan(verdict.reward) for verdict in verdicts[4:])
  assert verify.counts(verdicts) == {
      "correct": 1, "wrong": 1, "unparsed": 2, "gold_unparsed": 2,
      "timeout": 0, "error": 0,
  }  # fmt: skip


@pytest.mark.parametrize(
  "text", ["9^{9^{9^{9}}}", "1000000!", "(" * 5000, "9" * 6000, "2^{" * 200,
   "\\frac{1}{" * 300 + "2" + "}" * 300, "\\sqrt{" * 99 + "2" + "}" * 99]
)  # fmt: skip
def test_math_refuses_what_would_never_end(math_pool, text):
  start = time.monotonic()
  item = (f"\\boxed{{{text}}}", Problem("p", "?", "42"))
  assert math_pool.score([item]) == [verify.UNPARSED]
  assert time.monotonic() - start < 5


@pytest.mark.parametrize(
  ("gold", "text", "outcome"),
  [
    ("72", "The answer is 72, in total, so 3 more than before", "correct"),
    ("72", "That makes 80 - 8 = 72.", "correct"),
    ("72", "<answer></answer>", "unparsed"),
    ("72", "It is 72. <answer></answer>", "unparsed"),
    ("72", "It is 72. <answer>", "unparsed"),
    ("72", "<answer>71</answer> no, <answer>72</answer>", "correct"),
    ("1/2", "\\boxed{\\frac{1}{2}}", "correct"),
    ("\\boxed{\\frac{1}{3}}", "\\boxed{\\frac{1}{2}}", "wrong"),
    ("1/3", "\\boxed{\\frac{1}{2}}", "wrong"),
    ("5000", "long story\n#### 5,000", "correct"),
    ("2 * 9 = 18\n#### 18", "so 18", "correct"),
    ("1000000", "1,000,000.00 dollars", "correct"),
    ("5", "The answer is **5**", "correct"),
    ("5", "The final answer is:\n\n$$5$$", "correct"),
    ("5", "The answer is $5. I hope the answer helps", "correct"),
    ("5", "the answer is 2 + 3 = 5", "correct"),
    ("-5", "x = −5", "correct"),
    ("5", "10-5", "unparsed"),
    ("-3", "-\\frac{6}{2}", "correct"),
    ("7/3", "2\\frac{1}{3}", "correct"),
    ("90", "\\boxed{90^\\circ}", "correct"),
    ("5", "\\boxed{5\\text{ cm}^2}", "correct"),
    ("0.5", "50%", "correct"),
    ("50", "50%", "correct"),
    ("0.5", "0.5%", "wrong"),
    ("1/3", "0.3333", "wrong"),
    ("4", "\\boxed{4\\sqrt{2}}", "unparsed"),
    ("2", "$4\\sqrt(2)$", "unparsed"),
    ("2", "2x", "unparsed"),
    ("5", "5/0", "unparsed"),
    ("5", "no idea", "unparsed"),
    ("5", "9" * 5000, "unparsed"),
    ("between 3 and 5", "4", "gold_unparsed"),
    ("", "4", "gold_unparsed"),
  ],
)
def test_numeric(gold, text, outcome):
  assert judge(verifiers.numeric_check, text, gold) == outcome


def test_exact():
  assert judge(verifiers.exact_check, " a\n b ", "a b") == "correct"
  assert judge(verifiers.exact_check, "A b", "a b") == "wrong"
  assert judge(verifiers.exact_check, "x <answer>a</answer>", "a") == "correct"
  assert judge(verifiers.exact_check, "<answer> </answer>", "a") == "unparsed"
  assert judge(verifiers.exact_check, "a", " ") == "gold_unparsed"


@pytest.mark.parametrize(
  "box",
  [
    "a - 5", "5p + q", "0x5", "5x2", "(5, \\infty)", "5, \\infty", "5, 6",
    "sqrt 5", "not 5", "log 5", "x > 5", "x \\ge 5", "< 5",
    "x != 5", "5_6", "5e1000", "5!", "5 - x",
    "x + 1 = 5", "-x = 5", "|x| = 5", "2x = 5", "5x", "5\\pi", "\\ln 5",
    "5^{x}", "f(5)", "\\frac{5}{x}", "5/x",
  ],
)  # fmt: skip
def test_a_marked_number_is_a_number_as_a_whole(box):
  for gold in ("5", "-5", "1/5", "6"):
    for text in (f"\\boxed{{{box}}}", f"#### {box}", f"The answer is ${box}$"):
      assert judge(verifiers.numeric_check, text, gold) == "unparsed"


@pytest.mark.parametrize(
  "box", ["half of 5", "twice 5", "5 and a half", "5 or more", "not over 5"]
)
def test_a_mark_holds_no_words_that_change_the_number(box):
  for text in (f"\\boxed{{\\text{{{box}}}}}", f"<answer>{box}</answer>"):
    assert judge(verifiers.numeric_check, text, "5") == "unparsed"


@pytest.mark.parametrize(
  "text",
  ["7-2", "7 - 2", "7 -2", "x-2", "x - 2", "pages 10-15", "COVID-19", "v2-3",
   "1e1000", "0x2", "x2", "a2b", "it is not 2", "sqrt 2", "2^5", "f(2)"],
)  # fmt: skip
def test_part_of_an_expression_is_no_number(text):
  assert judge(verifiers.numeric_check, text, "2") == "unparsed"


@pytest.mark.parametrize(
  ("value", "texts"),
  [
    ("5", ["5", "$5$", "5.0", "\\$5", "€5", "x = 5", "x_1 = 5", "f(x) = 5",
           "\\theta = 5", "Total: 5", "5 apples", "5\\text{ apples}", "**5**",
           "5\\,\\text{cm}^2", "5 km/h", "5 sq. ft", "5^{\\circ}", "5°",
           "5 m", "2 + 3 = 5", "5 \\times 1 = 10/2 = 5",
           "m\\angle ABC = 5^\\circ",
           "5 cats", "Total cost: $5", "+5", "10/2", "5.", "5 two-way roads"]),
    ("-5", ["-5", "−5", "-$5", "$-5$", "\\$-5", "x = -5", "-5 degrees"]),
    ("5000000", ["5 million", "5{,}000{,}000", "5\\,000\\,000", "5e6",
                 "5,000,000", "5\u202f000\u202f000", "\\$5 million"]),
    ("24", ["2 dozen", "2 dozen eggs"]),
    ("1/2", ["\\frac12", "\\dfrac{1}{2}", "\\frac{1}2", "\\tfrac1{2}", ".5",
             "50\\%", "50 percent"]),
  ],
)  # fmt: skip
def test_spellings_of_one_number(value, texts):
  for text in texts:
    for form in ("\\boxed{{{}}}", "#### {}", "<answer>{}</answer>"):
      got = judge(verifiers.numeric_check, form.format(text), value)
      assert got == "correct", (form, text)


@pytest.mark.parametrize(
  ("text", "gold", "outcome"),
  [
    ("The answer is 5! = 120", "120", "correct"),
    ("The answer is 3! + 4! = 30.", "30", "correct"),
    ("The answer is 5! Great", "5", "correct"),
    ("The answer is 5!", "5", "correct"),
    ("The answer is a total of 72 clips.", "72", "correct"),
    ("The answer is not 5", "5", "unparsed"),
    ("The answer is $72 - 3 = 69$", "69", "correct"),
    ("The answer is $x - 3 = 69$", "69", "unparsed"),
    ("So the total is **72 clips**.", "72", "correct"),
    ("So 2**3 is", "3", "unparsed"),
    ("It costs 5 a day", "5", "correct"),
  ],
)
def test_the_clause_of_a_cue(text, gold, outcome):
  assert judge(verifiers.numeric_check, text, gold) == outcome


@pytest.mark.parametrize("check", ["exact_check", "numeric_check"])
def test_quick_verifiers_are_quick_on_hostile_text(check):
  texts = ["<answer>", "\\boxed{", "the answer is ", "$", "1,", "####", "9/"]
  start = time.monotonic()
  for text in texts:
    judge(getattr(verifiers, check), text * (20_000 // len(text)), "5")
  assert time.monotonic() - start < 2


def test_boxes_nest():
  assert extract.boxed("\\boxed{1} \\boxed{\\frac{1}{2}} x") == "\\frac{1}{2}"
  assert extract.boxed("\\boxed{\\{1,2\\}}") == "\\{1,2\\}"
  assert extract.boxed("\\boxed{\\frac{1}{2}") == ""
  assert extract.boxed("none") is None


PIECES = st.sampled_from(
  r"""1 42 1/2 x y \frac { } ( ) [ ] \{ \} , ^ _ \sqrt \pi + - * / = < \le | e
    \cup ! % \text{a} $ or \pm \infty . \sin log \begin{pmatrix} & \\ 0 \binom
    \end{pmatrix} \lfloor \in cm ° 1e400 ; \overline 0. \log_""".split()  # noqa: SIM905
)


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=9).map("".join))
def test_any_text_is_read_or_refused(text):
  """And what is read agrees with itself."""
  try:
    value = values.read(text)
  except tokens.Unreadable:
    return
  if "nan" not in str(value) and "zoo" not in str(value):
    assert values.agree(value, values.read(text))


@given(
  st.fractions(max_denominator=999),
  st.fractions(max_denominator=999),
  st.sampled_from([verifiers.numeric_check, mathematics.check]),
)
def test_fractions_agree_only_when_equal(a, b, check):
  sign = "-" if b < 0 else ""
  latex = f"{sign}\\frac{{{abs(b.numerator)}}}{{{b.denominator}}}"
  want = "correct" if a == b else "wrong"
  assert judge(check, f"\\boxed{{{latex}}}", str(a)) == want
  assert judge(check, f"The answer is ${latex}$.", str(b)) == "correct"


@pytest.mark.parametrize(
  ("text", "key"),
  [
    ("The answer is 1,234.", "1234"),
    ("\\boxed{\\frac{2}{4}}", "1/2"),
    ("743", "743"),
    ("<answer> East  side</answer>", "east side"),
    ("<answer></answer> 5", None),
    ("first 3\nthen 4", "4"),
    ("", None),
  ],
)
def test_answers_that_vote_together(text, key):
  assert extract.key(text) == key


def test_votes_are_keys_and_verdicts():
  texts = ["so \\boxed{1/2}", "The answer is 0.5.", "<answer></answer>", "b"]
  assert extract.votes(texts, [True, False, False, False]) == [
    ("1/2", True),
    ("1/2", False),
    None,
    ("b", False),
  ]
