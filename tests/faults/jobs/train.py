"""A small real job with one fault. Arguments: the shape of the job, the fault, the ranks at fault, and where and when it begins.

Prints the Unix time at which the fault begins, on the first rank at fault. The ranks meet in the file ``STORE`` of the environment. With
``DEVICE=cuda`` there, they communicate through NCCL, on the machine's GPUs in turn.
"""

import argparse
import itertools
import os
import random
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from faults import FAULTS, FOREVER_S, restart, restart_apart
from meetings import MEETINGS
from pauses import PAUSES
from rhythms import RHYTHMS
from shapes import SHAPES
from sides import SIDES
from work import WORK_S, Pace, Point, compute, point

ALL_SHAPES = SHAPES | RHYTHMS | MEETINGS | SIDES
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class Fault:
    """That of this rank: called before each step, or wherever its point is, also before it is due."""

    def __init__(self, arguments: argparse.Namespace, rank: int) -> None:
        self._arguments, self._rank = arguments, rank
        self._at_fault = [int(each) for each in arguments.ranks.split(",")]
        self.began, self.step, self.faulty = time.monotonic(), 0, 0

    def __call__(self) -> Any:
        arguments, for_s = self._arguments, time.monotonic() - self.began - self._arguments.after
        due = 0 <= for_s < arguments.lasts if arguments.at is None else self.step >= arguments.at
        if self._rank not in self._at_fault or not due:
            return None
        if not self.faulty and self._rank == self._at_fault[0]:
            print(time.time(), flush=True)
        self.faulty += 1
        return FAULTS[arguments.fault](self.faulty - 1)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=ALL_SHAPES)
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("ranks", help="at fault, with commas between them")
    parser.add_argument("--after", type=float, default=8.0, help="seconds of steps before the fault")
    parser.add_argument(
        "--at", type=int, help="the number of the step with which the fault begins, in place of --after"
    )
    parser.add_argument("--where", default="", help="the point of a step at which the fault happens")
    parser.add_argument("--lasts", type=float, default=FOREVER_S, help="seconds from its begin to its end")
    parser.add_argument("--work", type=float, default=WORK_S, help="seconds that a step computes")
    parser.add_argument("--busy", action="store_true", help="it takes a core's time, and not only time")
    parser.add_argument("--pause", choices=PAUSES, help="what all ranks do between some steps")
    parser.add_argument("--pause-at", default="", help="the numbers of these steps, with commas between them")
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    Pace.busy = arguments.busy
    torch.set_num_threads(1)
    # A file, because a port that was free a moment ago may be taken.
    store = f"file://{os.environ['STORE']}.{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    fault = Point.fault = Fault(arguments, rank)
    Point.name = arguments.where
    point("init")
    device = os.environ.get("DEVICE", "cpu")
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.set_default_device(device)
    dist.init_process_group(BACKENDS[device], init_method=store, rank=rank, world_size=size)
    random.seed(rank)
    step = ALL_SHAPES[arguments.shape]()
    pauses = dict(zip(map(int, filter(None, arguments.pause_at.split(","))), itertools.count()))
    fault.began = time.monotonic()
    for fault.step in itertools.count():
        compute(arguments.work)
        point("")
        try:
            if fault.step in pauses:
                PAUSES[arguments.pause](pauses[fault.step])
            step()
        except RuntimeError as error:  # a rank is gone: stay, as a job does until its launcher ends it
            print(error, file=sys.stderr)
            if FAULTS[arguments.fault] in (restart, restart_apart):
                FAULTS[arguments.fault](fault.faulty)
            time.sleep(FOREVER_S)


if __name__ == "__main__":
    main()
