"""Two ranks, rank 1 late in every step: rank 0 either stands still meanwhile, or computes. Argument: stand | compute."""

import sys
import time

import torch
import torch.distributed as dist
from common import begin, end, say
from torch import nn

LATE_S = 0.3
STEPS = 5


def spin(seconds: float) -> None:
    """Use the CPU for so long, in CPU time: whatever else the machine does."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def main() -> None:
    rank, _ = begin()
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    t = torch.ones(1024)
    standing: list[float] = []
    for _ in range(STEPS):
        if sys.argv[1] == "stand":
            if rank == 1:
                time.sleep(LATE_S)
            model(torch.ones(4, 64)).sum().backward()
        elif rank == 1:
            time.sleep(LATE_S)
            dist.all_reduce(t)
        else:
            wall, cpu = time.monotonic(), time.thread_time()
            work = dist.all_reduce(t, async_op=True)
            while not work.is_completed():
                spin(0.005)
            work.wait()
            standing.append((time.monotonic() - wall) - (time.thread_time() - cpu))
        optimizer.step()
    say(standing)
    end()


if __name__ == "__main__":
    main()
