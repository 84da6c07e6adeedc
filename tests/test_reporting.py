"""Display, final table, plots and the rollout viewer."""

import io
import os
import re

import matplotlib.image
import numpy as np
import pytest

from experiments import plots, progress, rollouts, summary
from mrl_jax.train import metrics, report


class Clock:
  def __init__(self):
    self.now = 100.0

  def __call__(self):
    return self.now


class Terminal(io.StringIO):
  def isatty(self):
    return True


def _values(round):
  return {
    "reward": 0.1 * round,
    "pass@1": 0.05 * round,
    "length": 12.25,
    "entropy": 0.5,
    "tokens_per_second": 5100.4,
    "unscored": 0,
  }


def _run(tmp_path, rounds=12, extra=None):
  with metrics.Log(tmp_path) as log:
    for i in range(rounds):
      for policy in ("char", "merged"):
        values = {
          "reward": i / 10,
          "pass@1": i / 100,
          "pass@8": i / 50,
          "unscored": i % 2,
          **(extra or {}),
        }
        log.metrics(policy, i, values)
        log.timings(policy, i, {"tokens_per_second": 10.0 * (i + 1)})
        log.rollouts(
          {
            "policy": policy,
            "round": i,
            "prompt_id": f"p{i}",
            "sample": s,
            "prompt": "1+1=",
            "completion": f"[b]{i}[/b]\x1b[2J two",
            "tokens": [1, 2, 3],
            "reward": None if s == 2 else float(s),
            "outcome": ("wrong", "correct", "timeout")[s],
            "finish": "stop",
            "answer": "2",
          }
          for s in range(3)
        )
  return tmp_path


# Time left.


def test_eta_leaves_out_the_first_round():
  eta = progress.Eta(10)
  eta.start(0.0)
  assert eta.left(0) is None
  assert eta.round(60.0) == 60.0  # compilation
  assert eta.left(1) is None
  eta.round(62.0)
  assert eta.left(2) == pytest.approx(8 * 2.0)
  eta.round(66.0)
  assert eta.left(3) == pytest.approx(7 * 3.0)
  assert eta.left(10) == 0.0


def test_eta_follows_recent_rounds():
  eta = progress.Eta(1000)
  eta.start(0.0)
  now = 0.0
  for seconds in [1.0] * 50 + [3.0] * progress.RECENT:
    now += seconds
    eta.round(now)
  assert eta.left(900) == pytest.approx(300.0)


def test_eta_after_a_resume_counts_the_rounds_still_to_do():
  clock, file = Clock(), io.StringIO()
  with progress.Progress(
    10, ["char"], "plain", start=6, clock=clock, file=file
  ) as display:
    for i in (6, 7):
      clock.now += 30.0
      display.round(i, {"char": _values(i)})
  first, second = file.getvalue().splitlines()
  assert first.startswith("round  7/10 |") and first.endswith("left --")
  assert second.endswith("30.0 s, left 1:00")


@pytest.mark.parametrize(
  ("seconds", "text"),
  [(None, "--"), (0, "0:00"), (59.6, "1:00"), (3700, "1:01:40")],
)
def test_duration(seconds, text):
  assert progress.duration(seconds) == text


# Display.


def test_plain_lines(tmp_path):
  clock, file = Clock(), io.StringIO()
  with progress.Progress(
    2, ["char", "merged"], clock=clock, file=file
  ) as display:  # auto, and a StringIO is no terminal
    display.message("resumed [/b]")
    for i in range(2):
      display.phase("char", "generate")
      clock.now += 1.5
      bad = {**_values(i), "unscored": 3, "skipped": 1, "reward": None}
      display.round(i, {"char": _values(i), "merged": bad})
  lines = file.getvalue().splitlines()
  assert lines[0] == "resumed [/b]"
  assert lines[2] == (
    "round 2/2 | char: reward 0.100 pass@1 0.050 length 12.2 entropy 0.500 "
    "tokens/s 5,100 | merged: pass@1 0.050 length 12.2 entropy 0.500 "
    "tokens/s 5,100 unscored 3 skipped 1 | 1.5 s, left 0:00"
  )
  assert len(lines) == 3 and "\x1b" not in file.getvalue()


