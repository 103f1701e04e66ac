PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
umask 022
cd /

# One line, for the log of the node and for slurmd's.
say() {
    echo "commwatch: job ${SLURM_JOB_ID-}: $*" >&2
    timeout 2 logger -t commwatch -- "job ${SLURM_JOB_ID-}: $*" 2>/dev/null
}

fail() {
    say "$*"
    exit 0
}

# What belongs to the job's user is touched with the user's rights only. This process becomes the command: call it in a subshell.
as_user() {
    exec setpriv --reuid="$SLURM_JOB_UID" --regid="${SLURM_JOB_GID:-$(id -g "$SLURM_JOB_UID")}" --init-groups -- "$@"
}

# It is over in time, and says 0 whatever happens: Slurm takes a node out of service for less.
bounded() {
    timeout -k 2 "$1" /bin/sh "$0" bounded
    code=$?
    case $code in
    0) ;;
    124 | 137) say "$0 took longer than $1 s and was broken off" ;;
    *) say "$0 ended with $code" ;;
    esac
    exit 0
}

run=@@run
case "${SLURM_JOB_ID-}:${SLURM_JOB_UID-}" in
:* | *: | *[!0-9:]*) fail "is none of Slurm's: needs the numbers SLURM_JOB_ID and SLURM_JOB_UID" ;;
esac
dir=$run/$SLURM_JOB_ID
