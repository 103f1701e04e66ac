"""Ranks that step, with four collectives each, and a pause of so many seconds after them, until a file appears; each says
how many steps it has done. Arguments: the file, the pause."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from common import begin, end, say

import commwatch


def main() -> None:
    begin()
    go_on, steps = torch.ones(1), 0
    data = dist.new_group([0, 1], group_desc="data")
    while go_on.item():
        for work in [dist.all_reduce(torch.ones(size), group=data, async_op=True) for size in (900, 1000, 5000)]:
            work.wait()
        time.sleep(float(sys.argv[2]))
        go_on.fill_(0 if dist.get_rank() == 0 and Path(sys.argv[1]).exists() else 1)
        dist.broadcast(go_on, src=0)
        commwatch.step()
        steps += 1
    say(steps)
    end()


if __name__ == "__main__":
    main()