def test_live_panel_shows_the_run(monkeypatch):
  monkeypatch.setenv("TERM", "xterm")
  monkeypatch.setenv("COLUMNS", "100")
  clock, file = Clock(), Terminal()
  with progress.Progress(5, ["char"], clock=clock, file=file) as display:
    display.phase("char", "verify")
    display.message("a [bold] word")
    for i in range(2):
      clock.now += 10.0
      display.round(i, {"char": _values(i)})
  text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
  assert "a [bold] word" in text
  assert "round 2/5" in text and "left 0:30" in text and "stopped" in text
  assert "0.100" in text and "unscored" not in text


def test_dumb_terminal_gets_lines(monkeypatch):
  monkeypatch.setenv("TERM", "dumb")
  file = Terminal()
  with progress.Progress(1, ["char"], file=file) as display:
    display.round(0, {"char": _values(0)})
  assert file.getvalue().startswith("round 1/1 | char")


def test_none_is_silent():
  file = Terminal()
  with progress.Progress(1, ["char"], "none", file=file) as display:
    display.message("hello")
    display.round(0, {"char": _values(0)})
  assert file.getvalue() == ""


def test_unknown_mode_names_the_allowed_ones():
  with pytest.raises(ValueError, match="'fancy': allowed are auto, live"):
    progress.Progress(1, [], "fancy")


# Final table.


def test_summary_compares_first_and_last_rounds(tmp_path):
  rows = summary.summary(_run(tmp_path, rounds=30))
  assert [row.policy for row in rows] == ["char", "merged"]
  row = rows[0]
  assert row.rounds == 30 and row.unscored == 15
  assert row.pass_first == pytest.approx(0.045)  # rounds 0..9
  assert row.pass_last == pytest.approx(0.245)  # rounds 20..29
  assert row.reward == pytest.approx(2.45)
  assert row.tokens_per_second == pytest.approx(255.0)
  assert row.length is None


def test_summary_of_a_short_run_does_not_overlap(tmp_path):
  row = summary.summary(_run(tmp_path, rounds=3))[0]
  assert (row.pass_first, row.pass_last) == (0.0, 0.02)
  row = summary.summary(_run(tmp_path, rounds=1))[0]
  assert row.pass_first == row.pass_last == 0.0
  assert summary.summary(_run(tmp_path, rounds=0)) == []


def test_table_is_plain_text(tmp_path):
  file = io.StringIO()
  summary.table(summary.summary(_run(tmp_path, rounds=30)), file)
  text = file.getvalue()
  assert text.isascii() and "\x1b" not in text
  line = next(line for line in text.splitlines() if "merged" in line)
  assert "0.045 -> 0.245 (+0.200)" in line and " 255 " in line


# Plots.


def test_smooth_keeps_constants_and_gaps():
  values = np.full(80, 3.0)
  values[5] = np.nan
  smoothed = plots.smooth(values)
  assert np.isnan(smoothed[5]) and np.isfinite(np.delete(smoothed, 5)).all()
  np.testing.assert_allclose(np.delete(smoothed, 5), 3.0)


def test_smooth_lowers_noise_but_follows_the_trend():
  line = np.linspace(0.0, 1.0, 200)
  noise = np.random.default_rng(0).normal(0.0, 0.3, 200)
  error = plots.smooth(line + noise) - line
  assert np.std(error[20:-20]) < 0.12
  assert abs(plots.smooth(line)[100] - line[100]) < 1e-6


def test_only_panels_with_data(tmp_path):
  extra = {"kl": None, "clip_low": 0.1, "clip_high": 0.2, "truncated": 0.0}
  extra |= {"peer/clip_low": 0.3, "note": "text", "unheard_of": 1.0}
  data = plots.curves([_run(tmp_path, extra=extra)])
  assert [(panel.title, keys) for panel, keys in plots.panels(data)] == [
    ("Reward", ["reward"]),
    ("Solved", ["pass@1", "pass@8"]),
    ("Clipped", ["clip_low", "clip_high"]),
    ("Unscored", ["unscored"]),
    ("Clipped, peer rows", ["peer/clip_low"]),
  ]


