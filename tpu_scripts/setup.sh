#!/usr/bin/env bash
# Puts the repository on all workers, with all it needs, and counts devices.
# It can be run again: the code is replaced, runs and logs stay.
#
#   tpu_scripts/setup.sh
#   tpu_scripts/setup.sh --git=https://github.com/me/mrl_jax --ref=main
#
#   --git=URL         from there, and not this repository's HEAD
#   --ref=REF         its branch, tag or commit (HEAD)

# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

BUSY=75 # EX_TEMPFAIL: the lock of a run that goes on

# A new machine answers some time after it is there.
reach() {
  local try
  for ((try = 1; ; try++)); do
    run gcloud compute tpus tpu-vm ssh "$NAME" --worker=all --command=true \
      "${PLACE[@]}" && return
    ((try < TRIES)) || fail "$NAME: not reached by ssh in $TRIES tries" \
      "(several workers need ssh-add ~/.ssh/google_compute_engine)"
    find_state ACTIVE
    case $(meaning "$STATE") in
      lost | none) fail "$NAME: is $STATE" ;;
    esac
    say "$NAME: $STATE, no connection (try $try of $TRIES); again in $POLL s"
    sleep "$POLL"
  done
}

# Under the lock, so that no run loses its code.
replace() { # LINE
  local code=0
  ssh_line all "mkdir -p mrl_jax && flock --nonblock --conflict-exit-code=$BUSY \
mrl_jax/lock sh -c $(quote "$1")" || code=$?
  ((code != BUSY)) || fail "$NAME: a run goes on there; stop.sh, then setup.sh"
  ((code == 0)) || fail "$NAME: the code was not unpacked (exit status $code)"
}

from_here() {
  local archive=${TMPDIR:-/tmp}/mrl_jax-$NAME.tar.gz root
  root=$(git -C "$HERE" rev-parse --show-toplevel)
  [ -z "$(git -C "$root" status --porcelain)" ] ||
    report "$root: holds changes that are not committed; HEAD is copied"
  run git -C "$root" archive --format=tar.gz "--output=$archive" HEAD
  copy all "$archive" "$NAME:mrl_jax.tar.gz"
  run rm -f "$archive"
  replace "rm -rf mrl_jax/code && mkdir mrl_jax/code && \
tar -xzf mrl_jax.tar.gz -C mrl_jax/code"
}

from_git() {
  replace "git init -q mrl_jax/code && cd mrl_jax/code && \
git fetch -q --depth=1 $(line "$GIT" "$REF") && git checkout -qf FETCH_HEAD"
}

main() {
  GIT='' REF=HEAD
  begin "git= ref=" "$@"
  size
  reach
  if [ -n "$GIT" ]; then from_git; else from_here; fi
  worker all install || fail "$NAME: the packages were not installed"
  worker all devices "$WORKERS" "${CHIPS:-0}" ||
    fail "$NAME: not all of its devices were found"
  report "$NAME: ready for launch.sh"
}

main "$@"
