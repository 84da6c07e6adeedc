#!/usr/bin/env bash
# Says how the machine and the run are, and shows the end of the logs.
#
#   tpu_scripts/watch.sh
#   tpu_scripts/watch.sh --follow --worker=0
#
#   --worker=N        whose log: a number or all (all)
#   --lines=N         how much of it (20)
#   --follow          goes on until it is interrupted

# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

main() {
  WORKER=all LINES=20 FOLLOW=false
  begin "worker= lines= follow" "$@"
  case $WORKER in
    all) ;;
    '' | *[!0-9]*) refuse "--worker=$WORKER: must be a number or all" ;;
  esac
  find_state ACTIVE
  report "$NAME: $STATE"
  [ "$(meaning "$STATE")" = ready ] || return 0
  worker "$WORKER" log "$LINES" "$FOLLOW"
}

main "$@"
