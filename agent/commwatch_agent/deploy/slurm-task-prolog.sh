#!/bin/sh
# Made by `commwatch manifest slurm`, for TaskProlog= of slurm.conf: switches the probe on in each task of a job that has an agent
# on this node. Slurm sets for the task what this script prints.
run=@@run
state=@@state
probe=@@probe
dir=$run/${SLURM_JOB_ID-}

case ${COMMWATCH_DIR-} in
"" | "$dir") ;;
"$run"/*) unset COMMWATCH COMMWATCH_JOB COMMWATCH_RUN ;; # from the job that submitted this one
*) exit 0 ;;                               # the user has chosen another folder: change nothing
esac
if ! [ -w "$dir" ]; then # no agent here: the variables of an earlier task do not apply
    [ -z "${COMMWATCH_DIR-}" ] || echo "unset COMMWATCH"
    exit 0
fi
echo "export COMMWATCH=${COMMWATCH:-1}"
echo "export COMMWATCH_DIR=$dir"
echo "export COMMWATCH_STATE=$state/$(id -u)"
echo "export COMMWATCH_JOB=${COMMWATCH_JOB:-$SLURM_JOB_ID}"
echo "export COMMWATCH_RUN=${COMMWATCH_RUN:-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}}" # all steps of the job, one after the other
case :${PYTHONPATH-}: in
*:"$probe":*) ;;
*) [ -z "$probe" ] || echo "export PYTHONPATH=$probe${PYTHONPATH:+:$PYTHONPATH}" ;;
esac
exit 0
