"""Leaves the interpreter in an ordinary way, with works in flight and groups that nobody destroyed; argument: exit code."""

import os
import sys

import torch
import torch.distributed as dist
from common import begin

#: Until the interpreter ends.
kept: list[object] = []


def main() -> None:
    rank, _ = begin()
    dist.all_reduce(torch.ones(4))
    dist.barrier()
    flying = [dist.all_reduce(torch.ones(1 << 16), async_op=True) for _ in range(20)]
    flying += [dist.reduce_scatter_single(torch.zeros(2), torch.ones(4), async_op=True)]
    flying += [dist.irecv(torch.ones(4), 1 - rank)]
    kept.extend(flying)
    os.write(1, b"job done\n")
    sys.exit(int(sys.argv[1]))


if __name__ == "__main__":
    main()
