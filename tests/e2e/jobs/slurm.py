"""Gradients that are reduced on ranks that srun started, at least ten times, until there is the file that is named; with "apart", only then. Imports
nothing of ours, and neither DDP nor an optimizer, which would import Dynamo."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    ending, port = Path(sys.argv[1]), sys.argv[2]
    where = {"RANK": os.environ["SLURM_PROCID"], "WORLD_SIZE": os.environ["SLURM_NTASKS"]}
    os.environ.update(where, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo")
    while "apart" in sys.argv and not ending.exists():  # without operations, so that a rank can die and the others live
        time.sleep(0.05)
    weights = torch.zeros(64, 64, requires_grad=True)
    over, step = torch.zeros(1), 0
    while not over.item():  # the ranks must hear it in the same step
        step += 1
        (torch.ones(8, 64) @ weights).sum().backward()
        dist.all_reduce(weights.grad)
        over += float(dist.get_rank() == 0 and step >= 10 and ending.exists())
        dist.all_reduce(over)
        time.sleep(0.02)
    dist.barrier()
    dist.destroy_process_group()
    print("job done", os.environ.get("COMMWATCH_DIR"))


if __name__ == "__main__":
    main()
