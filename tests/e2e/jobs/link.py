"""Two ranks on a link of known rate: one large all_reduce, and the same bytes as eight queued at once; says its own clock, of both in turn."""

import time

import torch
import torch.distributed as dist
from common import begin, end, say

MIB = 1 << 18  # floats


def main() -> None:
    begin()
    single, queued = dist.new_group([0, 1], group_desc="single"), dist.new_group([0, 1], group_desc="queued")
    for group in (None, single, queued):
        dist.barrier(group=group)
        dist.all_reduce(torch.ones(4), group=group)
    clock = []
    big, parts = torch.ones(8 * MIB), [torch.ones(MIB) for _ in range(8)]
    for _ in range(3):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(big, group=single)
        clock.append(time.perf_counter() - began)
        dist.barrier()
        began = time.perf_counter()
        for work in [dist.all_reduce(part, group=queued, async_op=True) for part in parts]:
            work.wait()
        clock.append(time.perf_counter() - began)
    say(clock)
    end()


if __name__ == "__main__":
    main()