@pytest.mark.parametrize("rounds", [1, 2, 40])
def test_plot_writes_a_picture(tmp_path, rounds):
  (path,) = plots.plot(_run(tmp_path, rounds=rounds))
  image = matplotlib.image.imread(path)
  assert path.parent == tmp_path and min(image.shape[:2]) > 300
  colors = {tuple(c) for c in (image[..., :3] * 255).reshape(-1, 3).round()}
  for color in plots.COLORS[:2]:  # one line per policy, in its own colour
    rgb = tuple(int(color[i : i + 2], 16) for i in (1, 3, 5))
    assert rgb in colors


def test_plots_command_overlays_runs(tmp_path, capsys):
  first = _run(tmp_path / "first")
  second = _run(tmp_path / "second")
  out = tmp_path / "both.png"
  plots.main([str(first), str(second), f"--out={out}"])
  assert capsys.readouterr().out.strip() == str(out) and out.exists()
  labels = [curve.label for curve in plots.curves([first, second])]
  assert labels == [
    "first char",
    "first merged",
    "second char",
    "second merged",
  ]


def test_plots_command_says_what_is_missing(tmp_path, capsys):
  with pytest.raises(SystemExit):
    plots.main([str(tmp_path)])
  assert "metrics.jsonl: no such file" in capsys.readouterr().err
  _run(tmp_path, rounds=0)
  assert plots.plot(tmp_path) == []


# Rollouts.


def test_filters(tmp_path):
  run = _run(tmp_path)
  assert len(rollouts.select(run)) == 10
  found = rollouts.select(
    run, policy="merged", round=-2, outcome="wrong", n=100
  )
  assert [(r["policy"], r["round"], r["sample"]) for r in found] == [
    ("merged", 10, 0)
  ]
  found = rollouts.select(run, outcome="correct", n=3)
  assert [(r["round"], r["policy"]) for r in found] == [
    (10, "merged"),
    (11, "char"),
    (11, "merged"),
  ]
  assert rollouts.select(run, round=0, n=1)[0]["round"] == 0


@pytest.mark.parametrize(
  ("filters", "message"),
  [
    ({"policy": "chat"}, "policy 'chat' (there are char, merged)"),
    ({"round": 99}, "round 99 (there are 0 to 11)"),
    ({"outcome": "right"}, "(there are correct, timeout, wrong)"),
    ({"n": 0}, "n: 0"),
  ],
)
def test_no_match_says_what_there_is(tmp_path, filters, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    rollouts.select(_run(tmp_path), **filters)


def test_partial_last_line_is_left_out(tmp_path):
  run = _run(tmp_path, rounds=1)
  with open(run / "rollouts.jsonl", "ab") as file:
    file.write(b'{"policy": "char", "round": 5')
  assert len(rollouts.select(run, round=-1)) == 6


def test_viewer_prints_what_the_policy_wrote(tmp_path, capsys, monkeypatch):
  monkeypatch.setitem(os.environ, "COLUMNS", "100")
  rollouts.main([str(_run(tmp_path)), "--policy=char", "--n=3"])
  out = capsys.readouterr().out
  assert "char · round 11 · p11 #1" in out
  assert "1+1=" in out and "correct · reward 1 · 3 tokens" in out
  assert r"[b]11[/b]\x1b[2J two" in out and "\x1b" not in out
  assert "timeout · no reward" in out
  with pytest.raises(SystemExit):
    rollouts.main([str(tmp_path / "nowhere")])
  assert "no such file" in capsys.readouterr().err


def test_the_phase_table_adds_up_rounds(tmp_path, capsys):
  with metrics.Log(tmp_path) as log:
    for i in range(2):
      seconds = {"generate": 2.0, "update": 1.0}
      times = report.timings(seconds, {"generate": 3.0, "update": 1.5}, 100)
      log.timings("char", i, times)
  summary.phases(tmp_path)
  rows = [
    line for line in capsys.readouterr().out.splitlines() if "char" in line
  ]
  cells = [[c.strip() for c in row.split("|")[1:-1]] for row in rows]
  assert cells == [
    ["char", "wall", "4.0", "2.0", "6.0", "50"],
    ["char", "CPU", "6.0", "3.0", "9.0", "33"],
  ]


def test_a_folder_without_times_has_no_phase_table(tmp_path, capsys):
  summary.phases(tmp_path)
  assert capsys.readouterr().out == ""
