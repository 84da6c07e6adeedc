#!/usr/bin/env bash
# Gives the machine back, with all that is on its disks.
#
#   tpu_scripts/delete.sh
#
#   --yes             does not ask

# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

main() {
  YES=false
  begin "yes" "$@"
  find_state ACTIVE
  if [ "$STATE" = NONE ]; then
    say "$NAME: there is none in $ZONE"
    return
  fi
  if ! $YES && ! $DRY_RUN; then
    local answer=''
    printf '%s is %s in %s. Its name again deletes it: ' \
      "$NAME" "$STATE" "$ZONE" >&2
    read -r answer || true
    [ "$answer" = "$NAME" ] || fail "$NAME: not deleted (--yes does not ask)"
  fi
  # --force: the VM of a queued resource goes with it.
  local command=(queued-resources delete "$NAME" --force)
  ! $PLAIN || command=(tpu-vm delete "$NAME")
  run gcloud compute tpus "${command[@]}" "${PLACE[@]}" ||
    fail "$NAME: was not deleted; what gcloud says of it stands above"
}

main "$@"
