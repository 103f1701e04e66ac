"""Steps of a known share of communication: a large all_reduce over a link of known rate, and a compute of known length.

Arguments: seconds the all_reduce takes, its bytes, steps of each kind, and the shares wanted. Says, for each share, apart and
overlapped, the numbers of the first and the last of its step marks.
"""

import sys
import time

import torch
import torch.distributed as dist
from common import begin, end, say

import commwatch


def compute(seconds: float) -> None:
    """Busy for so long."""
    square = torch.ones(64, 64)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        square @ square


def main() -> None:
    takes, size, steps = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    begin()
    data, marks = torch.ones(size // 4), 0
    dist.all_reduce(data)
    said = []
    for share in map(float, sys.argv[4:]):
        for overlapped in (False, True):
            dist.barrier()
            commwatch.step()
            first, marks = marks, marks + 1
            for _ in range(steps):
                if overlapped:
                    work = dist.all_reduce(data, async_op=True)
                    compute(takes / share)
                    work.wait()
                else:
                    compute(takes / share - takes)
                    dist.all_reduce(data)
                commwatch.step()
                marks += 1
            said.append((share, overlapped, first, marks - 1))
    say(said)
    end()


if __name__ == "__main__":
    main()
