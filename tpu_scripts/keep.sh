#!/usr/bin/env bash
# Keeps a run going on machines that may be taken away: creates one, sets it
# up, launches, and does so again when it is lost. The run goes on from the
# bucket. It ends with the run; what runs it must stay on (a terminal, tmux).
#
#   tpu_scripts/keep.sh --spot --bucket=gs://mine --run=sgt -- \
#     --flagfile=experiments/flagfiles/sgt.flags
#
#   --restarts=N      how many machines may be lost (10)
#   --run= --cache= --env=     as for launch.sh
#   --wait= --git= --ref=      as for create.sh and setup.sh

# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Sets OUTCOME: the first worker's word for how the run is, or lost.
look() {
  local text code try
  for ((try = 1; ; try++)); do
    code=0
    text=$(gcloud compute tpus tpu-vm ssh "$NAME" --worker=0 \
      "--command=$(line bash "$WORKER_SCRIPT" status)" "${PLACE[@]}") || code=$?
    case $code in
      0) OUTCOME=${text%% *} && return ;;
      127) OUTCOME=idle && return ;; # no worker.sh: it is not set up yet
    esac
    OUTCOME=lost
    ! is_lost || return 0
    ((try < TRIES)) || fail "$NAME: not reached by ssh in $TRIES tries"
    sleep "$POLL"
  done
}

# A queued resource may say ACTIVE for a while after its VM was taken.
is_lost() {
  find_state ACTIVE
  case $(meaning "$STATE") in lost | none) return 0 ;; esac
  find_state READY vm
  case $(meaning "$STATE") in lost | none) return 0 ;; *) return 1 ;; esac
}

# Creates, sets up and launches, unless the run is on its way already.
raise() {
  find_state NONE
  if [ "$(meaning "$STATE")" != none ] && is_lost; then
    "$HERE/delete.sh" --yes || exit
    find_state NONE
  fi
  if [ "$(meaning "$STATE")" = ready ]; then
    look
    case $OUTCOME in
      running) return ;;
      died) "$HERE/stop.sh" --now || return ;; # what other workers still do
    esac
  fi
  "$HERE/create.sh" "--wait=$WAIT" "$DRY" || {
    find_state NONE
    [ "$(meaning "$STATE")" = lost ] || exit 1 # a quota does not change
    return 1
  }
  "$HERE/setup.sh" ${GIT:+"--git=$GIT" "--ref=$REF"} "$DRY" || return
  "$HERE/launch.sh" "--run=$RUN" ${CACHE:+"--cache=$CACHE"} \
    ${MANY[@]+"${MANY[@]/#/--env=}"} "$DRY" -- ${REST[@]+"${REST[@]}"}
}

main() {
  RUN=run RESTARTS=10 CACHE='' WAIT=86400 GIT='' REF=HEAD
  begin "run= restarts= cache= env* wait= git= ref= --" "$@"
  size
  check_run
  require BUCKET gs://NAME
  local key code lost=0
  for key in $SETTINGS; do export "TPU_$key=${!key}"; done
  DRY=--dry-run=$DRY_RUN
  while true; do
    code=0
    raise || code=$?
    if $DRY_RUN || ((code == 2)); then exit "$code"; fi
    if ((code == 0)); then
      while look && [ "$OUTCOME" = running ]; do sleep "$POLL"; done
    else
      is_lost || fail "$NAME: $RUN was not started"
      OUTCOME=lost
    fi
    case $OUTCOME in
      finished | stopped)
        say "$RUN: $OUTCOME"
        return
        ;;
      lost | died) ;; # died: the worker itself was started again
      *) fail "$RUN: $OUTCOME; watch.sh shows why" ;;
    esac
    ((lost++ < RESTARTS)) ||
      fail "$NAME: lost $lost times, --restarts=$RESTARTS"
    say "$NAME: lost ($lost of at most $RESTARTS); again"
  done
}

main "$@"
