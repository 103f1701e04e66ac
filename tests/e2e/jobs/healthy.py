"""A healthy job for as long as its standard input stays open: uneven compute, a checkpoint now and then, all kinds of collectives."""

import random
import select
import sys
import time

import torch
import torch.distributed as dist
from common import begin, end

import commwatch


def main() -> None:
    rank, size = begin()
    noise = random.Random(rank)
    pair = dist.new_group([0, 1], group_desc="pair")
    posted = dist.irecv(torch.ones(1), src=(rank + 1) % size, tag=77)
    go_on, step = torch.ones(1), 0
    while go_on.item():
        step += 1
        time.sleep(0.2 * noise.random())
        square = torch.ones(96, 96)
        for _ in range(noise.randrange(5)):
            square @ square
        if step % 100 == 0 and rank == 0:
            time.sleep(3)  # a checkpoint
        for _ in range(4):
            dist.all_reduce(torch.ones(10_000))
        if rank < 2:
            dist.all_reduce(torch.ones(100), group=pair)
        dist.broadcast(torch.ones(1000), src=step % size)
        closed = rank == 0 and select.select([sys.stdin], [], [], 0)[0]
        go_on.fill_(0 if closed else 1)
        dist.broadcast(go_on, src=0)
        commwatch.step()
    dist.isend(torch.ones(1), dst=(rank - 1) % size, tag=77)
    assert posted is not None
    posted.wait()
    end()


if __name__ == "__main__":
    main()
