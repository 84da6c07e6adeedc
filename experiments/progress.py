"""What the terminal shows while a run goes on, and the table at its end.

On a terminal the display is one small live panel: the round, the phase now
running, one row per policy, and the time left. Anywhere else (a file, a pipe,
a batch job) it is one plain line per round, which greps well. The time left
comes from the rounds measured by this process, without its first one, which
compiles.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

import rich.box
import rich.console
import rich.live
import rich.progress_bar
import rich.table
import rich.text

MODES = ("auto", "live", "plain", "none")
RECENT = 20  # rounds that the estimate of the time left looks back on

# Key of a policy's values, title of its column, how a number is written.
COLUMNS: tuple[tuple[str, str, str], ...] = (
  ("reward", "reward", ".3f"),
  ("pass@1", "pass@1", ".3f"),
  ("length", "length", ".1f"),
  ("entropy", "entropy", ".3f"),
  ("tokens_per_second", "tokens/s", ",.0f"),
  ("exchange/published", "offered", ",.0f"),
  ("exchange/admitted", "admitted", ",.0f"),
  ("exchange/refused", "refused", ",.0f"),
  ("rescue/used", "rescued", ".0f"),
  ("unscored", "unscored", ".0f"),
  ("dropped_prompts", "dropped", ".0f"),
  ("skipped", "skipped", ".0f"),
)
# Counts that are worth a word only when they are not 0: completions without
# a verdict, prompts over the length limit, updates that were not finite.
QUIET = ("unscored", "dropped_prompts", "skipped")
# And those of policies that listen to their peers: summed over the run at
# its end. What was offered are the records of the shipments that were read.
EXCHANGE = (
  ("exchange/published", "offered"),
  ("exchange/admitted", "admitted"),
  ("exchange/refused", "refused"),
  ("rescue/used", "rescued"),
)


class Eta:
  """Seconds left, from the mean of recent rounds after the first."""

  def __init__(self, total_rounds: int) -> None:
    self._total = total_rounds
    self._seconds: list[float] = []
    self._last: float | None = None

  def start(self, now: float) -> None:
    self._last = now

  def round(self, now: float) -> float:
    """Ends a round; returns its seconds."""
    seconds = 0.0 if self._last is None else now - self._last
    self._last = now
    self._seconds.append(seconds)
    return seconds

  def left(self, done: int) -> float | None:
    """Returns None until a round other than the first was measured."""
    measured = self._seconds[1:][-RECENT:]
    if done >= self._total:
      return 0.0
    if not measured:
      return None
    return (self._total - done) * sum(measured) / len(measured)


class Progress:
  """Shows a run; a context manager.

  Args:
    total_rounds: Rounds of the whole run, those before a resume included.
    policies: Their names, in the order to show them.
    mode: "auto" (live on a terminal, else plain), "live", "plain" or "none".
    start: Rounds already done when this process began.
    clock: Seconds, from anywhere.
    file: Where to write.

  Raises:
    ValueError: An unknown mode.
  """

  def __init__(
    self,
    total_rounds: int,
    policies: Sequence[str],
    mode: str = "auto",
    *,
    start: int = 0,
    clock: Callable[[], float] = time.monotonic,
    file: TextIO | None = None,
  ) -> None:
    if mode not in MODES:
      raise ValueError(f"progress: {mode!r}: allowed are {', '.join(MODES)}.")
    self._file = sys.stdout if file is None else file
    self._mode = screen(self._file) if mode == "auto" else mode
    self._total = total_rounds
    self._done = start
    self._clock = clock
    self._eta = Eta(total_rounds)
    self._phase = ("", "starting")
    self._phase_start = clock()
    self._values: dict[str, Mapping[str, Any]] = {p: {} for p in policies}
    self._live: rich.live.Live | None = None

  def __enter__(self) -> "Progress":
    self._eta.start(self._clock())
    if self._mode == "live":
      self._live = rich.live.Live(
        console=rich.console.Console(file=self._file),
        get_renderable=self._panel,
        refresh_per_second=4,
      )
      self._live.start()
    return self

  def __exit__(self, *exception: object) -> None:
    if self._live is not None:
      self._phase = ("", "stopped" if self._done < self._total else "done")
      self._phase_start = self._clock()
      self._live.stop()
      self._live = None

  def phase(self, policy: str, name: str) -> None:
    """Names what runs now, such as "generate"; "" for no single policy."""
    self._phase = (policy, name)
    self._phase_start = self._clock()

  def round(self, round: int, values: Mapping[str, Mapping[str, Any]]) -> None:
    """Ends round `round` (counted from 0) with each policy's numbers."""
    seconds = self._eta.round(self._clock())
    self._done = round + 1
    self._values.update(values)
    if self._mode == "plain":
      self._print(self._line(values, seconds))

  def message(self, text: str) -> None:
    """Prints a line above the live panel, or in its turn."""
    if self._live is not None:
      self._live.console.print(rich.text.Text(text))
    elif self._mode != "none":
      self._print(text)

  def _print(self, text: str) -> None:
    print(text, file=self._file, flush=True)

  def _line(
    self, values: Mapping[str, Mapping[str, Any]], seconds: float
  ) -> str:
    width = len(str(self._total))
    parts = [f"round {self._done:{width}d}/{self._total}"]
    for policy, row in values.items():
      words = [f"{policy}:"]
      for key, title, form in COLUMNS:
        if row.get(key) is not None and (key not in QUIET or row[key]):
          words.append(f"{title} {row[key]:{form}}")
      parts.append(" ".join(words))
    eta = duration(self._eta.left(self._done))
    parts.append(f"{seconds:.1f} s, left {eta}")
    return " | ".join(parts)

  def _panel(self) -> rich.console.RenderableType:
    columns = [c for c in COLUMNS if self._shown(c[0])]
    table = rich.table.Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("policy")
    for _, title, _ in columns:
      table.add_column(title, justify="right")
    for policy, row in self._values.items():
      cells = [cell(row.get(key), form) for key, _, form in columns]
      table.add_row(rich.text.Text(policy, style="bold"), *cells)
    head = rich.table.Table.grid(padding=(0, 2, 0, 0))
    bar = rich.progress_bar.ProgressBar(
      total=max(self._total, 1), completed=self._done, width=24
    )
    policy, name = self._phase
    phase = f"{policy} {name}".strip()
    seconds = self._clock() - self._phase_start
    head.add_row(
      f"round {self._done}/{self._total}",
      bar,
      f"left {duration(self._eta.left(self._done))}",
      rich.text.Text(f"{phase} {seconds:.0f} s", style="cyan"),
    )
    return rich.console.Group(head, table)

  def _shown(self, key: str) -> bool:
    found = [row.get(key) for row in self._values.values()]
    if key in QUIET:
      return any(found)
    return key not in dict(EXCHANGE) or any(x is not None for x in found)


def duration(seconds: float | None) -> str:
  """Writes 3 seconds as 0:03 and 3700 as 1:01:40; None as --."""
  if seconds is None:
    return "--"
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f"{hours}:{minutes:02d}:{rest:02d}"
  return f"{minutes}:{rest:02d}"


def screen(file: TextIO) -> str:
  """The display that suits a file: "live" on a terminal, else "plain"."""
  smart = os.environ.get("TERM", "dumb") != "dumb"
  return "live" if file.isatty() and smart else "plain"


def cell(value: float | None, form: str) -> str:
  """A number in a table; a dash where there is none."""
  return "-" if value is None else f"{value:{form}}"
