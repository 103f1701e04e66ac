"""All_reduces of several sizes in one group, and of one between them in another; says how long each took, by size and its own clock."""

import time

import torch
import torch.distributed as dist
from common import begin, end, say

#: A link held to a rate lets the first 32 KiB through at once, so the sizes are well above that.
SIZES, BETWEEN, TIMES = (256 << 10, 768 << 10, 4 << 20), 2 << 20, 8


def main() -> None:
    begin()
    group, other = dist.new_group([0, 1], group_desc="sizes"), dist.new_group([0, 1], group_desc="other")
    for each in (group, other):
        dist.all_reduce(torch.ones(4), group=each)
    clocks = []
    for size, which in (*((size, group) for size in SIZES), (BETWEEN, other)):
        data, clock = torch.zeros(size // 4), []
        for _ in range(TIMES):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(data, group=which)
            clock.append(time.perf_counter() - began)
        clocks.append(clock)
    say(clocks)
    end()


if __name__ == "__main__":
    main()
