"""All ranks run all_reduce over the job and then over their node, until they are killed. One rank can be late to those over the job.

Arguments: the late rank, how many numbers, ``steps`` where each round is a step.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from common import begin

import commwatch


def main() -> None:
    culprit, numbers, steps = int(sys.argv[1]), int(sys.argv[2]), "steps" in sys.argv[3:]
    rank, size = begin()
    per_node = int(os.environ["PER_NODE"])
    nodes = [list(range(first, first + per_node)) for first in range(0, size, per_node)]
    mine = [dist.new_group(ranks, group_desc="node") for ranks in nodes][rank // per_node]
    while True:
        if rank == culprit:
            time.sleep(0.1)
        dist.all_reduce(torch.ones(numbers))
        dist.all_reduce(torch.ones(10), group=mine)
        if steps:
            commwatch.step()


if __name__ == "__main__":
    main()
