#!/usr/bin/env bash
# Starts experiments.run on all workers. It goes on when ssh ends, and is
# started again where it fails: the same command continues from its checkpoint.
#
#   tpu_scripts/launch.sh --run=sgt -- --flagfile=experiments/flagfiles/sgt.flags
#
#   --run=NAME        names the run's folder, log and place in the bucket (run)
#   --restarts=N      how often a worker starts it again (3)
#   --cache=PLACE     of compiled programs: a folder or gs://...; by default in
#                     the bucket, or on the worker where there is none
#   --env=KEY=VALUE   for the run's environment; may be given several times

# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

check_flags() {
  local flag name
  ((${#REST[@]})) ||
    refuse "FLAGS: none; those of experiments.run follow --, as in" \
      "launch.sh -- --flagfile=experiments/flagfiles/sgt.flags"
  for flag in "${REST[@]}"; do
    name=${flag%%=*}
    case ${name#-} in
      -workdir | workdir) refuse "$flag: is made from --run=$RUN" ;;
      -bucket | bucket) refuse "$flag: belongs before --, as --bucket=" ;;
      -coordinator | coordinator | -processes | processes | \
        -process_id | process_id)
        refuse "$flag: is set from the number of workers, $WORKERS"
        ;;
    esac
  done
  for flag in ${MANY[@]+"${MANY[@]}"}; do
    [[ $flag =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] ||
      refuse "--env=$flag: must be KEY=VALUE"
  done
}

main() {
  RUN=run RESTARTS=3 CACHE=''
  begin "run= restarts= cache= env* --" "$@"
  size
  check_run
  check_flags
  if ((WORKERS > 1)); then
    [ -n "$BUCKET" ] || refuse "BUCKET: is not set; $WORKERS workers share no" \
      "disk, so checkpoints need --bucket=gs://NAME"
    REST+=(--coordinator=auto)
  fi
  [ -z "$BUCKET" ] || REST+=("--bucket=$BUCKET/$RUN")
  CACHE=${CACHE:-${BUCKET:+$BUCKET/jax_cache}}
  [ -z "$CACHE" ] || MANY=("JAX_COMPILATION_CACHE_DIR=$CACHE" \
    ${MANY[@]+"${MANY[@]}"})
  worker all free || fail "$NAME: nothing was started (setup.sh comes first)"
  worker all start "$RUN" "$RESTARTS" ${MANY[@]+"${MANY[@]}"} -- "${REST[@]}" ||
    fail "$NAME: not all workers started; stop.sh ends those that did"
  report "$NAME: $RUN runs on $WORKERS worker(s); watch.sh, fetch.sh, stop.sh"
}

main "$@"
