"""Exits with an operation in flight that it never waits for, while the other rank comes later: ``DIRECTORY [raise]``."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

directory, how = Path(sys.argv[1]), sys.argv[2:]
rank, leaving = int(os.environ["RANK"]), directory / "leaving"
dist.init_process_group("gloo", store=FileStore(str(directory / "store"), 2), rank=rank, world_size=2)
tensor = torch.ones(2)
dist.all_reduce(tensor)
if rank == 1:
    while not leaving.exists():
        time.sleep(0.05)
    time.sleep(1)  # so that the interpreter of rank 0 is about to end
work = dist.all_reduce(tensor, async_op=True)
leaving.touch()
if how and rank == 0:
    raise ValueError("of the user")
sys.exit(0)
