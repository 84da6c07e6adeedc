#!/usr/bin/env bash
# Asks for a TPU and waits until it is there. Nothing happens to one that is
# there already, so this can be run again after an interruption.
#
#   tpu_scripts/create.sh --name=my-tpu --zone=us-east1-d --accelerator=v6e-8
#
#   --wait=SECONDS    how long to wait for it (3600; 0: only ask for it)

# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

request() {
  local command=(queued-resources create "$NAME" "--node-id=$NAME"
    "--accelerator-type=$ACCELERATOR" "--runtime-version=$VERSION")
  if $PLAIN; then
    command=(tpu-vm create "$NAME" "--accelerator-type=$ACCELERATOR"
      "--version=$VERSION")
  fi
  ! $SPOT || command+=(--spot)
  run gcloud compute tpus "${command[@]}" "${PLACE[@]}" ||
    fail "$NAME: was not created; what gcloud says of it stands above"
}

main() {
  WAIT=3600
  begin "wait=" "$@"
  size
  find_state NONE
  if [ "$STATE" = NONE ]; then
    request
    find_state ACTIVE
  else
    say "$NAME: is there already, $STATE"
  fi
  local end=$((SECONDS + WAIT)) last=''
  while [ "$(meaning "$STATE")" != ready ]; do
    [ "$(meaning "$STATE")" != lost ] ||
      fail "$NAME: is $STATE; delete.sh, then create.sh again"
    if ((SECONDS >= end)); then
      ((WAIT == 0)) && say "$NAME: $STATE" && return
      fail "$NAME: still $STATE after $WAIT s; create.sh again waits on"
    fi
    [ "$STATE" = "$last" ] || say "$NAME: $STATE"
    last=$STATE
    sleep "$POLL"
    find_state ACTIVE
  done
  report "$NAME: $STATE, $ACCELERATOR, $WORKERS worker(s), $VERSION"
}

main "$@"
