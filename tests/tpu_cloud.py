"""A cloud on this machine: a gcloud that keeps its machines in folders.

It writes down how it was called, answers what a state is from a file, and
runs what goes over ssh in bash, in a folder for each worker. The real one is
never reached: this one stands first on PATH.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent
SCRIPTS = ROOT / "tpu_scripts"

# States are answered line by line, the last one for good.
GCLOUD = r"""#!/usr/bin/env bash
{ printf '%s\0' "$@"; printf '\n'; } >> "$STUB/calls"
worker='' command='' words=()
for word in "$@"; do
  case $word in
    --worker=*) worker=${word#*=} ;;
    --command=*) command=${word#*=} ;;
    -*) ;;
    *) words+=("$word") ;;
  esac
done
[ "$worker" != all ] || worker=$(seq 0 $((STUB_WORKERS - 1)))
take() {
  local first
  first=$(head -n 1 "$STUB/$1")
  [ "$(wc -l < "$STUB/$1")" = 1 ] || sed -i 1d "$STUB/$1"
  printf '%s' "$first"
}
place() { printf '%s' "${1/#*:/$STUB/worker$2/}"; }
case "${words[2]} ${words[3]}" in
  *' describe')
    state=$(take "${words[2]}")
    case $state in
      NONE) echo "ERROR: (gcloud) NOT_FOUND: Resource" >&2; exit 1 ;;
      DENIED) echo "ERROR: (gcloud) PERMISSION_DENIED" >&2; exit 1 ;;
    esac
    echo "$state" ;;
  *' create')
    if [ -e "$STUB/quota" ]; then cat "$STUB/quota" >&2; exit 1; fi
    cp "$STUB/then" "$STUB/queued-resources"
    echo READY > "$STUB/tpu-vm" ;;
  *' delete') echo NONE | tee "$STUB/queued-resources" > "$STUB/tpu-vm" ;;
  *' ssh')
    if [ -s "$STUB/refuse" ]; then sed -i 1d "$STUB/refuse"; exit 255; fi
    code=0
    for number in $worker; do
      mkdir -p "$STUB/worker$number"
      cd "$STUB/worker$number"
      HOME=$PWD bash -c "$command" || code=$?
    done
    exit $code ;;
  *' scp')
    for number in $worker; do
      mkdir -p "$STUB/worker$number"
      cp "$(place "${words[4]}" "$number")" "$(place "${words[5]}" "$number")"
    done ;;
  *) [ "$1 $2" != "storage rsync" ] ||
    cp -r "${words[2]/#gs:\/\/mine/$STUB/bucket}/." "${words[3]}" ;;
esac
"""

# Stands for experiments.run: says how it was called, then does as it is told.
RUN = r"""
import json, os, pathlib, signal, sys, time
home = pathlib.Path(os.environ["HOME"])
cache = os.environ["JAX_COMPILATION_CACHE_DIR"]
call = {"argv": sys.argv[1:], "cache": cache, "extra": os.environ.get("EXTRA")}
with open(home / "started", "a") as file:
  file.write(json.dumps(call) + "\n")
workdir = pathlib.Path(sys.argv[-1].partition("=")[2])
workdir.mkdir(parents=True, exist_ok=True)
print("at work", flush=True)
told = (home / "told").read_text().split() if (home / "told").exists() else []
if told:
  (home / "told").write_text(" ".join(told[1:]))
  sys.exit(int(told[0]))
def save(*unused):
  signal.signal(signal.SIGTERM, lambda *unused: os._exit(9))
  time.sleep(0.5)  # a second signal meanwhile would end it unsaved
  (workdir / "saved").write_text(str(os.getpid()))
  sys.exit(0)
signal.signal(signal.SIGTERM, save)
(home / "ready").write_text(str(os.getpid()))
time.sleep(30)
"""

PYTHON = """#!/usr/bin/env bash
if [ "$1 $2" = "-m pip" ]; then echo "$*" >> "$HOME/pip"; exit; fi
PYTHONPATH=$STUB/fake exec {python} -S "$@"
"""

JAX = """
import types
class distributed:
  initialize = staticmethod(lambda: print("joined"))
