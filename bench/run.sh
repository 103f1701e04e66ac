#!/bin/sh
# Install what the benchmarks need into an environment of its own, measure, and print one table.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
venv=$root/.venv-bench
python=$venv/bin/python
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT INT TERM

test -x "$python" || "${PYTHON:-python3}" -m venv "$venv"
"$python" -m pip install --quiet --quiet --upgrade 'pip>=25.1' 'setuptools>=80'
"$python" -m pip install --quiet --quiet "torch==${TORCH:-2.13.0}"
# The peer. Without it its column stays empty. Its setup imports torch, so it is built without isolation, with the setuptools from above,
# which nothing else here needs.
DS_BUILD_OPS=0 "$python" -m pip install --quiet --quiet --no-build-isolation "deepspeed==${DEEPSPEED:-0.19.8}" ||
    echo "bench: DeepSpeed cannot be installed here; measuring without it" >&2
# From a copy, so that what earlier builds left in the checkout is not installed along.
tar -C "$root" --exclude='./.*' --exclude=./build --exclude=./dist -cf - . | tar -C "$source" -xf -
"$python" -m pip install --quiet --quiet "$source"

# The benchmarks read no settings of ours, or of a launcher, from the environment.
for name in $(env | sed -n 's/^\(COMMWATCH[A-Z_]*\|TORCHELASTIC_[A-Z_]*\|SLURM_[A-Z_]*\)=.*/\1/p'); do unset "$name"; done
"$venv/bin/commwatch" native build > /dev/null
OMP_NUM_THREADS=1 "$python" "$root/bench/table.py" "$@"
