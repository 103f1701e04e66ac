"""A trainer that does not exist, and is made to be killed: it writes a ring, and counts beside it what it wrote.

``python bench/counted_writer.py RING COUNT JOB SLOTS PER_SECOND`` says ``ready`` once the ring is there, begins when it is sent a line, and goes
on until it is killed or its standard input closes. The n-th record has the sequence number n. The file COUNT holds, in eight bytes, how many
have been written: at most one less than there are.
"""

from __future__ import annotations

import mmap
import os
import select
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from commwatch.wire import events as ev
from commwatch.wire.identity import describe
from commwatch.wire.ring import HEARTBEAT, RingWriter


def main(path: Path, count: Path, job: str, slots: int, per_second: float) -> None:
    """Write at that pace, in bursts of 10 ms."""
    fd = os.open(count, os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 8)
    counter = memoryview(mmap.mmap(fd, 8)).cast("Q")
    path.parent.mkdir(parents=True, exist_ok=True)
    ring = RingWriter(path, describe({"COMMWATCH_JOB": job}, 0, 1, hook="python"), slots)
    about = {"group": 0, "name": "0", "desc": "default_pg", "label": "default_pg", "group_id": job}
    ring.name({**about, "ranks": [0], "size": 1, "aligned": True})
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.monotonic()
    while not select.select([sys.stdin], [], [], 0.010)[0]:
        now_ns = time.monotonic_ns()
        for n in range(counter[0], int((time.monotonic() - begin) * per_second)):
            head = (ev.OP_CODE["all_reduce"], 0, 0, -1, 0, 4096, now_ns - 1000, n, 0)
            ring.write(*head, now_ns - 1000, now_ns, 0, ev.BY_FUTURE, 0)
            counter[0] = n + 1
        ring.counters[HEARTBEAT] = now_ns


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))
