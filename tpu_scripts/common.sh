# shellcheck shell=bash
# shellcheck disable=SC2034,SC2153 # settings are set and read by name
# What the commands of this folder share: settings, the table of accelerators,
# quoting, and how gcloud is called. It is sourced and does nothing by itself.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
WORKER_SCRIPT=mrl_jax/code/tpu_scripts/worker.sh # from a worker's home
SETTINGS="NAME ZONE PROJECT ACCELERATOR VERSION BUCKET WORKERS SPOT PLAIN"
POLL=${TPU_POLL_SECONDS:-10} # between two looks at something that takes time
TRIES=${TPU_TRIES:-30}       # looks for a worker that cannot be reached

# Kind, what its number counts, the runtime, and which numbers there are: a
# list, or MULTIPLE..MOST. A chip of v4 and v5p has two cores. Up to 8 chips of
# v5e and v6e are one worker; all larger ones have a worker for 4 chips.
ACCELERATORS="
v4        cores tpu-ubuntu2204-base  8..4096
v5litepod chips v2-alpha-tpuv5-lite  1,4,8,16,32,64,128,256
v5p       cores v2-alpha-tpuv5       8..12288
v6e       chips v2-alpha-tpuv6e      1,4,8,16,32,64,128,256
"

say() { printf '%s\n' "$*" >&2; }

# What was done; a dry run has done nothing.
report() { $DRY_RUN || say "$*"; }

fail() {
  say "error: $*"
  exit 1
}

# A mistake of the caller.
refuse() {
  say "error: $*"
  exit 2
}

# One word for any POSIX shell.
quote() {
  case $1 in
    '' | *[!A-Za-z0-9_./:=@%+,-]*)
      # Through variables: shells differ on quotes inside of a pattern.
      local quote="'" escaped="'\\''" text=$1 done=''
      while [[ $text == *"$quote"* ]]; do
        done+=${text%%"$quote"*}$escaped
        text=${text#*"$quote"}
      done
      printf "'%s'" "$done$text"
      ;;
    *) printf '%s' "$1" ;;
  esac
}

# The words as one line for a shell.
line() {
  local separator='' word
  for word in "$@"; do
    printf '%s' "$separator"
    quote "$word"
    separator=' '
  done
}

# Runs a command, or prints it as it would run.
run() {
  if $DRY_RUN; then
    line "$@"
    echo
  else
    "$@"
  fi
}

upper() { printf '%s' "$1" | tr '[:lower:]-' '[:upper:]_'; }
lower() { printf '%s' "$1" | tr '[:upper:]_' '[:lower:]-'; }

# The comment at the top of a command is its help.
help() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
  cat << END

Settings, from tpu.env in this folder or --settings=FILE, from the environment
as TPU_NAME ..., or as flags:
  --name= --zone= --project= --accelerator= --version= --bucket= --workers=
  --spot[=false]    a spot machine, which is cheaper and may be taken away
  --plain[=false]   a TPU VM of its own and not a queued resource
  --dry-run         prints every command as it would run, and runs none
END
}

# Sets one setting or flag, after a look at its value.
assign() { # KEY VALUE WHERE
  case $1 in
    SPOT | PLAIN | DRY_RUN | YES | FOLLOW | NOW | CHECKPOINTS)
      case $2 in
        true | false) ;;
        *) refuse "$3=$2: allowed: true, false" ;;
      esac
      ;;
    WORKERS | WAIT | RESTARTS | LINES)
      case $2 in
        '' | *[!0-9]* | 0?*)
          [ "$1$2" = WORKERS ] || refuse "$3=$2: must be a whole number"
          ;;
      esac
      ;;
    BUCKET)
      case $2 in
        '' | gs://?*) ;;
        *) refuse "$3=$2: must be gs://NAME or gs://NAME/FOLDER" ;;
      esac
      ;;
  esac
  printf -v "$1" '%s' "$2"
}

