"""Names of jobs that have no name: what runs, whichever launcher starts it."""

from __future__ import annotations

import shlex

import pytest

from commwatch_agent.commands.script_names import script_name


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python train.py --data x.py", "train"),
        ("python -u -W ignore runs/train.v2.py", "train.v2"),
        ("torchrun --nproc-per-node 2 --standalone train.py", "train"),
        ("torchrun --nproc-per-node=2 -m pkg.train --lr 1", "pkg.train"),
        ("python -m pkg.mod", "pkg.mod"),
        ("python -m torch.distributed.run --nproc-per-node 2 train.py", "train"),
        ("python -m torch.distributed.launch --use-env train.py", "train"),
        ("python -m accelerate.commands.launch --config_file c.yaml train.py", "train"),
        ("accelerate launch --num_processes 2 train.py", "train"),
        ("accelerate launch -m pkg.train", "pkg.train"),
        ("deepspeed --num_gpus 8 train.py --deepspeed ds.json", "train"),
        ("srun -N 2 --ntasks-per-node=8 python train.py", "train"),
        ("srun -N 2 bash -c 'torchrun --nnodes 2 train.py'", "train"),
        ("mpirun -n 8 python3 bench/all_reduce.py", "all_reduce"),
        ("bash x.sh", "x"),
        ("bash -x ./launch.sh train.py", "launch"),
        ("bash run train.py", "run"),
        ("bash -lc 'cd /x && exec python train.py'", "train"),
        ("sh -c 'a quotation \\' without an end'", "sh"),
        ("/bin/bash", "bash"),
        ("env A=1 numactl -N 0 python train.py", "train"),
        ("./train", "train"),
        ("python -c pass", "python"),
    ],
)
def test_script_name(command: str, name: str) -> None:
    """The first script or module of the command line names the job, else the program; launchers and shells do not."""
    words = command.split(" ", 2) if "quotation" in command else shlex.split(command)
    assert script_name(words) == name


def test_bounded() -> None:
    """A name of any length is cut, and an empty one is a job."""
    assert len(script_name(["python", "x" * 5000 + ".py"])) == 60
    assert script_name([""]) == "job"
