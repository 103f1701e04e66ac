"""How the ranks of a job compute: asleep or busy, and how many times as long as without a fault; and where in a step a fault happens."""

import time
from collections.abc import Callable
from typing import Any

#: What a step computes without a fault, and a micro-batch or a layer, in seconds.
WORK_S, PIECE_S = 0.03, 0.004
#: How many times as long a slow rank takes.
SLOW_TIMES = 3.0


class Pace:
    """Of this rank."""

    busy = False
    times = 1.0


class Point:
    """Where this rank's fault happens; without a name, before each step."""

    name = ""
    fault: Callable[[], Any]


def point(name: str) -> Any:
    """A place of which a fault may be; returns what the fault returns: whether to leave out what follows."""
    return Point.fault() if name == Point.name else None


class Agreed:
    """What the ranks agree on without a fault: the root, and how much more goes to the next rank."""

    root = 0
    more = 0


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
