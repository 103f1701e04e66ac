"""How the ranks of a job compute: asleep or busy, and how many times as long as without a fault."""

import time
from typing import Any

#: What a step computes without a fault, and a micro-batch or a layer, in seconds.
WORK_S, PIECE_S = 0.03, 0.004
#: How many times as long a slow rank takes.
SLOW_TIMES = 3.0


class Pace:
    """Of this rank."""

    busy = False
    times = 1.0


class Weights:
    """Of this rank's model, if it has one."""

    tensors: tuple[Any, ...] = ()


def compute(seconds: float) -> None:
    """Take so long; busy, so much time of a core."""
    if not Pace.busy:
        time.sleep(Pace.times * seconds)
        return
    end = time.thread_time() + Pace.times * seconds
    while time.thread_time() < end:
        pass
