"""The three probes on the plane of stability and support, computed exactly.

    python -m experiments.studies.bandit [--out=DIR]

Writes `bandit.json` and `bandit.png` in a few seconds. `statements` measures
identities and bounds on random bandits; `panels` places GRPO and the probes
by the variance of their update (stability) and by how fast it raises a right
answer that the learner almost never gives (support), while the peer goes from
the learner's twin to a specialist for that answer. The sums themselves are in
`bandit_exact`.
"""

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib
import matplotlib.axes
import matplotlib.figure
import numpy as np

from experiments import plots
from experiments.studies import bandit_exact as exact

HERE = pathlib.Path(__file__).parent
SAMPLES = 8  # of each policy, per prompt
RARE = 0.004  # what the learner gives the rare right answer
SOLVED = (0.02, 0.1, 0.5)  # the learner's chance to be right, by panel
# Answers: rare right, familiar right, and two wrong ones.
RIGHT = np.asarray([True, True, False, False])
SPECIALIST = np.asarray([0.6, 0.0, 0.0, 0.4])
# The learner's share of the peer, from a twin to almost disjoint.
SHARES = tuple((1 / (1 + 49 * np.linspace(0, 1, 19) ** 3)).tolist())
BANDITS = 200  # random ones, for the statements
ERROR = 0.5  # of a log-weight, in nats

COLORS = {
  "grpo": plots.INK,
  "prp": plots.COLORS[1],
  "prp_clipped": plots.COLORS[1],
  "xgrpo": plots.COLORS[2],
  "sgt": plots.COLORS[0],
}
LABELS = {
  "grpo": "GRPO",
  "prp": "PRP",
  "prp_clipped": "PRP, clipped",
  "xgrpo": "XGRPO",
  "sgt": "SGT",
}
OFFSETS = {  # of the labels, in points
  "grpo": (-8, 4),
  "prp": (8, -3),
  "prp_clipped": (6, -14),
  "xgrpo": (-8, -10),
  "sgt": (-4, 9),
}
MARKS = {
  "twin": {"marker": "o", "markerfacecolor": "white", "linestyle": ""},
  "specialist": {"marker": "o", "linestyle": ""},
}


def statements(count: int = BANDITS) -> dict[str, dict[str, float]]:
  """What the identities and bounds come to on random bandits.

  "..._error" is the distance of the two sides of an identity.
  "prp_bias_over_bound" is the worst bias that a log-weight error of at most
  ERROR nats can cause, over its bound. "xgrpo_excess_over_square" is the
  variance that a baseline b costs over b = p_n, divided by
  (b - p_n)^2 E|s|^2: it would be 1 if R and |s|^2 were uncorrelated.
  """
  found: dict[str, list[float]] = {}
  for seed in range(count):
    for key, value in _statement(seed).items():
      found.setdefault(key, []).append(float(np.max(value)))
  return {
    key: {"median": float(np.median(values)), "largest": max(values)}
    for key, values in found.items()
  }


def _statement(seed: int) -> dict[str, Any]:
  bandit = exact.random_bandit(seed)
  pi, s = exact.learner(bandit), exact.scores(bandit)
  p = exact.solved(pi, bandit.right)
  moment = 1 + exact.chi2(pi, bandit.peer)
  baseline = np.random.default_rng(seed).uniform(size=p.shape)
  excess = exact.baseline_variance(bandit, baseline)
  excess -= exact.baseline_variance(bandit, p)
  square = (baseline - p) ** 2 * (pi * (s**2).sum(-1)).sum(-1)
  drawn = exact.sgt_enumerated(bandit, 4)
  return {
    "prp_second_moment_error": abs(
      exact.prp_second_moment(bandit) / moment - 1
    ),
    "prp_bias_over_bound": exact.prp_worst_bias(bandit, ERROR)
    / exact.prp_bias_bound(bandit, ERROR),
    "xgrpo_mean_error": abs(
      exact.baseline_mean(bandit, baseline) - exact.gradient(bandit)
    ),
    "xgrpo_excess_error": abs(excess - exact.excess_variance(bandit, baseline)),
    "xgrpo_excess_over_square": np.median(excess / square),
    "sgt_direction_error": abs(drawn - exact.sgt_direction(bandit, 4)),
  }


def learner(solved: float) -> np.ndarray:
  """The learner's answers: the rare right one, and `solved` in all."""
  wrong = 1 - solved
  return np.asarray([RARE, solved - RARE, 0.8 * wrong, 0.2 * wrong])


def panels(shares: Sequence[float] = SHARES) -> list[dict[str, Any]]:
  """The probes' updates for every learner and every peer."""
  found = []
  for solved in SOLVED:
    pi = learner(solved)
    plain = exact.grpo(pi, RIGHT, SAMPLES)
    twice = exact.grpo(pi, RIGHT, 2 * SAMPLES)
    found.append(
      {
        "solved": solved,
        "learner": pi.tolist(),
        "grpo": _place(plain, pi),
        "grpo_twice_the_samples": _place(twice, pi),
        "peers": [_peer(pi, share) for share in shares],
      }
    )
  return found


