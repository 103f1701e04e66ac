#!/bin/sh
# Made by `commwatch manifest slurm`, for who is no administrator. In a batch script, before what starts the training:
#     sh commwatch-job.sh srun python train.py
# An agent on each node of the allocation, the probe switched on, the command, and a report. The exit code is the command's.
set -u
say() {
    echo "commwatch: $*" >&2
}

if [ "$#" -eq 0 ] || [ -z "${SLURM_JOB_ID-}" ]; then
    say "needs an allocation of Slurm's and a command, such as: sh $0 srun python train.py"
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

# A step of one task on each node that takes nothing from other steps; a probe in PYTHONPATH would hide the agent's modules. Call it
# in a subshell: this process becomes srun.
each_node() {
    exec srun --overlap --quiet --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpus-per-task=1 --mem=0 --cpu-bind=none \
        --mpi=none --kill-on-bad-exit=0 --job-name=commwatch --export=ALL env -u PYTHONPATH "$@"
}

# within SECONDS COMMAND ...: until it succeeds
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

# Agents end when this script does: srun hands on the end of its input. (At SIGTERM it would kill them.)
: >"$here/says"
each_node "COMMWATCH_LABEL_USER=${SLURM_JOB_USER-}" "COMMWATCH_LABEL_CLUSTER=${SLURM_CLUSTER_NAME-}" \
    "COMMWATCH_LABEL_PARTITION=${SLURM_JOB_PARTITION-}" \
    @@agent --until-stdin-closes --dir "$dir" --state "$state" <"$here/hold" >"$here/says" 2>&1 &
agents=$!
exec 3>"$here/hold"
within 30 answering
[ "$watching" -ge "$nodes" ] || say "agents on $watching of $nodes nodes: $(tail -n 1 "$here/says")"

pass_on() {
    kill "-$1" "$running"
}

exec 4<&0 # some shells would give a command in the background no input
(
    export COMMWATCH=1 "COMMWATCH_DIR=$dir" "COMMWATCH_JOB=$job"
    [ -z "$probe" ] || export "PYTHONPATH=$probe${PYTHONPATH:+:$PYTHONPATH}"
    exec "$@"
) <&4 3>&- 4<&- &
running=$!
exec 4<&-
for signal in HUP INT TERM USR1 USR2; do
    # shellcheck disable=SC2064 # the name of now
    trap "pass_on $signal" "$signal"
done
wait "$running"
code=$?
while kill -0 "$running" 2>/dev/null; do # a signal came in between
    wait "$running"
    code=$?
done

exec 3>&-
within 30 ended || kill "$agents"
wait "$agents" || tail -n 5 "$here/says" >&2
(each_node sh -c 'rm -rf -- "$1"; [ "$SLURM_NODEID" = 0 ] || exit 0; exec "$4" report --state "$2" "$3"' \
    sh "$dir" "$state" "$job" @@commwatch)
[ "$nodes" -eq 1 ] || say "that was the first of $nodes nodes; the others' histories are in $state, a file for each"
rm -rf -- "$here"
exit "$code"
