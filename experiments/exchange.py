"""Reads what the policies of a run told each other, and what came of it.

    python -m experiments.exchange show WORKDIR [--policy=NAME] [--round=-1]
        [--records] [--kind=success] [--n=10]

Shows, for each receiver and each of its peers, how many records were
published, admitted and used, and why the others were not; then what lies in
the exchange that no receiver looked at. With --records it shows the last `n`
records that match, whole. A negative round counts from the end of the run.
"""

import argparse
import collections
import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TextIO

import rich.box
import rich.console
import rich.panel
import rich.table
import rich.text

from experiments import rollouts, stores
from mrl_jax import records as records_lib
from mrl_jax.exchange import codec
from mrl_jax.exchange import store as store_lib

SUMS = ("published", "admitted", "used")
FIELDS = {"round": int, "policy": str, "peer": str, "refused": dict}
FIELDS |= dict.fromkeys(SUMS, int)  # of a decision


class Share(NamedTuple):
  """What one receiver made of one peer's records, over rounds."""

  receiver: str
  peer: str
  rounds: int
  published: int
  admitted: int
  used: int
  refused: dict[str, int]  # by reason, most frequent first


class Exchange(NamedTuple):
  """What a workdir holds of an exchange."""

  decisions: list[dict[str, Any]]  # one per round, receiver and peer
  store: store_lib.Directory
  places: list[tuple[int, str]]  # round and policy of each shipment
  rounds: int  # that there were


def read(workdir: str | os.PathLike[str]) -> Exchange:
  """Reads the decisions and lists the shipments.

  Raises:
    ValueError: There was no exchange, or the decisions cannot be read.
  """
  path = pathlib.Path(workdir) / "exchange.jsonl"
  folder = stores.folder(pathlib.Path(workdir))
  if not path.exists() and not folder.exists():
    raise ValueError(
      f"{path}: no such file; is {workdir} the workdir of a run whose "
      "policies exchange records?"
    )
  decisions = list(_decisions(path)) if path.exists() else []
  store = store_lib.Directory(folder)
  places = sorted((r, p) for p in store.policies() for r in store.rounds(p))
  rounds = [decision["round"] for decision in decisions]
  rounds += [number for number, _ in places]
  return Exchange(decisions, store, places, max(rounds, default=-1) + 1)


def shares(
  exchange: Exchange, *, policy: str | None = None, round: int | None = None
) -> list[Share]:
  """Adds up the decisions by receiver and peer; `policy` is either."""
  round = _absolute(exchange, round)
  groups = collections.defaultdict(list)
  for decision in exchange.decisions:
    names = decision["policy"], decision["peer"]
    if policy in (None, *names) and round in (None, decision["round"]):
      groups[names].append(decision)
  found = []
  for (receiver, peer), group in groups.items():
    refused = collections.Counter()
    for decision in group:
      for reason, names in decision["refused"].items():
        refused[reason] += len(names)
    sums = (sum(d[k] for d in group) for k in SUMS)
    reasons = dict(refused.most_common())
    found.append(Share(receiver, peer, len(group), *sums, reasons))
  return found


def unread(
  exchange: Exchange, *, policy: str | None = None, round: int | None = None
) -> list[tuple[int, str, str]]:
  """Shipments that no receiver has read: round, policy and why."""
  round = _absolute(exchange, round)
  named, looked = set(), set()
  for decision in exchange.decisions:
    place = decision["round"], decision["peer"]
    named.add(place)
    if not {"late", "gone"} & decision["refused"].keys():
      looked.add(place)
  return [
    (*place, "too late" if place in named else "no decision names it")
    for place in exchange.places
    if place not in looked
    and round in (None, place[0])
    and policy in (None, place[1])
  ]


def select(
  exchange: Exchange,
  *,
  policy: str | None = None,
  round: int | None = None,
  kind: str | None = None,
  n: int = 10,
) -> tuple[list[records_lib.Record], list[str]]:
  """The last `n` records that match, and what is damaged where they lie.

  Raises:
    ValueError: Nothing matches; says what there is.
  """
  if n < 1:
    raise ValueError(f"n: {n}: at least 1 is needed.")
  round = _absolute(exchange, round)
  found, damaged = collections.deque(), []
  for number, name in reversed(exchange.places):
    if len(found) >= n:
      break
    if policy not in (None, name) or round not in (None, number):
      continue
    shipment = _shipment(exchange.store, name, number)
    for reason, record in shipment.refused:
      place = f"{name}, round {number}" + (f", {record}" if record else "")
      damaged.append(f"{place}: {reason}")
    matching = [r for r in shipment.records if kind in (None, r.header.kind)]
    found.extendleft(reversed(matching[-(n - len(found)) :]))
  if not found and not damaged:
    raise ValueError(_nothing(exchange, policy=policy, round=round, kind=kind))
  return list(found), damaged


def show_shares(
  found: Sequence[Share], lost: Sequence[tuple[int, str, str]], file: TextIO
) -> None:
  """Prints the table of `shares` and the list of `unread`."""
  console = rich.console.Console(file=file, highlight=False)
  table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
  for name in ("receiver", "peer", "rounds", *SUMS, "share", "refused"):
    numbers = name in ("rounds", *SUMS, "share")
    table.add_column(name, justify="right" if numbers else "left")
  for row in found:
    reasons = "\n".join(f"{count} {why}" for why, count in row.refused.items())
    share = f"{row.used / row.published:.1%}" if row.published else "-"
    numbers = (row.rounds, row.published, row.admitted, row.used, share)
    cells = (row.receiver, row.peer, *map(str, numbers), reasons)
    table.add_row(*(_text(cell) for cell in cells))
  console.print(table if found else "No receiver has decided anything.")
  if lost:
    console.print("Published, but never read:")
    for number, policy, why in lost:
      console.print(_text(f"  {policy}, round {number}: {why}"))


