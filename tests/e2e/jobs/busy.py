"""Two ranks that feed every figure until a file appears: steps, groups, a pipeline of two stages, and rank 1 late in one of them."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from common import begin, end

import commwatch

LATE_S = 0.02
#: So many, and so different, that a curve goes through them.
SIZES = (1_000, 30_000, 250_000, 1_000_000)


def main() -> None:
    rank, _ = begin()
    late, data, pipe = (dist.new_group([0, 1], group_desc=name) for name in ("late", "data", "pipeline"))
    go_on, message = torch.ones(1), torch.ones(256)
    while go_on.item():
        torch.ones(300, 300) @ torch.ones(300, 300)
        if rank == 1:
            time.sleep(LATE_S)
        dist.all_reduce(torch.ones(100_000), group=late)
        for size in SIZES:
            dist.all_reduce(torch.ones(size), group=data)
        for stage in (0, 1):
            if rank == stage:
                dist.send(message, 1 - stage, group=pipe)
            else:
                dist.recv(message, stage, group=pipe)
        go_on.fill_(0 if rank == 0 and Path(sys.argv[1]).exists() else 1)
        dist.broadcast(go_on, src=0)
        commwatch.step()
    end()


if __name__ == "__main__":
    main()
