"""A small real job with one fault. Arguments: the shape of the job, the fault, the ranks at fault, and when it begins.

Prints the Unix time at which the fault begins, on the first rank at fault. The ranks meet in the file ``STORE`` of the environment.
"""

import argparse
import itertools
import os
import random
import sys
import time

import torch
import torch.distributed as dist
from faults import FAULTS, FOREVER_S, restart
from shapes import SHAPES
from work import WORK_S, Pace, compute


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("ranks", help="at fault, with commas between them")
    parser.add_argument("--after", type=float, default=8.0, help="seconds of steps before the fault")
    parser.add_argument(
        "--at", type=int, help="the number of the step with which the fault begins, in place of --after"
    )
    parser.add_argument("--lasts", type=float, default=FOREVER_S, help="seconds from its begin to its end")
    parser.add_argument("--work", type=float, default=WORK_S, help="seconds that a step computes")
    parser.add_argument("--busy", action="store_true", help="it takes a core's time, and not only time")
    arguments = parser.parse_args()
    Pace.busy = arguments.busy
    torch.set_num_threads(1)
    # A file, because a port that was free a moment ago may be taken.
    store = f"file://{os.environ['STORE']}.{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    random.seed(rank)
    at_fault = [int(each) for each in arguments.ranks.split(",")]
    step, fault = SHAPES[arguments.shape](), FAULTS[arguments.fault]
    began, faulty = time.monotonic(), 0
    for number in itertools.count():
        compute(arguments.work)
        for_s = time.monotonic() - began - arguments.after
        due = 0 <= for_s < arguments.lasts if arguments.at is None else number >= arguments.at
        if rank in at_fault and due:
            if not faulty and rank == at_fault[0]:
                print(time.time(), flush=True)
            fault(faulty)
            faulty += 1
        try:
            step()
        except RuntimeError as error:  # a rank is gone: stay, as a job does until its launcher ends it
            print(error, file=sys.stderr)
            if fault is restart:
                restart(faulty)
            time.sleep(FOREVER_S)


if __name__ == "__main__":
    main()
