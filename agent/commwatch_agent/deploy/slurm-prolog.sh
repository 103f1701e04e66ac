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

# The agents of a job on several nodes get a common token and each other's addresses. Each node derives the token from the site's secret,
# which only root can read; the job's user gets the token of this job, and can learn no other. If this fails, each agent shows its node.
secret=@@secret
port=@@port
peers=
alone() {
    say "each agent shows only its own node: $*"
}
together() {
    case $(stat -Lc %u:%a -- "$secret" 2>/dev/null) in
    "$(id -u):600" | "$(id -u):400") ;;
    *) alone "$secret must be a file of root with mode 600"; return ;;
    esac
    key=$(cat -- "$secret")
    [ "${#key}" -ge 32 ] || { alone "$secret has fewer than 32 characters"; return; }
    names=$(@@scontrol show hostnames "${SLURM_JOB_NODELIST:-${SLURM_NODELIST-}}" 2>&1) || { alone "$names"; return; }
    token=$(printf '%s:%s:%s' "$key" "$SLURM_JOB_ID" "$SLURM_JOB_UID" | sha256sum | cut -c -64)
    why=$(printf '%s\n' "$token" | (as_user sh -c 'umask 077; cat >"$1"' sh "$dir/agent.token") 2>&1) || { alone "$why"; return; }
    peers=$(printf '%s\n' "$names" | sed "s/\$/:$port/" | paste -sd , -)
}
[ -z "$secret" ] || [ "${SLURM_JOB_NUM_NODES:-1}" = 1 ] || together

# In its own session, because slurmd ends the processes that remain in a prolog's session, and with its own environment. If memory
# is short, the kernel ends the agent first. The prolog does not wait: the agent may start after the trainers.
as_user setsid env -i "PATH=$PATH" "COMMWATCH_LABEL_USER=${SLURM_JOB_USER-}" \
    "COMMWATCH_LABEL_CLUSTER=${SLURM_CLUSTER_NAME-}" "COMMWATCH_LABEL_PARTITION=${SLURM_JOB_PARTITION-}" "COMMWATCH_PEERS=$peers" \
    sh -c 'echo 500 >/proc/self/oom_score_adj; log=$1; shift; exec nice "$@" >>"$log" 2>&1' sh "$dir/agent.log" \
    @@agent --quiet --dir "$dir" --state "$state/$SLURM_JOB_UID" ${peers:+--port "$port" --token-file "$dir/agent.token"} </dev/null >/dev/null 2>&1 &
echo "$!" >"$dir.pid" || fail "is watched by an agent that the epilog cannot end: cannot write $dir.pid"
