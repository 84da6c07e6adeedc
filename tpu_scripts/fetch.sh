#!/usr/bin/env bash
# Copies a run's results here: from the bucket, as they were at its last
# checkpoint, else from the first worker as they are; and every worker's log.
#
#   tpu_scripts/fetch.sh --run=sgt --out=runs
#
#   --run=NAME        as it was launched (run)
#   --out=FOLDER      where OUT/NAME is made (runs)
#   --checkpoints     these too; they are large

# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# In the bucket metrics.jsonl is logs/metrics/, in pieces that are named by
# where they begin. Pieces that a later start has replaced must not stay.
# shellcheck disable=SC2016 # the inner shell's $1
JOIN='for log in "$1"/pieces/*/; do
  cat "$log"* > "$1/$(basename "$log").jsonl"
done'

from_bucket() {
  local sync=(gcloud storage rsync --recursive) left='logs|rounds|checkpoints'
  ! $CHECKPOINTS || left='logs|rounds'
  run mkdir -p "$OUT/$RUN/pieces" &&
    run "${sync[@]}" "--exclude=^($left)/.*" "$BUCKET/$RUN" "$OUT/$RUN" &&
    run "${sync[@]}" --delete-unmatched-destination-objects \
      "$BUCKET/$RUN/logs" "$OUT/$RUN/pieces" &&
    run sh -c "$JOIN" join "$OUT/$RUN"
}

from_worker() {
  local archive=mrl_jax/$RUN.tar.gz
  local command=(tar -C mrl_jax/runs -czf "$archive")
  $CHECKPOINTS || command+=("--exclude=$RUN/checkpoints")
  ssh_line 0 "$(line "${command[@]}" "$RUN")" &&
    copy 0 "$NAME:$archive" "$OUT/$RUN.tar.gz" &&
    run tar -xzf "$OUT/$RUN.tar.gz" -C "$OUT" &&
    run rm -f "$OUT/$RUN.tar.gz" &&
    ssh_line 0 "$(line rm -f "$archive")"
}

# The results matter more: a machine that is gone has no logs.
logs() {
  local number
  for ((number = 0; number < WORKERS; number++)); do
    copy "$number" "$NAME:mrl_jax/logs/$RUN.log" \
      "$OUT/$RUN/logs/worker-$number.log" ||
      say "$NAME: worker $number has no log of $RUN, or is not reached"
  done
}

main() {
  RUN=run OUT=runs CHECKPOINTS=false
  begin "run= out= checkpoints" "$@"
  size
  check_run
  run mkdir -p "$OUT/$RUN/logs"
  if [ -n "$BUCKET" ]; then from_bucket; else from_worker; fi ||
    fail "$NAME: $RUN was not copied"
  logs
  report "$RUN: in $OUT/$RUN"
}

main "$@"
