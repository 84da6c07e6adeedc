"""What the prefixes of hard prompts show, from their records alone.

A prompt's record has the pass rate of its J prefixes, each in two or more
parts that were sampled apart, that of a start from nothing, and what was
known of each prefix before. Prompts, not prefixes, are resampled for the
intervals: prefixes of one answer are alike. The best prefix is chosen by one
part and valued by the others, or luck would count as merit.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from mrl_jax import measure

Prompt = Mapping[str, Any]
PREDICTORS = {
  "entropy": "mean entropy h",
  "smoothed": "smoothed, own prefixes",
  "remembered": "smoothed, the group's prefixes",
  "place": "place of the cut",
}
RULES = {
  "lowest": "lowest smoothed entropy",
  "lowest_remembered": "lowest, the group's prefixes",
  "lowest_raw": "lowest entropy, not smoothed",
  "highest": "highest smoothed entropy",
  "random": "random",
  "first": "first cut",
  "last": "last cut",
  "best": "best (chosen by other samples)",
  "restart": "no prefix",
}
_DRAWS = 1000


def within(prompts: Sequence[Prompt], key: str) -> list[float]:
  """Spearman's rank correlation with pass rate in each prompt that has one.

  A prompt of fewer than three prefixes, or whose pass rates or predictor are
  all equal, has none.
  """
  found = []
  for prompt in prompts:
    rates, values = _rates(prompt), np.asarray(prompt[key])
    if len(rates) > 2 and np.ptp(rates) and np.ptp(values):
      found.append(float(stats.spearmanr(values, rates).statistic))
  return found


def overall(
  prompts: Sequence[Prompt],
  key: str,
  given: str = "",
  draws: int = _DRAWS,
  seed: int = 0,
) -> tuple[float, float, float]:
  """Spearman's correlation over all prefixes, and its 95 % interval.

  Args:
    prompts: the records.
    key: the predictor, one of PREDICTORS.
    given: another, which is held fixed: what `key` says beyond it.
    draws: resamples of the prompts.
    seed: of them.
  """
  keys = [key, given] if given else [key]
  parts = [np.stack([p[k] for k in keys] + [_rates(p)]) for p in prompts]

  def correlation(chosen):
    columns = np.concatenate([parts[n] for n in chosen], axis=1)
    if not np.ptp(columns, axis=1).all():
      return np.nan
    ranks = stats.rankdata(columns, axis=1)
    return _partial(np.corrcoef(ranks))

  generator = np.random.default_rng(seed)
  many = [
    correlation(generator.integers(0, len(parts), len(parts)))
    for _ in range(draws)
  ]
  low, high = np.nanquantile(many, [0.025, 0.975])
  return correlation(range(len(parts))), float(low), float(high)


def _partial(table: np.ndarray) -> float:
  """Of the first and the last variable; one between them is held fixed.

  (r_xy - r_xz r_zy) / sqrt((1 - r_xz^2) (1 - r_zy^2))
  """
  if len(table) == 2:
    return float(table[0, 1])
  left, right = table[0, 1], table[1, 2]
  rest = np.sqrt((1 - left**2) * (1 - right**2))
  return float((table[0, 2] - left * right) / rest) if rest else np.nan


def chosen(prompt: Prompt, rule: str) -> float:
  """The pass rate of the prefix that a rule of RULES takes."""
  rates = _rates(prompt)
  if rule == "random":
    return float(rates.mean())
  if rule == "restart":
    return float(np.mean(prompt["start"]))
  if rule == "best":
    parts = np.asarray(prompt["rates"])
    turns = range(parts.shape[1])
    picks = [parts[:, turn].argmax() for turn in turns]
    others = [np.delete(parts, turn, axis=1).mean(1) for turn in turns]
    return float(np.mean([o[p] for o, p in zip(others, picks, strict=True)]))
  place = {
    "lowest": lambda: np.argmin(prompt["smoothed"]),
    "lowest_remembered": lambda: np.argmin(prompt["remembered"]),
    "lowest_raw": lambda: np.argmin(prompt["entropy"]),
    "highest": lambda: np.argmax(prompt["smoothed"]),
    "first": lambda: 0,
    "last": lambda: len(rates) - 1,
  }[rule]()
  return float(rates[place])


def table(prompts: Sequence[Prompt]) -> str:
  """Markdown: the correlations, then what each rule would continue."""
  if not prompts:
    return "no hard prompt could be cut"
  lines = [
    "| predictor of pass rate | Spearman, all prefixes | given the place "
    "| within a prompt | prompts |",
    "|---|---|---|---|---|",
  ]
  for key, words in PREDICTORS.items():
    inside = within(prompts, key)
    cells = [words, _interval(*overall(prompts, key)), "", ""]
    if key != "place":
      cells[2] = _interval(*overall(prompts, key, "place"))
    if inside:
      cells[3] = _interval(float(np.mean(inside)), *measure.bootstrap(inside))
    cells.append(str(len(inside)))
    lines.append(f"| {' | '.join(cells)} |")
  lines += [
    "",
    "| cut | pass rate | minus random | minus no prefix | ever right |",
    "|---|---|---|---|---|",
  ]
  base = {
    rule: np.asarray([chosen(prompt, rule) for prompt in prompts])
    for rule in RULES
  }
  for rule, words in RULES.items():
    cells = [words, _mean(base[rule])]
    for other in ("random", "restart"):
      cells.append("" if other == rule else _mean(base[rule] - base[other]))
    ever = np.mean(base[rule] > 0) if rule not in ("random", "best") else None
    cells.append("" if ever is None else f"{ever:.0%}")
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def _rates(prompt: Prompt) -> np.ndarray:
  return np.asarray(prompt["rates"], np.float64).mean(1)


def _mean(values: np.ndarray) -> str:
  return _interval(float(values.mean()), *measure.bootstrap(values))


def _interval(value: float, low: float, high: float) -> str:
  return f"{value:.3f} [{low:.3f}, {high:.3f}]"
