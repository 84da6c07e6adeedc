"""Which quantities of a run the plots show, one small panel each."""

from typing import NamedTuple


class Panel(NamedTuple):
  """What one panel shows."""

  title: str
  unit: str  # of the vertical axis
  keys: str  # pattern of the metrics drawn, one kind of dash for each
  limits: tuple[float | None, float | None] = (None, None)


PANELS = (
  Panel("Reward", "mean per completion", r"reward"),
  Panel("Solved", "share of prompts", r"pass@\d+", (0, 1)),
  Panel("Completion length", "tokens", r"length", (0, None)),
  Panel("Entropy", "nats per token", r"entropy", (0, None)),
  Panel("KL to the sampling policy", "nats per token (k3)", r"kl"),
  Panel("KL to the reference", "nats per token (k3)", r"ref_kl"),
  Panel("Clipped", "share of tokens", r"clip_(low|high)", (0, None)),
  Panel("Effective sample size", "share of tokens", r"ess", (None, 1)),
  Panel("Largest log-ratio", "nats", r"log_ratio_max", (0, None)),
  Panel("Gradient norm", "L2, before clipping", r"grad_norm", (0, None)),
  Panel("Loss", "objective", r"loss"),
  Panel("Vetoed", "share of tokens, of rows", r"veto(_rows)?", (0, None)),
  Panel("Staleness", "updates since generation", r"staleness", (0, None)),
  Panel("Groups without signal", "share of groups", r"degenerate", (0, 1)),
  Panel("Truncated", "share of completions", r"truncated", (0, 1)),
  Panel("Unscored", "completions per round", r"unscored", (0, None)),
  Panel("Skipped updates", "since the start", r"skipped", (0, None)),
  Panel("Weights of peers' chunks", "chi-square", r"peer/chi2", (0, None)),
  Panel(
    "Peers' chunks that are not one to one", "share", r"peer/split", (0, 1)
  ),
  Panel(
    "Exchange", "records per round", r"exchange/(admitted|refused)", (0, None)
  ),
  Panel(
    "Rescue set", "share of prompts", r"rescue/(share|expected)", (0, None)
  ),
  Panel("Rescued answers", "nats per token", r"rescue/nll", (0, None)),
  Panel("Novelty of right answers", "cosine distance", r"explore/novelty"),
  Panel(
    "Groups all right or all wrong", "share", r"all_(correct|wrong)", (0, 1)
  ),
  Panel("Distinct right answers", "per solved prompt", r"distinct", (0, None)),
  Panel(
    "Continued prefixes against their parents",
    "pass rate",
    r"explore/(parent|regenerated)_pass",
    (0, None),
  ),
  Panel("Prefixes that wait", "in the queue", r"explore/queue", (0, None)),
  Panel("Baseline moved by peers", "reward", r"values/shift(_size)?"),
)
# Panels that say something only when they are not 0 throughout.
WHEN_NOT_ZERO = (
  "unscored",
  "skipped",
  "truncated",
  "veto",
  "veto_rows",
  "staleness",
)
