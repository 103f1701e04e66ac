"""Steps of a known share of communication: a large all_reduce over a link of known rate, and a compute of known length.

Arguments: seconds the all_reduce takes, its bytes, steps of each kind, and the shares wanted. Says, for each share, apart and
overlapped, the number of the step mark before the first step, and of each step what this script's own clocks say: the share in
which the all_reduce was under way, and the share in which it was and this thread did not run.
"""

import sys
import threading
import time

import torch
import torch.distributed as dist
from common import begin, end, say

import commwatch

#: The training thread's CPU time, which another thread may read.
CPU = time.pthread_getcpuclockid(threading.get_ident())


def now() -> tuple[float, float]:
    """By the wall, and by this thread's CPU time."""
    return time.perf_counter(), time.clock_gettime(CPU)


def compute(seconds: float) -> None:
    """Busy for so long."""
    square = torch.ones(64, 64)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        square @ square


def apart(data: torch.Tensor, seconds: float) -> tuple[float, float]:
    """Compute, then communicate; how long that took by both clocks."""
    compute(seconds)
    wall, cpu = now()
    dist.all_reduce(data)
    wall_after, cpu_after = now()
    return wall_after - wall, cpu_after - cpu


def overlapped(data: torch.Tensor, seconds: float) -> tuple[float, float]:
    """Compute while communicating; how long that took by both clocks."""
    ended, over = list[tuple[float, float]](), threading.Event()
    wall, cpu = now()
    work = dist.all_reduce(data, async_op=True)

    def done(_: object) -> None:
        ended.append(now())
        over.set()

    work.get_future().add_done_callback(done)
    compute(seconds)
    work.wait()
    over.wait()
    return ended[0][0] - wall, ended[0][1] - cpu


def main() -> None:
    takes, size, steps = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    begin()
    data, marks = torch.ones(size // 4), 0
    dist.all_reduce(data)
    said = []
    for share in map(float, sys.argv[4:]):
        for step, seconds in ((apart, takes / share - takes), (overlapped, takes / share)):
            dist.barrier()
            commwatch.step()
            first, own = marks, []
            for _ in range(steps):
                began = time.perf_counter()
                wall, cpu = step(data, seconds)
                commwatch.step()
                took = time.perf_counter() - began
                own.append((wall / took, (wall - cpu) / took))
            marks += 1 + steps
            said.append((share, step is overlapped, first, own))
    say(said)
    end()


if __name__ == "__main__":
    main()