read_settings() { # FILE
  local text key
  while IFS= read -r text || [ -n "$text" ]; do
    case $text in '' | '#'*) continue ;; esac
    key=${text%%=*}
    case " $SETTINGS " in
      *" $key "*) assign "$key" "${text#*=}" "$1: $key" ;;
      *) refuse "$1: $key: unknown setting; allowed: $SETTINGS" ;;
    esac
  done < "$1"
}

# Reads the settings and the flags. OWN names the flags of this command
# besides the shared ones; a name that ends in = needs a value, and one that
# ends in * may be given several times (in MANY). With -- among them, what
# follows a -- is left in REST.
begin() { # OWN FLAGS...
  local own=" $1 " key argument name file='' given=() i
  shift
  DRY_RUN=false REST=() MANY=()
  for key in $SETTINGS; do printf -v "$key" '%s' ''; done
  SPOT=false PLAIN=false
  while (($#)); do
    argument=$1
    shift
    name=${argument%%=*}
    name=${name#--}
    case $argument in
      --)
        case $own in *" -- "*) ;; *) unknown -- "$own" ;; esac
        REST=("$@")
        break
        ;;
      --help | -h) help && exit 0 ;;
      --settings=?*) file=${argument#*=} ;;
      --name=* | --zone=* | --project=* | --accelerator=* | --version=* | \
        --bucket=* | --workers=*) given+=("$name" "${argument#*=}") ;;
      --dry-run | --spot | --plain) given+=("$name" true) ;;
      --spot=* | --plain=* | --dry-run=*) given+=("$name" "${argument#*=}") ;;
      --*=*)
        case $own in
          *" $name= "* | *" $name "*) given+=("$name" "${argument#*=}") ;;
          *" $name* "*) MANY+=("${argument#*=}") ;;
          *) unknown "$argument" "$own" ;;
        esac
        ;;
      *)
        case $own in
          *" $name "*) given+=("$name" true) ;;
          *" $name= "* | *" $name* "*)
            refuse "$argument: needs a value, as in $argument=VALUE"
            ;;
          *) unknown "$argument" "$own" ;;
        esac
        ;;
    esac
  done
  if [ -n "$file" ]; then
    [ -r "$file" ] || refuse "--settings=$file: there is no such file"
  elif [ -r "$HERE/tpu.env" ]; then
    file=$HERE/tpu.env
  fi
  [ -z "$file" ] || read_settings "$file"
  for key in $SETTINGS; do
    name=TPU_$key
    [ -z "${!name+set}" ] || assign "$key" "${!name}" "$name"
  done
  for ((i = 0; i < ${#given[@]}; i += 2)); do
    assign "$(upper "${given[i]}")" "${given[i + 1]}" "--${given[i]}"
  done
  require NAME my-tpu
  require ZONE us-east1-d
  PLACE=("--zone=$ZONE" --quiet)
  [ -z "$PROJECT" ] || PLACE+=("--project=$PROJECT")
  BUCKET=${BUCKET%/}
  $DRY_RUN || command -v gcloud > /dev/null || refuse "gcloud: not on PATH;" \
    "install it from https://cloud.google.com/sdk/docs/install"
}

unknown() { # ARGUMENT OWN
  local name list='' shared="name= zone= project= accelerator= version= bucket=
    workers= spot plain settings= dry-run help"
  for name in ${2/ -- / } $shared; do list+=" --${name%\*}"; done
  refuse "$1: unknown flag; allowed:$list"
}

require() { # KEY EXAMPLE
  [ -n "${!1}" ] || refuse "$1: is not set; set $1=$2 in tpu.env," \
    "TPU_$1=$2 in the environment, or --$(lower "$1")=$2"
}

# Sets CHIPS, WORKERS and VERSION, which follow from ACCELERATOR.
size() {
  require ACCELERATOR v6e-8
  local kind counts runtime sizes kinds='' number=${ACCELERATOR##*-}
  CHIPS=''
  while read -r kind counts runtime sizes; do
    [ -n "$kind" ] || continue
    kinds+="${kinds:+; }$kind-N, N in $sizes"
    [ "$kind-$number" = "$ACCELERATOR" ] || continue
    fits "$number" "$sizes" || continue
    CHIPS=$number
    [ "$counts" = chips ] || CHIPS=$((number / 2))
    VERSION=${VERSION:-$runtime}
    if [ -z "$WORKERS" ]; then
      WORKERS=$((CHIPS / 4))
      [ "$counts" = cores ] || ((CHIPS > 8)) || WORKERS=1
    fi
  done <<< "$ACCELERATORS"
  [ -n "$CHIPS" ] || { [ -n "$VERSION" ] && [ -n "$WORKERS" ]; } ||
    refuse "ACCELERATOR=$ACCELERATOR: allowed: $kinds;" \
      "any other with VERSION= and WORKERS= set too"
}

fits() { # NUMBER SIZES
  case $1 in '' | 0* | *[!0-9]*) return 1 ;; esac
  case $2 in
    *..*) (($1 % ${2%..*} == 0 && $1 <= ${2#*..})) ;;
    *) case ",$2," in *",$1,"*) ;; *) return 1 ;; esac ;;
  esac
}

# Sets STATE: of the queued resource, or of the VM if PLAIN or asked for it;
# NONE where there is none. A dry run takes the one that is given.
find_state() { # ASSUMED [vm]
  local command=(queued-resources describe "$NAME" "--format=value(state.state)")
  if $PLAIN || [ "${2:-}" = vm ]; then
    command=(tpu-vm describe "$NAME" "--format=value(state)")
  fi
  command=(gcloud compute tpus "${command[@]}" "${PLACE[@]}")
  STATE=$1
  if $DRY_RUN; then
    run "${command[@]}"
    return
  fi
  local errors
  errors=$(mktemp)
  if ! STATE=$("${command[@]}" 2> "$errors"); then
    STATE=NONE
    grep -q NOT_FOUND "$errors" || STATE=''
  fi
  [ -n "$STATE" ] || cat "$errors" >&2
  rm -f "$errors"
  [ -n "$STATE" ] || fail "$NAME: gcloud does not tell its state"
}

# What a state means: ready, waiting, lost (for good) or none.
meaning() { # STATE
  case $1 in
    ACTIVE | READY) echo ready ;;
    FAILED | SUSPEND* | PREEMPTED | TERMINATED | STOP* | DELETING | HID*)
      echo lost
      ;;
    NONE) echo none ;;
    *) echo waiting ;;
  esac
}

