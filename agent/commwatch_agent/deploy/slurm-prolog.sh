#!/bin/sh
# Made by `commwatch manifest slurm`, for Prolog= of slurm.conf: starts an agent on each node of a job, as the job's user.
@@node
state=@@state

[ "${1-}" = bounded ] || bounded 20

# Makes a folder in which no other user can replace the folder of a job.
ours() {
    why=$(mkdir -p -- "$1" 2>&1) || fail "is not watched: $why"
    [ "$(stat -c %u:%a -- "$1")" = "$(id -u):755" ] || fail "is not watched: $1 must be a folder of this user with mode 755"
}

# Makes a folder that only the job's user can read.
theirs() {
    why=$( (umask 077 && mkdir -p -- "$1") 2>&1 && chown "$SLURM_JOB_UID:${SLURM_JOB_GID-}" -- "$1" 2>&1) || fail "is not watched: $why"
}

ours "$run"
ours "$state"
theirs "$dir"
theirs "$state/$SLURM_JOB_UID"
# In its own session, because slurmd ends the processes that remain in a prolog's session, and with its own environment. If memory
# is short, the kernel ends the agent first. The prolog does not wait: the agent may start after the trainers.
as_user setsid env -i "PATH=$PATH" "COMMWATCH_LABEL_USER=${SLURM_JOB_USER-}" \
    "COMMWATCH_LABEL_CLUSTER=${SLURM_CLUSTER_NAME-}" "COMMWATCH_LABEL_PARTITION=${SLURM_JOB_PARTITION-}" \
    sh -c 'echo 500 >/proc/self/oom_score_adj; log=$1; shift; exec nice "$@" >>"$log" 2>&1' sh "$dir/agent.log" \
    @@agent --quiet --dir "$dir" --state "$state/$SLURM_JOB_UID" </dev/null >/dev/null 2>&1 &
echo "$!" >"$dir.pid" || fail "is watched by an agent that the epilog cannot end: cannot write $dir.pid"