process_index = lambda: 0
process_count = lambda: 2
device_count = lambda: 8
devices = lambda: [types.SimpleNamespace(device_kind="TPU v6 lite")]
"""


def repository(root: pathlib.Path) -> pathlib.Path:
  """One with these scripts and a run that does as it is told; read only."""
  shutil.copytree(SCRIPTS, root / "tpu_scripts")
  (root / "tpu_scripts" / "tpu.env").unlink(missing_ok=True)
  (root / "experiments").mkdir()
  (root / "experiments" / "run.py").write_text(RUN)
  git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b"]
  for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
    command = [*git, "-c", "commit.gpgsign=false", *words]
    subprocess.run(command, check=True)
  return root


class Cloud:
  """A machine of two workers, a repository to put there, and a bucket."""

  def __init__(self, folder: pathlib.Path, repository: pathlib.Path):
    self.stub = folder / "stub"
    self.repository = repository
    for path in ("bin", "fake", "bucket/a/logs/metrics"):
      (self.stub / path).mkdir(parents=True)
    self.executable(self.stub / "bin" / "gcloud", GCLOUD)
    (self.stub / "fake" / "jax.py").write_text(JAX)
    (self.stub / "bucket/a/config.json").write_text("{}\n")
    for begin in (0, 8, 120):  # a log in three pieces
      piece = self.stub / f"bucket/a/logs/metrics/{begin:015d}"
      piece.write_text(f"{begin}\n")
    (self.stub / "calls").touch()
    self.states("NONE")
    (self.stub / "then").write_text("ACTIVE\n")
    for number in range(2):
      python = self.worker(number) / "mrl_jax" / "venv" / "bin" / "python"
      python.parent.mkdir(parents=True)
      self.executable(python, PYTHON.format(python=sys.executable))
    self.environment = {
      **{k: v for k, v in os.environ.items() if not k.startswith("TPU_")},
      "PATH": f"{self.stub / 'bin'}:{os.environ['PATH']}",
      "HOME": str(folder),
      "TMPDIR": str(folder),
      "STUB": str(self.stub),
      "STUB_WORKERS": "2",
      "TPU_NAME": "my-tpu",
      "TPU_ZONE": "us-east1-d",
      "TPU_ACCELERATOR": "v6e-8",
      "TPU_WORKERS": "2",
      "TPU_BUCKET": "gs://mine",
      "TPU_POLL_SECONDS": "0.02",
      "TPU_PAUSE_SECONDS": "0.02",
      "TPU_TRIES": "4",
    }

  def executable(self, path, text):
    path.write_text(text)
    path.chmod(0o755)

  def states(self, *states, kind="queued-resources"):
    (self.stub / kind).write_text("".join(f"{s}\n" for s in states))

  def worker(self, number):
    return self.stub / f"worker{number}"

  def tell(self, *codes, workers=(0, 1)):
    """What the runs of a worker exit with; after these, one works on."""
    for number in workers:
      (self.worker(number) / "told").write_text(" ".join(map(str, codes)))

  def start(self, command, *flags, **environment):
    return subprocess.Popen(
      [str(self.repository / "tpu_scripts" / f"{command}.sh"), *flags],
      env={**self.environment, **environment},
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )

  def run(self, command, *flags, code=0, **environment):
    process = self.start(command, *flags, **environment)
    out, errors = process.communicate(timeout=30)
    assert process.returncode == code, out + errors
    return out, errors

  def calls(self):
    text = (self.stub / "calls").read_text()
    return [part.split("\0")[:-1] for part in text.split("\0\n")[:-1]]

  def verbs(self):
    """Which commands of gcloud were called, in order."""
    return [" ".join(call[2:4]) for call in self.calls()]

  def started(self, number=0):
    path = self.worker(number) / "started"
    return [json.loads(line) for line in path.read_text().splitlines()]

  def ready(self, workers=(0, 1)):
    for number in workers:
      until((self.worker(number) / "ready").exists)

  def status(self, number=0):
    script = self.worker(number) / "mrl_jax/code/tpu_scripts/worker.sh"
    done = subprocess.run(
      ["bash", str(script), "status"], capture_output=True, text=True
    )
    return done.stdout.strip()

  def set_up(self):
    self.states("ACTIVE")
    self.states("READY", kind="tpu-vm")
    self.run("setup")

  def end(self):
    """Nothing outlives its test."""
    for number in range(2):
      loop = self.worker(number) / "mrl_jax" / "session" / "loop"
      if loop.exists():
        self.kill(number)

  def kill(self, number):
    """What a worker runs ends as a machine does: all of it, without a word."""
    loop = (self.worker(number) / "mrl_jax/session/loop").read_text().strip()
    subprocess.run(["kill", "-KILL", "--", f"-{loop}"], stderr=subprocess.PIPE)


def until(condition, seconds=20):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, condition
    time.sleep(0.01)
