"""The fields of a `Config` that belong to the methods and to the machine.

They are fields like all others, in the same flat record: `config.py` adds
the run, the task, the loss and the optimiser. Each carries its help text and,
where it is a name, the allowed names.
"""

import dataclasses
from typing import Any

from mrl_jax import config_names as allowed


def field(default: Any, doc: str, names: tuple[str, ...] | None = None) -> Any:
  """A field with its help text and the names that it may have."""
  metadata = {"help": doc, "names": names}
  return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Methods:
  """What policies exchange, how they explore, how rewards are shaped."""

  exchange: str = field(
    "",
    "Where policies exchange records: a folder or bucket, or memory; "
    "default: exchange/ in --workdir. Made only if a recipe listens.",
  )
  staleness: int = field(
    0, "Rounds that a peer's record may be old; 0: this round's only."
  )
  deadline: float = field(
    600.0, "Seconds that a round waits for peers that are late."
  )
  prp_mode: str = field(
    "behavior",
    "What PRP weighs a peer's token against: the peer (behavior), this "
    "policy under the chunk's weight (decoupled), or without (recompute).",
    allowed.PRP_MODES,
  )
  peer_samples: int = field(
    0, "The peers' rollouts per prompt in PRP; 0: as many as own ones."
  )
  peer_dual_clip: float = field(
    3.0, "Bound on the loss of the peers' negative rows, as a ratio."
  )
  peer_cap: float = field(2.0, "Cap of the chunk weights of decoupled PRP.")
  spread: str = field(
    "bytes",
    "How a source token's log-prob is shared: over its bytes or its chunk.",
    allowed.SPREADS,
  )
  xgrpo_mix: float = field(
    -1.0, "The peers' share of XGRPO's baseline; -1: that of the union."
  )
  rescue_weight: float = field(
    0.1, "Weight of the log-likelihood of a peer's success in SGT."
  )
  rescue_mean: str = field(
    "tokens",
    "Over what that is a mean: the rescue tokens, or all prompts.",
    allowed.RESCUE_MEANS,
  )
  rescue_samples: int = field(1, "Successes imitated per rescued prompt.")

  embedder: str = field(
    "policy",
    "What compares answers: policy (its initial hidden states), minilm, or "
    "the folder of a sentence-transformers model.",
  )
  novelty_weight: float = field(
    0.1, "What a right answer's novelty adds to its advantage."
  )
  novelty_memory: int = field(
    0,
    "Answers that a prompt remembers; 0: samples, the least.",
  )
  novelty_pool: str = field(
    "all", "Which answers are remembered and compared with.", allowed.POOLS
  )
  novelty_place: str = field(
    "after",
    "after or before (in the reward) a group is normalised.",
    allowed.PLACES,
  )
  novelty_prompts: int = field(65536, "Prompts that are remembered at most.")
  regenerate: str = field(
    "lowest",
    "Where a hard prompt's answer is cut: where the smoothed entropy before "
    "is lowest; highest or random; restart: not at all, the prompt again.",
    allowed.CHOICES,
  )
  regenerate_slots: int = field(
    16, "Groups of a round that continue such a prefix, at most."
  )
  regenerate_warmup: int = field(30, "Rounds before the first of them.")
  regenerate_boundary: str = field(
    "lines",
    "An answer is cut after lines, or after any tokens.",
    allowed.BOUNDARIES,
  )
  regenerate_gap: int = field(32, "Least tokens between two cuts.")
  regenerate_cuts: int = field(15, "Most cuts considered in an answer.")
  regenerate_cap: float = field(0.75, "Most of an answer that is kept.")
  regenerate_temperature: float = field(
    0.1, "Of the smoothing of entropies over similar prefixes."
  )
  regenerate_queue: int = field(512, "Prefixes that wait, at most.")
  regenerate_depth: int = field(
    3, "Times that an answer is cut again while its prompt stays hard."
  )

  potential: tuple[str, ...] = field(
    (), "Folders of experiments.meta_train, per policy; none: has none."
  )
  shaping: str = field(
    "token",
    "Where it works: as a baseline of tokens, on the reward, or there bounded.",
    allowed.SHAPINGS,
  )
  shaping_alpha: float = field(0.3, "Weight of the potential.")
  shaping_gap: float = field(1.0, "Least gap below the best reward (bounded).")
  shaping_decay: float = field(0.9, "Of the mean deviation of past groups ...")
  shaping_scale: float = field(0.5, "... which is this at first (token).")


@dataclasses.dataclass(frozen=True)
class Machine:
  """Where a run runs: devices, processes, and what each computes."""

  attention: str = field(
    "auto",
    "plain, or the kernels for TPUs: pallas (interpret: on a CPU, slowly); "
    "auto: pallas on a TPU.",
    allowed.ATTENTIONS,
  )
  compilation_cache: str = field(
    "auto",
    "Folder or URL of compiled programs; auto: $JAX_COMPILATION_CACHE_DIR, or "
    "in the user's cache; none.",
  )
  coordinator: str = field(
    "",
    "One run over several processes: HOST:PORT of the first; auto: a TPU pod "
    "knows.",
  )
  processes: int = field(0, "How many they are, with --coordinator=HOST:PORT.")
  process_id: int = field(-1, "Which of them this is, from 0.")
  bucket: str = field(
    "",
    "A folder or URL (gs://...) that holds the checkpoints and a copy of "
    "--workdir: a new machine goes on from there.",
  )
  mesh: tuple[int, ...] = field(
    (-1, 1, 1), "Devices along data,fsdp,tensor; -1: all that remain."
  )
  executor: str = field(
    "inline",
    "inline: policies take turns; partition: a thread each, on its own "
    "devices.",
    allowed.EXECUTORS,
  )
  shares: tuple[int, ...] = field(
    (),
    "Devices of each policy; default: all for each where they take turns, "
    "else equal shares.",
  )
  offload: bool = field(
    False, "Keep the idle policies' states in host memory (inline)."
  )
  replan_every: int = field(
    0, "Rounds between new shares from measured times (partition); 0: never."
  )
  cpu_devices: int = field(0, "Emulate this many CPU devices; 0: off.")
