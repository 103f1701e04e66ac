PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
umask 022
cd /

# Writes one line to the node's log and to slurmd's.
say() {
    echo "commwatch: job ${SLURM_JOB_ID-}: $*" >&2
    timeout 2 logger -t commwatch -- "job ${SLURM_JOB_ID-}: $*" 2>/dev/null
}

fail() {
    say "$*"
    exit 0
}

# Runs a command with the rights of the job's user; used for all that belongs to the user. Call it in a subshell: exec replaces the
# process.
as_user() {
    exec setpriv --reuid="$SLURM_JOB_UID" --regid="${SLURM_JOB_GID:-$(id -g "$SLURM_JOB_UID")}" --init-groups -- "$@"
}

# Runs this script with a time limit, and always exits with 0: after an error Slurm would take the node out of service.
bounded() {
    timeout -k 2 "$1" /bin/sh "$0" bounded
    code=$?
    case $code in
    0) ;;
    124 | 137) say "$0 took longer than $1 s and was stopped" ;;
    *) say "$0 ended with exit code $code" ;;
    esac
    exit 0
}

run=@@run
case "${SLURM_JOB_ID-}:${SLURM_JOB_UID-}" in
:* | *: | *[!0-9:]*) fail "is not a Slurm job: SLURM_JOB_ID and SLURM_JOB_UID must be numbers" ;;
esac
dir=$run/$SLURM_JOB_ID