def show_records(
  exchange: Exchange,
  found: Sequence[records_lib.Record],
  damaged: Sequence[str],
  file: TextIO,
) -> None:
  """Prints one panel per record, and a line for each that is damaged."""
  console = rich.console.Console(file=file, highlight=False)
  refused = _refused(exchange)
  for record in found:
    reasons = refused.get((record.header.policy, record.header.id), ())
    body = _text(_body(record))
    for who, why in reasons:
      body.append("\n").append(_text(f"refused by {who}: {why}"))
    console.print(
      rich.panel.Panel(
        body,
        title=_text(record.header.id),
        title_align="left",
        subtitle=_text(" · ".join(_facts(record))),
        subtitle_align="left",
        border_style="yellow" if reasons else "green",
      )
    )
  for line in damaged:
    console.print(_text(line), style="red")


def _decisions(path: pathlib.Path) -> Iterator[dict[str, Any]]:
  for number, decision in enumerate(rollouts.records_in(path), start=1):
    found = decision if isinstance(decision, dict) else {}
    for name, kind in FIELDS.items():
      if not isinstance(found.get(name), kind):
        raise ValueError(f"{path}:{number}: {name}: must be {kind.__name__}.")
    yield decision


def _shipment(store, policy: str, round: int) -> codec.Shipment:
  with contextlib.suppress(OSError):
    data = store.get(policy, round)
    if data is not None:
      return codec.unpack(data)
  return codec.Shipment((), (("gone", ""),))


def _refused(exchange: Exchange) -> dict[tuple[str, str], list]:
  """Receiver and reason of each refusal, by peer and record."""
  found = collections.defaultdict(list)
  for decision in exchange.decisions:
    for reason, names in decision["refused"].items():
      for name in names:
        found[decision["peer"], name].append((decision["policy"], reason))
  return found


def _absolute(exchange: Exchange, round: int | None) -> int | None:
  return round if round is None or round >= 0 else exchange.rounds + round


def _nothing(exchange: Exchange, **wanted: str | int | None) -> str:
  if not exchange.places:
    return "exchange: no records were kept; the run's store was its memory."
  parts = [f"{k} {v!r}" for k, v in wanted.items() if v is not None]
  names = ", ".join(sorted({name for _, name in exchange.places}))
  return (
    f"no record has {' and '.join(parts)} (there are rounds "
    f"{exchange.places[0][0]} to {exchange.places[-1][0]} of {names}; kinds "
    f"are {', '.join(records_lib.KINDS)})."
  )


def _body(record: records_lib.Record) -> str:
  if isinstance(record, records_lib.Values):
    mean = record.total / record.count if record.count else float("nan")
    return (
      f"{record.count} completions, mean reward {mean:.3g} "
      f"(sum {record.total:g}, of squares {record.square:g})"
    )
  return record.text


def _facts(record: records_lib.Record) -> list[str]:
  facts = [f"step {record.header.version}"]
  if isinstance(record, records_lib.Success):
    facts.append(f"verified by {record.header.verifier}")
  if isinstance(record, records_lib.Trajectory):
    known = record.reward == record.reward
    facts.append(f"reward {record.reward:g}" if known else "no reward")
    facts.append("verified" if record.success else "not verified")
    facts.append(f"{len(record.tokens)} tokens")
    if len(record.logprobs):
      facts.append(f"log-prob {record.logprobs.mean():.3f}")
    facts.append(f"finish {'stop' if record.finished else 'length'}")
  return facts


def _text(words: str) -> rich.text.Text:
  """Shows what a peer wrote; a terminal must not obey it."""
  return rich.text.Text(rollouts.visible(words))


def main(arguments: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    prog="python -m experiments.exchange",
    description="Reads what the policies of a run told each other.",
  )
  commands = parser.add_subparsers(dest="command", required=True)
  what = "what was published, admitted, used and refused"
  show = commands.add_parser("show", help=what, description=f"Shows {what}.")
  add = show.add_argument
  add("workdir")
  add("--policy", help="receiver or peer; of records, who published them")
  add("--round", type=int, help="-1 is the last one; default: all")
  add("--records", action="store_true", help="show records too")
  add("--kind", choices=records_lib.KINDS, help="of the records to show")
  add("--n", type=int, help="records to show; default: 10")
  options = parser.parse_args(arguments)
  where = {"policy": options.policy, "round": options.round}
  try:
    exchange = read(options.workdir)
    _check_policy(exchange, options.policy)
    table, lost = shares(exchange, **where), unread(exchange, **where)
    found = None
    if options.records or options.kind is not None or options.n is not None:
      n = 10 if options.n is None else options.n
      found = select(exchange, **where, kind=options.kind, n=n)
  except (OSError, ValueError) as error:
    show.error(" ".join(str(error).split()))
  show_shares(table, lost, sys.stdout)
  if found is not None:
    show_records(exchange, *found, sys.stdout)


def _check_policy(exchange: Exchange, policy: str | None) -> None:
  known = {d[k] for d in exchange.decisions for k in ("policy", "peer")}
  known |= {name for _, name in exchange.places}
  if policy is not None and policy not in known:
    names = ", ".join(sorted(known)) or "none"
    raise ValueError(f"policy: {policy!r}: there are {names}.")


if __name__ == "__main__":
  main()
