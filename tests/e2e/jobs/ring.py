"""All ranks compute, then run one all_reduce over the job, until they are killed. One rank can be late.

Arguments: how many numbers, the late rank (-1: none), by how many ms it is late, and how long all compute, in ms.
"""

import sys
import time

import torch
import torch.distributed as dist
from common import begin

import commwatch


def main() -> None:
    numbers, culprit, late_ms, work_ms = map(int, sys.argv[1:5])
    rank, _ = begin()
    values = torch.ones(numbers)
    while True:
        time.sleep((work_ms + (late_ms if rank == culprit else 0)) / 1000)
        dist.all_reduce(values)
        commwatch.step()


if __name__ == "__main__":
    main()
