#!/usr/bin/env bash
# What happens on a worker; the other commands call this over ssh.
#
#   worker.sh install                        the packages, in a venv
#   worker.sh devices WORKERS CHIPS          fails where chips are missing
#   worker.sh free                           fails where a run goes on
#   worker.sh start RUN RESTARTS [KEY=VALUE ...] -- FLAGS
#   worker.sh status                         one line: how the run is
#   worker.sh log LINES FOLLOW               that line and the end of the log
#   worker.sh stop SECONDS NOW
#
# A lock is held as long as anything of the run lives, so nothing goes stale
# when a machine is killed, and a TPU that is in use is not asked for twice.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(dirname "$(dirname "$HERE")") # holds code, venv, runs, logs, session
PYTHON=$ROOT/venv/bin/python
SESSION=$ROOT/session
BUSY=75
PAUSE=${TPU_PAUSE_SECONDS:-10} # before a run that failed is started again

has_python() { # COMMAND: recent enough, and able to make a venv
  "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
    2> /dev/null
}

make_venv() {
  local name
  for name in python3 python3.13 python3.12 python3.11; do
    if has_python "$name"; then
      "$name" -m venv "$ROOT/venv"
      return
    fi
  done
  # The TPU images of Ubuntu 22.04 have Python 3.10; uv brings another.
  python3 -m pip install --user --quiet uv
  "$(python3 -m site --user-base)/bin/uv" venv --seed --python 3.12 \
    "$ROOT/venv"
}

install() {
  [ -x "$PYTHON" ] || make_venv
  "$PYTHON" -m pip install --quiet -e "$ROOT/code[tpu]"
}

devices() { # WORKERS CHIPS
  cd "$ROOT/code"
  timeout 300 "$PYTHON" - "$@" << 'END'
import sys

import jax

workers, chips = map(int, sys.argv[1:])
if workers > 1:
  jax.distributed.initialize()
found = jax.device_count()
print(f"worker {jax.process_index()} of {jax.process_count()}: {found} devices")
print(jax.devices()[0].device_kind)
# A chip is one device, or two on kinds whose cores count apart.
sys.exit(bool(chips) and found not in (chips, 2 * chips))
END
}

busy() { ! flock --nonblock "$ROOT/lock" true; }

free() {
  ! busy || {
    echo "error: $(status); stop it first" >&2
    return "$BUSY"
  }
}

start() { # RUN RESTARTS [KEY=VALUE ...] -- FLAGS
  local run=$1 restarts=$2 call
  call=$(printf '%q ' "$@")
  mkdir -p "$ROOT/logs" "$ROOT/runs" "$SESSION"
  exec 9> "$ROOT/lock"
  if ! flock --nonblock 9; then
    # The connection may have been lost after this very call.
    [ "$(cat "$SESSION/call")" = "$call" ] && status && return
    free
  fi
  shift 2
  export JAX_COMPILATION_CACHE_DIR=$ROOT/jax_cache PYTHONUNBUFFERED=1
  while [ "$1" != -- ]; do
    export "${1?}"
    shift
  done
  shift
  printf '%s' "$call" > "$SESSION/call"
  record "running $run"
  cd "$ROOT/code"
  # Descriptor 9, the lock, is left to it.
  setsid nohup bash "$HERE/worker.sh" loop "$run" "$restarts" "$PYTHON" \
    -m experiments.run "$@" "--workdir=$ROOT/runs/$run" \
    < /dev/null >> "$ROOT/logs/$run.log" 2>&1 &
  echo $! > "$SESSION/loop"
  echo "started $run"
}

# Runs a command until it ends well, is stopped, or fails too often.
loop() { # RUN RESTARTS COMMAND...
  local run=$1 restarts=$2 tries=0
  shift 2
  STOPPING=false
  # The command gets its own signal, from stop or from a system that goes down.
  trap 'STOPPING=true' TERM
  while ! $STOPPING; do
    note "start $tries of at most $restarts more:$(printf ' %q' "$@")"
    "$@" &
    echo $! > "$SESSION/child"
    await $!
    note "ended with status $CODE"
    # 2 is a mistake on the command line, which stays one.
    if ((CODE == 0 || CODE == 2 || tries++ >= restarts)); then break; fi
    $STOPPING && break
    sleep "$PAUSE" &
    wait $! || kill $! || true # it would hold the lock
  done
  if $STOPPING; then
    ending stopped "$run" "status $CODE"
  elif ((CODE == 0)); then
    ending finished "$run"
  else
    ending failed "$run" "with status $CODE"
  fi
}

note() { echo "[$(date '+%F %T') $(hostname)] $*"; }

ending() {
  note "$*"
  record "$*"
}

# At once: another may read it at any time.
record() {
  echo "$*" > "$SESSION/outcome.part"
  mv "$SESSION/outcome.part" "$SESSION/outcome"
}

# Sets CODE. A signal to this shell ends a wait before its time.
await() { # PID
  local next alive
  CODE=0
  wait "$1" || CODE=$?
  while ((CODE > 128)); do
    alive=true
    kill -0 "$1" 2> /dev/null || alive=false
    next=0
    wait "$1" 2> /dev/null || next=$?
    ((next == 127)) || CODE=$next
    $alive || break
  done
}

status() {
  local outcome
  outcome=$(outcome)
  if [[ $outcome == running* ]] && ! busy; then
    outcome=$(outcome) # it may just have ended as it should
    echo "${outcome/#running/died}"
  else
    echo "$outcome"
  fi
}

outcome() { cat "$SESSION/outcome" 2> /dev/null || echo idle; }

log() { # LINES FOLLOW
  local run
  echo "== $(hostname): $(status)"
  read -r _ run _ < <(status)
  [ -n "$run" ] && [ -r "$ROOT/logs/$run.log" ] || return 0
  if [ "$2" = true ]; then
    exec tail -n "$1" -F "$ROOT/logs/$run.log"
  fi
  tail -n "$1" "$ROOT/logs/$run.log"
}

# One signal for each process: the second ends a run before it has saved.
stop() { # SECONDS NOW
  local end=$((SECONDS + $1)) last='' child
  if ! busy; then
    status
    return
  fi
  if [ "$2" = true ]; then
    # Its process group is a session of its own.
    kill -KILL -- "-$(cat "$SESSION/loop")" || true
    record "stopped $(status | cut -d ' ' -f 2-), at once"
  else
    kill -TERM "$(cat "$SESSION/loop")" 2> /dev/null || true
  fi
  while busy; do
    child=$(cat "$SESSION/child" 2> /dev/null || true)
    if [ -n "$child" ] && [ "$child" != "$last" ]; then
      kill -TERM "$child" 2> /dev/null || true
      last=$child
    fi
    if ((SECONDS >= end)); then
      echo "$(hostname): still saving after $1 s"
      return 1
    fi
    sleep 0.2
  done
  status
}

"$@"
