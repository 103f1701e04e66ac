#!/bin/sh
# Made by `commwatch manifest slurm`, for use without an administrator. In a batch script, prefix the command that starts the training:
#     sh commwatch-job.sh srun python train.py
# It starts an agent on each node of the allocation, puts the probe in front of the command's PYTHONPATH, runs the command, and prints
# a report. The exit code is the command's.
set -u
say() {
    echo "commwatch: $*" >&2
}

if [ "$#" -eq 0 ] || [ -z "${SLURM_JOB_ID-}" ]; then
    say "needs a Slurm allocation and a command, such as: sh $0 srun python train.py"
    exit 2
fi
nodes=${SLURM_JOB_NUM_NODES:-1}
dir=/dev/shm/commwatch-$(id -u)-$SLURM_JOB_ID
state=${COMMWATCH_STATE:-${XDG_STATE_HOME:-$HOME/.local/state}/commwatch}
probe=@@probe
job=${COMMWATCH_JOB:-$SLURM_JOB_ID}
if ! here=$(mktemp -d) || ! mkfifo "$here/hold"; then
    say "the job runs without an agent"
    exec "$@"
fi

if [ -z "$probe" ]; then # in the home directory, which the nodes usually share
    probe=${XDG_CACHE_HOME:-$HOME/.cache}/commwatch/probe-slurm
    if ! env -u PYTHONPATH @@commwatch probe install "$probe" >/dev/null; then
        say "the job uses the probe of its own environment, if it has one"
        probe=
    fi
fi

# Runs a step with one task on each node, which takes no resources from other steps. Without PYTHONPATH, because its modules are for
# the Python of the training. Call it in a subshell: exec replaces the process.
each_node() {
    exec srun --overlap --quiet --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpus-per-task=1 --mem=0 --cpu-bind=none \
        --mpi=none --kill-on-bad-exit=0 --job-name=commwatch --export=ALL env -u PYTHONPATH "$@"
}

# within SECONDS COMMAND ...: repeats the command until it succeeds; fails after that time.
within() {
    left=$1
    shift
    until "$@"; do
        [ "$left" -gt 0 ] || return 1
        left=$((left - 1))
        sleep 1
    done
}

ended() {
    ! kill -0 "$agents" 2>/dev/null
}

answering() {
    watching=$(grep -c ': watching ' "$here/says")
    [ "$watching" -ge "$nodes" ] || ended
}

# Where the agents of several nodes reach each other, they get each other's addresses, and a common token from their input: in no
# command line, and in no environment.
port=@@port
peers=
if [ -n "$port" ] && [ "$nodes" -gt 1 ]; then
    peers=$(scontrol show hostnames | sed "s/\$/:$port/" | paste -sd , -)
fi
# shellcheck disable=SC2016 # for the shell on each node
start='peers=$1 dir=$2
shift 2
private() {
    mkdir -m 700 -- "$dir" 2>/dev/null || [ "$(stat -c %u:%a -- "$dir")" = "$(id -u):700" ]
}
if [ -n "$peers" ] && IFS= read -r token && private && (umask 077 && printf "%s\n" "$token" >"$dir/agent.token"); then
    export COMMWATCH_PEERS="$peers"
    set -- "$@" --token-file "$dir/agent.token"
fi
exec "$@"'

# Agents end with this script, because srun passes on the end of its input. (At SIGTERM srun would kill them.)
: >"$here/says"
each_node "COMMWATCH_LABEL_USER=${SLURM_JOB_USER-}" "COMMWATCH_LABEL_CLUSTER=${SLURM_CLUSTER_NAME-}" \
    "COMMWATCH_LABEL_PARTITION=${SLURM_JOB_PARTITION-}" sh -c "$start" sh "$peers" "$dir" \
    @@agent --until-stdin-closes --dir "$dir" --state "$state" <"$here/hold" >"$here/says" 2>&1 &
agents=$!
exec 3>"$here/hold"
[ -z "$peers" ] || (od -An -N32 -tx1 /dev/urandom | tr -d ' \n' && echo) >&3 # in a subshell, because srun may have ended
within 30 answering
[ "$watching" -ge "$nodes" ] || say "agents on $watching of $nodes nodes: $(tail -n 1 "$here/says")"

pass_on() {
    kill "-$1" "$running"
}

exec 4<&0 # some shells give a background command no input
(
    # All steps of this script, one after the other, are one run.
    export COMMWATCH=1 "COMMWATCH_DIR=$dir" "COMMWATCH_JOB=$job" "COMMWATCH_RUN=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
    [ -z "$probe" ] || export "PYTHONPATH=$probe${PYTHONPATH:+:$PYTHONPATH}"
    exec "$@"
) <&4 3>&- 4<&- &
running=$!
exec 4<&-
for signal in HUP INT TERM USR1 USR2; do
    # shellcheck disable=SC2064 # the current name
    trap "pass_on $signal" "$signal"
done
wait "$running"
code=$?
while kill -0 "$running" 2>/dev/null; do # a signal interrupted the wait
    wait "$running"
    code=$?
done

exec 3>&-
within 30 ended || kill "$agents"
wait "$agents" || tail -n 5 "$here/says" >&2
(each_node sh -c 'rm -rf -- "$1"; [ "$SLURM_NODEID" = 0 ] || exit 0; exec "$4" report --state "$2" "$3"' \
    sh "$dir" "$state" "$job" @@commwatch)
[ "$nodes" -eq 1 ] || say "this report is of the first of $nodes nodes; the histories of all are in $state, one file per node"
rm -rf -- "$here"
exit "$code"
