"""`python -m experiments.exchange show`: what was said, and what came of it."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from experiments import exchange
from mrl_jax import records
from mrl_jax.exchange import codec
from mrl_jax.exchange import store as store_lib


def header(kind, round, policy, prompt, sample):
  return records.Header(
    id=codec.record_id(kind, round, policy, prompt, sample),
    kind=kind,
    schema=records.SCHEMA,
    round=round,
    policy=policy,
    version=4 * round,
    prompt_id=prompt,
    prompt_hash="0",
    tokenizer="t0",
    verifier="exact",
  )


def shipment(policy, round, text="[b]ok[/b]\x1b[2J"):
  return codec.pack(
    policy,
    round,
    [
      records.Values(header("values", round, policy, "p0", 0), 4, 2.0, 2.0),
      records.Success(header("success", round, policy, "p0", 1), text),
      records.Trajectory(
        header("trajectory", round, policy, "p0", 0),
        "7",
        np.array([5, 0], np.int32),
        np.array([1, 1], np.int32),
        np.array([-0.5, -1.0], np.float32),
        math.nan,
        False,
        True,
      ),
    ],
  )


def decision(round, receiver, peer, admitted=3, used=1, **refused):
  published = 0 if "late" in refused else 3
  return {
    "round": round,
    "policy": receiver,
    "peer": peer,
    "published": published,
    "admitted": admitted if published else 0,
    "used": used if published else 0,
    "refused": refused,
  }


@pytest.fixture
def run(tmp_path, monkeypatch):
  monkeypatch.setitem(os.environ, "COLUMNS", "100")
  store = store_lib.Directory(tmp_path / "exchange")
  for round in range(4):
    for policy in ("char", "merged"):
      store.put(policy, round, shipment(policy, round))
  name = header("success", 2, "char", "p0", 1).id
  lines = [
    decision(0, "char", "merged"),
    decision(0, "merged", "char"),
    decision(1, "char", "merged", late=[""]),
    decision(1, "merged", "char", used=2),
    decision(2, "char", "merged"),
    decision(2, "merged", "char", admitted=2, changed=[name], odd=["x", "y"]),
  ]
  text = "".join(json.dumps(line) + "\n" for line in lines)
  (tmp_path / "exchange.jsonl").write_text(text)
  return tmp_path


def shown(capsys, run, *flags):
  exchange.main(["show", str(run), *flags])
  return capsys.readouterr().out


def test_decisions_add_up_by_receiver_and_peer(run):
  found = exchange.shares(exchange.read(run))
  assert found == [
    exchange.Share("char", "merged", 3, 6, 6, 2, {"late": 1}),
    exchange.Share("merged", "char", 3, 9, 8, 4, {"odd": 2, "changed": 1}),
  ]


def test_filters_of_the_table(run):
  read = exchange.read(run)
  assert exchange.shares(read, round=-2) == exchange.shares(read, round=2)
  assert [s.published for s in exchange.shares(read, round=1)] == [0, 3]
  assert exchange.shares(read, round=-1) == []  # published, not decided yet
  assert len(exchange.shares(read, policy="char")) == 2


def test_what_nobody_read_is_listed(run):
  read = exchange.read(run)
  assert exchange.unread(read) == [
    (1, "merged", "too late"),
    (3, "char", "no decision names it"),
    (3, "merged", "no decision names it"),
  ]
  assert exchange.unread(read, policy="merged", round=1) == [
    (1, "merged", "too late")
  ]
  late = json.dumps(decision(1, "third", "merged"))
  with open(run / "exchange.jsonl", "a") as file:
    file.write(late + "\n")
  assert len(exchange.unread(exchange.read(run))) == 2  # one did read it


def test_the_table(run, capsys):
  out = shown(capsys, run)
  rows = [line.split() for line in out.splitlines()]
  assert ["char", "merged", "3", "6", "6", "2", "33.3%", "1", "late"] in rows
  assert ["merged", "char", "3", "9", "8", "4", "44.4%", "2", "odd"] in rows
  assert ["1", "changed"] in rows
  assert "merged, round 1: too late" in out
  assert "char, round 3: no decision names it" in out
  assert "success/" not in out


def test_records_are_shown_whole_with_why_they_were_refused(run, capsys):
  out = shown(capsys, run, "--records", "--policy=char", "--round=2")
  assert "trajectory/2/char/p0/0" in out and "values/2/char/p0/0" in out
  assert r"[b]ok[/b]\x1b[2J" in out and "\x1b" not in out
  assert "refused by merged: changed" in out
  assert "verified by exact" in out
  assert "4 completions, mean reward 0.5 (sum 2, of squares 2)" in out
  facts = "no reward · not verified · 2 tokens · log-prob -0.750 · finish stop"
  assert f"step 8 · {facts}" in out
  assert out.count("refused by") == 1


def test_the_last_records_that_match(run):
  read = exchange.read(run)
  found, damaged = exchange.select(read, n=4)
  assert [r.header.id.split("/")[:3] for r in found] == [
    ["trajectory", "3", "char"],
    ["values", "3", "merged"],
    ["success", "3", "merged"],
    ["trajectory", "3", "merged"],
  ]
  assert damaged == []
  found, _ = exchange.select(read, kind="success", policy="char", n=3)
  assert [r.header.round for r in found] == [1, 2, 3]
  assert len(exchange.select(read, n=1000)[0]) == 24


def test_kind_or_n_ask_for_records(run, capsys):
  assert shown(capsys, run, "--kind=success").count("success/") == 8
  assert shown(capsys, run, "--n=2").count("/p0/") == 2


def test_damaged_shipments_are_named(run, capsys):
  path = run / "exchange" / "char" / "000003.jsonl"
  data = path.read_bytes()
  path.write_bytes(data.replace(b'"7"', b'"8"'))
  out = shown(capsys, run, "--records", "--round=3")
  assert "char, round 3, line 3: corrupt" in out
  path.write_bytes(data[:-1])
  out = shown(capsys, run, "--records", "--round=3")
  assert "char, round 3: truncated" in out and out.count("/char/") == 2
  path.unlink()
  path.mkdir()
  assert "char, round 3: gone" in shown(capsys, run, "--records")


def test_a_run_that_was_killed_in_its_first_round(run, capsys):
  (run / "exchange.jsonl").unlink()
  out = shown(capsys, run)
  assert "No receiver has decided anything" in out
  assert out.count("no decision names it") == 8
  (run / "exchange.jsonl").write_text(json.dumps(decision(0, "a", "b")))
  assert "No receiver" in shown(capsys, run)  # a line that is half written


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (["--policy=chat"], "policy: 'chat': there are char, merged"),
    (["--n=0"], "n: 0: at least 1"),
    (["--records", "--round=9"], "no record has round 9 (there are rounds 0"),
    (["--kind=rumour"], "invalid choice: 'rumour'"),
    (["--round=last"], "invalid int value: 'last'"),
    (["--recrods"], "unrecognized arguments: --recrods"),
  ],
)
def test_a_mistake_is_one_line(run, capsys, flags, message):
  with pytest.raises(SystemExit) as stop:
    exchange.main(["show", str(run), *flags])
  captured = capsys.readouterr()
  assert stop.value.code == 2 and captured.out == ""
  assert message in captured.err.splitlines()[-1]


def test_a_folder_without_an_exchange(tmp_path, capsys):
  with pytest.raises(SystemExit):
    exchange.main(["show", str(tmp_path)])
  assert "exchange.jsonl: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("{]", "exchange.jsonl:2: not JSON"),
    ("[]", "exchange.jsonl:2: round: must be int"),
    ('{"round": "3"}', "exchange.jsonl:2: round: must be int"),
    ('{"round": 3, "policy": "a", "peer": 1}', "peer: must be str"),
  ],
)
def test_decisions_that_cannot_be_read(tmp_path, capsys, line, message):
  text = json.dumps(decision(0, "a", "b")) + "\n" + line + "\n"
  (tmp_path / "exchange.jsonl").write_text(text)
  with pytest.raises(SystemExit):
    exchange.main(["show", str(tmp_path)])
  assert message in capsys.readouterr().err


def test_a_run_that_kept_no_records(tmp_path, capsys):
  line = json.dumps(decision(0, "char", "merged"))
  (tmp_path / "exchange.jsonl").write_text(line + "\n")
  assert "33.3%" in shown(capsys, tmp_path)
  with pytest.raises(SystemExit):
    exchange.main(["show", str(tmp_path), "--records"])
  assert "no records were kept" in capsys.readouterr().err


def test_as_a_command(run):
  command = [sys.executable, "-m", "experiments.exchange", "show"]
  done = subprocess.run(
    [*command, str(run)], capture_output=True, text=True, check=True
  )
  assert "44.4%" in done.stdout
  help = subprocess.run([*command, "--help"], capture_output=True, text=True)
  for flag in ("--policy", "--round", "--records", "--kind", "--n"):
    assert flag in help.stdout
