#!/usr/bin/env bash
# Asks the run to stop: it finishes what it can keep, saves and ends.
#
#   tpu_scripts/stop.sh
#
#   --wait=SECONDS    how long to wait for that (600)
#   --now             ends it at once; the last checkpoint remains

# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

main() {
  WAIT=600 NOW=false
  begin "wait= now" "$@"
  worker all stop "$WAIT" "$NOW" ||
    fail "$NAME: has not stopped yet; stop.sh again waits on, --now does not"
}

main "$@"
