"""What the live page has to show of a job, computed from the rings of all its ranks and from nothing else."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice, pairwise, takewhile
from statistics import median
from typing import Any, NamedTuple

import pytest

from tests.e2e.torchjob import RankRecords

SLOT_NS = 10_000_000_000
#: Percentiles are those of bins this wide, relatively.
BIN = 0.025


class Step(NamedTuple):
    """One step of one rank: its end in Unix time, its length, and how much of it operations took; in ns."""

    rank: int
    seq: int
    end_ns: int
    took_ns: int
    comm_ns: int


def steps_of(ring: RankRecords) -> list[Step]:
    """The steps of a rank, in their order."""
    found, wall_ns, busy = [], int(ring.identity["wall_offset_ns"]), busy_intervals(ring)
    first = 0
    for before, mark in pairwise(ring.marks):
        begin, end = before.end_ns, mark.end_ns
        while first < len(busy) and busy[first][1] <= begin:
            first += 1
        inside = takewhile(lambda each: each[0] < end, islice(busy, first, None))  # noqa: B023
        comm_ns = sum(min(end, until) - max(begin, start) for start, until in inside)
        found.append(Step(ring.rank, mark.seq, end + wall_ns, end - begin, comm_ns))
    return found


def busy_intervals(ring: RankRecords) -> list[tuple[int, int]]:
    """The intervals in which at least one operation ran, in their order; none touches another."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted((each.start_ns, each.end_ns) for each in ring.operations):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


class Operation(NamedTuple):
    """One operation of one rank: its group and name, its end in Unix time, its length in ns, its bytes and those on the bus."""

    group: str
    op: str
    end_ns: int
    took_ns: int
    size: int
    bus_bytes: float


def operations_of(ring: RankRecords) -> Iterator[Operation]:
    """The operations of a rank; all of them are all_reduce."""
    wall_ns = int(ring.identity["wall_offset_ns"])
    for one in ring.of("all_reduce"):
        group = ring.groups[one.group]
        factor = 2 * (group["size"] - 1) / group["size"]
        yield Operation(
            group["label"], "all_reduce", one.end_ns + wall_ns, one.end_ns - one.start_ns, one.size_bytes,
            factor * one.size_bytes,
        )  # fmt: skip


def nearest_rank(values: list[int], q: float) -> float:
    """A percentile in seconds, by nearest rank."""
    return sorted(values)[max(1, math.ceil(q * len(values))) - 1] / 1e9


def by_kind(rings: list[RankRecords], since: float = 0) -> list[tuple[tuple[str, str], list[Operation]]]:
    """The operations that ended since a moment in Unix time, by group and op."""
    by: dict[tuple[str, str], list[Operation]] = defaultdict(list)
    for ring in rings:
        for one in operations_of(ring):
            if one.end_ns >= since * 1e9:
                by[one.group, one.op].append(one)
    return sorted(by.items())


def table(rings: list[RankRecords]) -> list[dict[str, Any]]:
    """The rows of the table of operations, by group and op."""
    return [
        {
            "by": {"group": group, "op": op},
            "count": len(found),
            "bytes": sum(one.size for one in found),
            "seconds": pytest.approx(sum(one.took_ns for one in found) / 1e9),
            "p50_s": pytest.approx(nearest_rank([one.took_ns for one in found], 0.5), rel=BIN),
            "p99_s": pytest.approx(nearest_rank([one.took_ns for one in found], 0.99), rel=BIN),
            "busbw": pytest.approx(rate(found)),
        }
        for (group, op), found in by_kind(rings)
    ]


def lately(rings: list[RankRecords], since: float) -> list[dict[str, Any]]:
    """The rows of the table of operations that ended since a moment in Unix time, by group and op.

    The ranks' records come in the order of their completion, so that one at that moment may be before it.
    """
    return [
        {
            "by": {"group": group, "op": op},
            "count": pytest.approx(len(found), abs=2 * len(rings)),
            "p50_s": pytest.approx(nearest_rank([one.took_ns for one in found], 0.5), rel=2 * BIN),
            "busbw": pytest.approx(rate(found), rel=0.01 + 2 * len(rings) / len(found)),
        }
        for (group, op), found in by_kind(rings, since)
    ]


def tiles(steps: list[Step], until: int) -> list[tuple[float, float]]:
    """What a rank's line may show: the median length in s of its latest steps up to number ``until``, and their share of communication.

    A pair for each number of steps, as a page's line covers those of the 10 s before a moment that only the agent knows.
    """
    latest = [step for step in steps if step.seq <= until][-1000:]
    found = []
    for first in range(len(latest)):
        some = latest[first:]
        took_ns = sum(step.took_ns for step in some)
        found.append((median(step.took_ns for step in some) / 1e9, sum(step.comm_ns for step in some) / took_ns))
    return found


def slots(rings: list[RankRecords], long: set[tuple[int, int]]) -> list[dict[str, Any]]:
    """The points of the plots, one each 10 s; ``long``: rank and number of the steps that are in none."""
    steps: dict[int, list[Step]] = defaultdict(list)
    operations: dict[int, list[Operation]] = defaultdict(list)
    for ring in rings:
        for step in steps_of(ring):
            if (step.rank, step.seq) not in long:
                steps[step.end_ns // SLOT_NS].append(step)
        for one in operations_of(ring):
            operations[one.end_ns // SLOT_NS].append(one)
    return [
        {
            "at": (slot + 1) * SLOT_NS / 1e9,
            "comm": share(steps[slot]) if steps[slot] else None,
            # The ranks' records come in the order of their completion, so that one at an edge may be in the next slot.
            "busbw": {"all_reduce": pytest.approx(rate(found), rel=0.01 + 2 / len(found))},
        }
        for slot, found in sorted(operations.items())
    ]


def share(steps: list[Step]) -> Any:
    """The share of communication in steps."""
    return pytest.approx(sum(step.comm_ns for step in steps) / sum(step.took_ns for step in steps), rel=1e-4)


def rate(operations: list[Operation]) -> float:
    """Bus bytes per second."""
    return sum(one.bus_bytes for one in operations) / sum(one.took_ns for one in operations) * 1e9
