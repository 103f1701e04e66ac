"""All ranks compute, then communicate, until they are killed. One rank can be late.

Arguments: how many numbers, the late rank (-1: none), by how many ms it is late, how long all compute, in ms, and how they communicate:
``all_reduce``, ``all_to_all``, or ``buckets``: eight all_reduces that begin one after the other and are awaited together.
"""

import sys
import time

import torch
import torch.distributed as dist
from common import begin

import commwatch


def main() -> None:
    numbers, culprit, late_ms, work_ms = map(int, sys.argv[1:5])
    op, (rank, _) = sys.argv[5], begin()
    values, received = torch.ones(numbers), torch.empty(numbers)
    while True:
        time.sleep((work_ms + (late_ms if rank == culprit else 0)) / 1000)
        if op == "all_reduce":
            dist.all_reduce(values)
        elif op == "all_to_all":
            dist.all_to_all_single(received, values)
        else:
            for work in [dist.all_reduce(part, async_op=True) for part in values.chunk(8)]:
                work.wait()
        commwatch.step()


if __name__ == "__main__":
    main()
