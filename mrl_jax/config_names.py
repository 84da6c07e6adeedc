"""The names that fields of a `Config` may have as values."""

RECIPES = (  # joined by +
  *("grpo", "dr_grpo", "prp", "xgrpo", "sgt"),
  *("novelty", "regenerate", "extra", "merla"),
)
PRP_MODES = ("behavior", "decoupled", "recompute")
SPREADS = ("bytes", "chunk")
POOLS = ("all", "correct")
PLACES = ("after", "before")
CHOICES = ("lowest", "highest", "random", "restart")
BOUNDARIES = ("lines", "tokens")
SHAPINGS = ("token", "sequence", "bounded")
RESCUE_MEANS = ("tokens", "prompts")
EXECUTORS = ("inline", "partition")
LOSSES = ("policy_gradient", "gspo", "cispo", "reinforce")
REDUCTIONS = ("token_mean", "sequence_mean", "constant_mean")
DENOMINATORS = ("original", "kept")
PROCESSES = ("none", "return", "to_go")
KLS = ("k1", "k2", "k3")
LR_SCHEDULES = ("constant", "linear", "cosine")
DTYPES = ("float32", "bfloat16")
ATTENTIONS = ("auto", "plain", "pallas", "interpret")
REMATS = ("none", "dots", "attention", "full")
FORMATS = ("auto", "chat", "raw")
PROGRESS = ("auto", "live", "plain", "none")
CORRECTIONS = (
  "none",
  "tis_token",
  "tis_sequence",
  "mis_token",
  "mis_sequence",
  "icepop",
  "response_veto",
  "opsm",
  "m2po",
)
VETOES = (
  "none",
  "suffix",
  "cumulative",
  "two_sided",
  "high_ratio",
  "response",
  "both_signs",
  "token",
)
