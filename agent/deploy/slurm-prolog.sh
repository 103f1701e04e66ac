#!/bin/sh
# Made by `commwatch manifest slurm`, for Prolog= of slurm.conf: on each node of a job, an agent as the job's user.
@@node
state=@@state

[ "${1-}" = bounded ] || bounded 20

# A folder of ours, in which nobody else can put another one in place of a job's.
ours() {
    why=$(mkdir -p -- "$1" 2>&1) || fail "is not watched: $why"
    [ "$(stat -c %u:%a -- "$1")" = "$(id -u):755" ] || fail "is not watched: $1 has to be this user's, a folder of mode 755"
}

# A folder of the job's user alone.
theirs() {
    why=$( (umask 077 && mkdir -p -- "$1") 2>&1 && chown "$SLURM_JOB_UID:${SLURM_JOB_GID-}" -- "$1" 2>&1) || fail "is not watched: $why"
}

ours "$run"
ours "$state"
theirs "$dir"
theirs "$state/$SLURM_JOB_UID"
# In a session of its own: slurmd ends what a prolog leaves in its. The environment is not the prolog's, and memory that is
# short is taken from the agent first. Nobody waits for it: it may come later than the trainers.
as_user setsid env -i "PATH=$PATH" "COMMWATCH_LABEL_USER=${SLURM_JOB_USER-}" \
    "COMMWATCH_LABEL_CLUSTER=${SLURM_CLUSTER_NAME-}" "COMMWATCH_LABEL_PARTITION=${SLURM_JOB_PARTITION-}" \
    sh -c 'echo 500 >/proc/self/oom_score_adj; log=$1; shift; exec nice "$@" >>"$log" 2>&1' sh "$dir/agent.log" \
    @@agent --quiet --dir "$dir" --state "$state/$SLURM_JOB_UID" </dev/null >/dev/null 2>&1 &
echo "$!" >"$dir.pid" || fail "is watched by an agent that nobody will end: cannot write $dir.pid"