def _peer(pi: np.ndarray, share: float) -> dict[str, Any]:
  """All probes with the peer that is the learner in `share` of its draws."""
  peer = share * pi + (1 - share) * SPECIALIST
  pair = (pi, peer, RIGHT, SAMPLES)
  solved = float(exact.solved(peer, RIGHT))
  rescue = exact.rescue_probability(pi @ RIGHT, peer @ RIGHT, SAMPLES)
  return {
    "share": share,
    "overlap": float(np.minimum(pi, peer).sum()),
    "chi2": float(exact.chi2(pi, peer)),
    "solved": solved,
    "rescue_probability": float(rescue),
    "prp": _place(exact.prp(*pair, clip=False), pi),
    "prp_clipped": _place(exact.prp(*pair), pi),
    "xgrpo": _place(exact.xgrpo(*pair), pi),
    "sgt": _place(exact.sgt(*pair), pi),
  }


def _place(update: exact.Update, pi: np.ndarray) -> dict[str, float]:
  """Where an update lies on the plane.

  "variance": trace of its covariance. "push": what it adds to the rare right
  answer's logit on average. "growth": d log pi(rare) / d step along it; times
  RARE it is the probability mass that reaches the answer.
  """
  push = float(update.mean[0])
  return {
    "variance": update.variance,
    "push": push,
    "growth": push - float(pi @ update.mean),
  }


def draw(found: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
  """One panel per learner; one curve per probe, from twin to specialist."""
  with matplotlib.rc_context({"font.size": 9, "text.color": plots.INK}):
    figure = matplotlib.figure.Figure(figsize=(10.5, 4.6), layout="constrained")
    grid = figure.subplots(1, len(found), sharex=True, sharey=True)
    for axes, panel in zip(grid, found, strict=True):
      _panel(axes, panel)
    grid[0].set_ylabel(
      "variance of the update (log)\nstable \u2190     \u2192 unstable",
      color=plots.INK,
    )
    grid[len(found) // 2].set_xlabel(
      f"growth of a right answer that the learner gives {1000 * RARE:g} times "
      "in 1,000: d log \u03c0 / d step     (more support \u2192)",
      color=plots.INK,
    )
    handles = [
      matplotlib.lines.Line2D([], [], color="#777777", **style, label=label)
      for style, label in (
        (MARKS["twin"], "the peer is the learner's twin"),
        (
          MARKS["specialist"],
          f"the peer is a specialist for the rare answer, and the learner in "
          f"{min(SHARES):.0%} of its draws",
        ),
      )
    ]
    figure.legend(
      handles=handles, loc="outside upper left", ncols=2, frameon=False
    )
    figure.get_layout_engine().set(wspace=0.04)
    figure.savefig(path, dpi=150, facecolor="white")


def _panel(axes: matplotlib.axes.Axes, panel: dict[str, Any]) -> None:
  axes.axvline(0.0, color="#B0B0B0", linewidth=0.8)
  for key in ("prp_clipped", "xgrpo", "prp", "sgt"):
    peers = [peer[key] for peer in panel["peers"]]
    x = [place["growth"] for place in peers]
    y = [place["variance"] for place in peers]
    color = COLORS[key]
    dashed = key == "prp_clipped"
    style = (0, (2, 1.5)) if dashed else "-"
    axes.plot(x, y, color=color, linewidth=1.1 if dashed else 1.9, ls=style)
    axes.plot(x[0], y[0], color=color, **MARKS["twin"])
    axes.plot(x[-1], y[-1], color=color, **MARKS["specialist"])
    _label(axes, panel["solved"], key, (x[-1], y[-1]))
  plain = (panel["grpo"]["growth"], panel["grpo"]["variance"])
  axes.plot(*plain, "D", color=COLORS["grpo"], markersize=6)
  _label(axes, panel["solved"], "grpo", plain)
  axes.set_yscale("log")
  axes.set_title(
    f"Learner right in {panel['solved']:.0%} of its attempts",
    loc="left",
    fontsize=11,
    color=plots.INK,
  )
  axes.margins(0.08, 0.1)
  axes.grid(color="#E6E6E6", linewidth=0.8)
  axes.set_axisbelow(True)
  axes.spines[["top", "right", "left"]].set_visible(False)
  axes.spines["bottom"].set_color("#B0B0B0")
  axes.tick_params(length=0, colors="#555555", which="both")


def _label(axes, solved, key, place):
  """Writes a probe's name beside `place`, where it hides nothing."""
  text, offset = LABELS[key], OFFSETS[key]
  if solved == max(SOLVED) and key in ("xgrpo", "sgt"):
    return  # they lie on GRPO
  if solved == max(SOLVED) and key == "grpo":
    text, offset = "GRPO, XGRPO, SGT", (9, 5)
  axes.annotate(
    text,
    place,
    xytext=offset,
    textcoords="offset points",
    ha="right" if offset[0] < 0 else "left",
    color=COLORS[key],
    fontsize=10,
    fontweight="bold",
  )


def main(arguments: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    prog="python -m experiments.studies.bandit",
    description=__doc__.partition("\n")[0],
    allow_abbrev=False,
  )
  parser.add_argument(
    "--out", default=".", help="directory for bandit.json and bandit.png"
  )
  out = pathlib.Path(parser.parse_args(arguments).out)
  out.mkdir(parents=True, exist_ok=True)
  found = {"statements": statements(), "panels": panels()}
  (out / "bandit.json").write_text(json.dumps(found, indent=1) + "\n")
  draw(found["panels"], out / "bandit.png")
  for name in ("bandit.json", "bandit.png"):
    print(out / name)


if __name__ == "__main__":
  main()
