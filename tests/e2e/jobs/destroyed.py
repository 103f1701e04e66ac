"""A process that is killed after its default group was destroyed. Argument: how often the group is made; only the first is destroyed."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

if __name__ == "__main__":
    for time in range(int(sys.argv[1])):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        dist.all_reduce(torch.ones(4))
        if time == 0:
            dist.destroy_process_group()
    os.kill(os.getpid(), signal.SIGKILL)
