#!/bin/sh
# Made by `commwatch manifest slurm`, for Epilog= of slurm.conf: ends the job's agent and removes its folder in memory.
@@node

[ "${1-}" = bounded ] || bounded 30

[ -f "$dir.pid" ] || exit 0
pid=$(cat "$dir.pid")
# Process ids are reused: a process is the agent only if its command line contains the folder.
signal() {
    grep -qsaF -- "$dir" "/proc/$pid/cmdline" && (as_user sh -c 'kill "-$1" "$2"' sh "$1" "$pid")
}

# At SIGTERM the agent reads the remaining records of the rings.
if signal TERM; then
    left=75
    while [ "$left" -gt 0 ] && signal 0; do
        left=$((left - 1))
        sleep 0.2
    done
    signal KILL && say "the agent did not end within 15 s and was killed"
fi
log=$(as_user tail -n 1 "$dir/agent.log" 2>/dev/null | tr -cd '[:print:]' | cut -c -200)
[ -z "$log" ] || say "last line of the agent's log: $log"
(as_user find "$dir" -mindepth 1 -delete 2>/dev/null)
why=$(rmdir -- "$dir" 2>&1 && rm -- "$dir.pid" 2>&1) || fail "$why"
