"""The records of a training job that does not exist: eight ranks, 200 operations a step, 13 (group, op) pairs a rank.

Run as a script it writes their rings at the pace of real time until it is ended:
``python bench/synthetic.py DIRECTORY OPERATIONS_PER_SECOND [SLOTS]``.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1]))

from bench.common import OPS_PER_STEP
from commwatch.wire import events as ev
from commwatch.wire.identity import describe, ring_path
from commwatch.wire.ring import DEFAULT_SLOTS, HEARTBEAT, RingWriter

WORLD_SIZE = 8
JOB = "synthetic"
#: Groups by label: the members of rank 0's group of that kind, the others' lie ``shift`` further.
_STRIDES = {"default_pg": (8, 1), "data": (2, 2), "tensor": (2, 1), "pipeline": (2, 4), "expert": (4, 1)}
#: Groups that have as many ranks on each further node.
_ACROSS = ("default_pg", "data", "expert")
#: Operations of a step: group, op, how many, sizes in bytes they take in turn.
_STEP = (
    ("tensor", "all_reduce", 48, (4 << 20, 8 << 20)),
    ("tensor", "all_gather", 24, (8 << 20,)),
    ("tensor", "reduce_scatter", 24, (8 << 20,)),
    ("data", "all_reduce", 8, (4096,)),
    ("data", "reduce_scatter", 16, (25 << 20, 50 << 20)),
    ("data", "all_gather", 16, (25 << 20, 50 << 20)),
    ("expert", "all_to_all", 24, (2 << 20, 3 << 20)),
    ("expert", "all_reduce", 8, (1 << 20,)),
    ("pipeline", "send", 14, (16 << 20,)),
    ("pipeline", "recv", 14, (16 << 20,)),
    ("default_pg", "all_reduce", 2, (4, 8)),
    ("default_pg", "broadcast", 1, (1 << 20,)),
    ("default_pg", "barrier", 1, (0,)),
)


class _Planned(NamedTuple):
    """One operation of a step."""

    group: int
    op: str
    size: int


def _plan() -> list[_Planned]:
    """A step's operations, well mixed, in the same order for all ranks."""
    labels = list(_STRIDES)
    planned = [
        _Planned(labels.index(label), op, sizes[i % len(sizes)])
        for label, op, number, sizes in _STEP
        for i in range(number)
    ]
    assert len(planned) == OPS_PER_STEP
    random.Random(1).shuffle(planned)  # noqa: S311 - made-up data
    return planned


def _members(label: str, rank: int, nodes: int) -> tuple[int, ...]:
    """The ranks of this rank's group of that label."""
    size, stride = _STRIDES[label]
    first = rank - rank // stride % size * stride
    here = [first + i * stride for i in range(size)]
    return tuple(member + WORLD_SIZE * node for node in range(nodes if label in _ACROSS else 1) for member in here)


def _durations_ns(rank: int) -> list[int]:
    """Durations that this rank's operations take in turn: 50 µs to some ms, most of them short."""
    chance = random.Random(rank)  # noqa: S311 - made-up data
    return [round(50_000 + chance.lognormvariate(0, 1) * 150_000) for _ in range(997)]


class Rank:
    """One rank's ring.

    Args:
        directory: where rings lie.
        begin_ns: when its first step begins, on the clock of the records.
        per_second: operations a second, of the records' clock.
        nodes: how many the job has; this is a rank of the first.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        begin_ns: int,
        per_second: float,
        job: str = JOB,
        *,
        slots: int = DEFAULT_SLOTS,
        nodes: int = 1,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        identity = describe({"COMMWATCH_JOB": job, "LOCAL_RANK": str(rank)}, rank, WORLD_SIZE * nodes, hook="python")
        self.ring = RingWriter(ring_path(directory, job, 0, rank), identity, slots)
        self.rank = rank
        #: Records, and the operations among them.
        self.written = self._operations = 0
        self._begin_ns, self._period_ns = begin_ns, 1e9 / per_second
        self._plan, self._durations = _plan(), _durations_ns(rank)
        self._members = [_members(label, rank, nodes) for label in _STRIDES]
        self._seq: defaultdict[Any, Callable[[], int]] = defaultdict(lambda: count().__next__)
        self._last_end: dict[Any, int] = {}
        self._announce()

    def _announce(self) -> None:
        """The names file."""
        for small_id, (label, members) in enumerate(zip(_STRIDES, self._members, strict=True)):
            entry = {"group": small_id, "name": str(small_id), "desc": label, "label": label}
            group_id = f"{label}-{members[0]}"
            about = {"group_id": group_id, "ranks": members, "size": len(members), "aligned": True}
            self.ring.name({**entry, **about})
        self.ring.name({"dtype": 1, "name": "bfloat16"})

    def write_until(self, now_ns: int) -> int:
        """Write all that is over by then; returns the number of records."""
        due, before = int((now_ns - self._begin_ns) / self._period_ns), self.written
        while self._operations < due:
            self.write_next()
        self.ring.counters[HEARTBEAT] = now_ns
        return self.written - before

    def write_next(self) -> None:
        """Write the next operation, and after the last one of a step its mark."""
        planned = self._plan[self._operations % OPS_PER_STEP]
        self._operations += 1
        end = self._begin_ns + round(self._operations * self._period_ns)
        self._write(planned, end)
        self.written += 1
        if self._operations % OPS_PER_STEP == 0:
            self._mark(end)
            self.written += 1

    def _write(self, planned: _Planned, end: int) -> None:
        members, code = self._members[planned.group], ev.OP_CODE[planned.op]
        peer, queue, waited_us = -1, (planned.group, ""), 0
        launch = end - self._durations[self._operations % len(self._durations)]
        if planned.op in ev.P2P:
            peer = members[0] if self.rank != members[0] else members[1]
            queue, waited_us = (planned.group, planned.op), (end - launch) // 2000
        start = max(launch, min(self._last_end.get(queue, 0), end))
        self._last_end[queue] = end
        head = (code, 1, planned.group, peer, 0, planned.size, launch, self._seq[queue]())
        flags = ev.ASYNC | (ev.NO_SIZE if planned.op == "barrier" else 0)
        self.ring.write(*head, waited_us, start, end, flags, ev.BY_FUTURE, 0)

    def _mark(self, end: int) -> None:
        exposed = OPS_PER_STEP * 20_000
        head = (ev.STEP_MARK, 0, 0, 0, 0, exposed, end - 100_000, self._seq["step"]())
        self.ring.write(*head, 0, end - 100_000, end, ev.EXPOSED, 0, 0)


def write_at_pace(directory: Path, per_second: float, slots: int = DEFAULT_SLOTS, job: str = JOB) -> None:
    """All ranks' rings, in bursts of 10 ms, until this process is ended."""
    begin = time.monotonic_ns()
    ranks = [Rank(directory, rank, begin, per_second, job, slots=slots) for rank in range(WORLD_SIZE)]
    parent = os.getppid()
    while os.getppid() == parent:
        now = time.monotonic_ns()
        for rank in ranks:
            rank.write_until(now)
        time.sleep(max(0.0, 0.010 - (time.monotonic_ns() - now) / 1e9))


if __name__ == "__main__":
    write_at_pace(
        Path(sys.argv[1]),
        float(sys.argv[2]),
        int(sys.argv[3]) if len(sys.argv) > 3 else DEFAULT_SLOTS,
        sys.argv[4] if len(sys.argv) > 4 else JOB,
    )