# Runs a command again while ssh cannot connect: 255 is ssh's own exit status,
# every other one is that of what ran.
persist() {
  local try code
  for ((try = 1; ; try++)); do
    code=0
    "$@" || code=$?
    ((code == 255 && try < TRIES)) || return "$code"
    say "$NAME: no connection (try $try of $TRIES); again in $POLL s"
    sleep "$POLL"
  done
}

# Runs a line of shell on WORKER (a number, or all).
ssh_line() { # WORKER LINE
  persist run gcloud compute tpus tpu-vm ssh "$NAME" "--worker=$1" \
    "--command=$2" "${PLACE[@]}"
}

# Runs worker.sh on WORKER; the words arrive there as they are here.
worker() { # WORKER WORDS...
  local which=$1
  shift
  ssh_line "$which" "$(line bash "$WORKER_SCRIPT" "$@")"
}

copy() { # WORKER FROM TO
  persist run gcloud compute tpus tpu-vm scp "$2" "$3" "--worker=$1" \
    "${PLACE[@]}"
}

# A run's name is a folder here, there and in the bucket.
check_run() {
  case $RUN in
    '' | .* | *[!A-Za-z0-9_.-]*)
      refuse "--run=$RUN: letters, digits, and - _ . not at the start"
      ;;
  esac
}
