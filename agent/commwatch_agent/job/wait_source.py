"""Reads the collectives of groups that span nodes from the raw records of this node, for the waits in a report on all nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from commwatch.wire import events as ev
from commwatch.wire.numbers import HALF, NUMBERS
from commwatch_agent.history.extents import Filter
from commwatch_agent.history.history import History
from commwatch_agent.history.rows import RingRow
from commwatch_agent.ingest.columns import Flags, Ints, classes
from commwatch_agent.job.packed import packed
from commwatch_agent.job.wait_parts import MOST_NS, RUN, GroupPart, Kind, WaitPart
from commwatch_agent.model.cells import MOST_APART, SLOT_NS
from commwatch_agent.model.records import RECORD

#: Most parts of collectives that are read, of all ranks; and most seconds for that.
MOST_PARTS, MOST_S = 1 << 20, 3.0
#: The latest collectives of a group, so many, are runs of their own: another node may not have all of them yet, or any more.
ALONE = 512
_PART = np.dtype(
    [("seq", "<u4"), ("duration", "<i8"), ("slot", "<i4"), ("op", "u1"), ("size", "u1"), ("startup", "u1")]
)
_Parts = npt.NDArray[Any]
_Bytes = npt.NDArray[np.uint8]
_CODES = np.array(sorted(ev.OP_CODE[op] for op in ev.SYMMETRIC), np.uint8)


class _Group(NamedTuple):
    """A group in one life of the job."""

    restart: int
    group_id: str
    size: int


class _Times(NamedTuple):
    """Of a ring, in ns: what makes its clock Unix time, and when its first step began in Unix time."""

    offset_ns: int
    first_step_ns: int


def wait_part(path: Path, job_id: str, most: int, clock: Callable[[], float] = time.monotonic) -> WaitPart:
    """Return the latest collectives of a job's groups that span nodes, as far as they can be read in ``MOST_S`` seconds.

    Args:
        most: most collectives of all groups together.
        clock: monotonic seconds.
    """
    end_s = clock() + MOST_S
    with History(path) as history:
        history.freeze()
        rings = _latest(history.rings(job_id))
        here, numbers = _spanning(history, rings)
        first_step = history.first_steps(list(numbers))
        read: dict[_Group, dict[int, list[_Parts]]] = {group: {} for group in here}
        left = MOST_PARTS
        # Latest first, so that what is left out is the beginning of the job.
        for chunk in history.chunks(0, ev.MAX_PLAUSIBLE, list(numbers), Filter(groups=numbers)):
            ring = rings[chunk.ring]
            times = _Times(ring.wall_offset_ns, first_step.get(ring.id, ev.MAX_PLAUSIBLE))
            for number, parts in _parts(chunk.records, times, list(numbers[ring.id])):
                read[numbers[ring.id][number]].setdefault(ring.rank, []).append(parts)
                left -= len(parts)
            if left <= 0 or clock() > end_s:
                break
    found = []
    for group, ranks in here.items():
        part = group_part(group, sorted(ranks), read.pop(group), max(1, most // len(here)))
        found += [] if part is None else [part]
    return WaitPart(found)


def _latest(rings: Iterable[RingRow]) -> dict[int, RingRow]:
    """Return the rings of the latest process of each rank in each life of the job, by id: numbers of collectives begin again in each."""
    every = list(rings)
    last = {(ring.restart, ring.rank): ring.process for ring in every}
    return {ring.id: ring for ring in every if ring.process == last[ring.restart, ring.rank]}


def _spanning(
    history: History, rings: Mapping[int, RingRow]
) -> tuple[dict[_Group, set[int]], dict[int, dict[int, _Group]]]:
    """Return the ranks on this node of each group with ranks on other nodes, and these groups by ring and number in it."""
    here: dict[_Group, set[int]] = {}
    numbers: dict[int, dict[int, _Group]] = {}
    for (at, number), info in history.groups(list(rings)).items():
        if info.aligned and info.size > 1 and number < MOST_APART:
            group = _Group(rings[at].restart, info.group_id, info.size)
            here.setdefault(group, set()).add(rings[at].rank)
            numbers.setdefault(at, {})[number] = group
    here = {group: ranks for group, ranks in here.items() if len(ranks) < group.size}
    kept = {at: {number: group for number, group in of.items() if group in here} for at, of in numbers.items()}
    return here, {at: of for at, of in kept.items() if of}


def _parts(records: bytes, times: _Times, numbers: list[int]) -> Iterator[tuple[int, _Parts]]:
    """Yield number of the group and parts of its collectives that an agent joins (``RecordBatch._joined``)."""
    raw = np.frombuffer(records, RECORD)
    sound = (raw["launch"] <= raw["end"]) & (raw["start"] <= raw["end"]) & (raw["end"] < ev.MAX_PLAUSIBLE)
    timed = (raw["timing"] != ev.COUNTED) & (raw["flags"] & (ev.FAILED | ev.UNTIMED | ev.NOT_JOINED) == 0)
    late = (raw["timing"] == ev.BY_WAIT) & (raw["flags"] & ev.ASYNC != 0)
    short = raw["end"] - raw["start"] <= MOST_NS
    wanted = (
        sound & timed & ~late & short & (raw["size"] < ev.MAX_PLAUSIBLE) & (raw["op"][:, None] == _CODES).any(axis=1)
    )
    for number in numbers:
        some = raw[wanted & (raw["group"] == number)]
        if len(some):
            parts = np.empty(len(some), _PART)
            parts["seq"], parts["op"] = some["seq"], some["op"]
            parts["duration"] = some["end"] - some["start"]
            at = some["end"].astype(np.int64) + times.offset_ns
            parts["slot"], parts["startup"] = at // SLOT_NS, at <= times.first_step_ns
            parts["size"] = classes(some["size"].astype(np.int64))
            yield number, parts


def group_part(group: _Group, ranks: list[int], read: dict[int, list[_Parts]], most: int) -> GroupPart | None:
    """Return the latest collectives of a group that all its ranks on this node have recorded; ``None``: there are none."""
    some = next((int(parts["seq"][0]) for of_rank in read.values() for parts in of_rank), 0)
    since = np.uint32((some - HALF) % NUMBERS)
    of_ranks = [_in_order(read.pop(rank, []), since) for rank in ranks]
    seq = of_ranks[0]["seq"]
    for parts in of_ranks[1:]:
        seq = np.intersect1d(seq, parts["seq"], assume_unique=True)
    seq = seq[-most:]
    of_ranks = [parts[np.searchsorted(parts["seq"], seq)] for parts in of_ranks]
    ops = of_ranks[0]["op"]
    alike = np.flatnonzero(np.logical_and.reduce([parts["op"] == ops for parts in of_ranks]))
    if not len(alike):
        return None
    slot = np.maximum.reduce([parts["slot"] for parts in of_ranks]).astype(np.int64)[alike]
    startup = np.logical_and.reduce([parts["startup"] for parts in of_ranks]).astype(np.uint8)
    sizes = np.column_stack([parts["size"] for parts in of_ranks])
    found, kind = _kinds(ops[alike], startup[alike], sizes[alike])
    duration = np.column_stack([parts["duration"] for parts in of_ranks])
    of_ranks.clear()
    order = np.lexsort((slot, kind))  # stable: in the order of their numbers
    kind, slot, seq, duration = kind[order], slot[order], seq[alike][order], duration[alike][order]
    begins = _runs(kind, slot, order >= len(order) - ALONE)
    return GroupPart(
        restart=group.restart,
        group_id=group.group_id,
        group_size=group.size,
        ranks=ranks,
        kinds=found,
        seq=packed((seq + since).astype(np.int64)),
        shortest_ns=packed(duration.min(axis=1)),
        kind=packed(kind[begins]),
        slot=packed(slot[begins]),
        length=packed(np.diff(np.append(begins, len(kind)))),
        duration_ns=packed(np.add.reduceat(duration, begins, axis=0)),
    )


def _in_order(read: list[_Parts], since: np.uint32) -> _Parts:
    """Return the parts of one rank by number, counted from ``since``; without those whose number comes twice."""
    every = np.concatenate([np.empty(0, _PART), *read])
    every["seq"] -= since  # it wraps as the numbers do
    parts = every[every["seq"].argsort(kind="stable")]
    differs = np.append(True, parts["seq"][1:] != parts["seq"][:-1])[: len(parts)]
    once: _Parts = parts[differs & np.append(differs[1:], True)[: len(parts)]]
    return once


def _kinds(ops: _Bytes, startup: _Bytes, sizes: _Bytes) -> tuple[list[Kind], Ints]:
    """Return the different kinds, and which one each collective is; ``sizes``: classes plus 1, of shape [collectives, ranks]."""
    rows = np.ascontiguousarray(np.column_stack((ops, startup, sizes)))
    _, first, which = np.unique(
        rows.view(np.dtype((np.void, rows.shape[1]))).ravel(), return_index=True, return_inverse=True
    )
    kinds = [
        Kind(ev.OPS[op - 1], [1 << of - 1 if of else None for of in by_rank], early > 0)
        for op, early, *by_rank in rows[first].tolist()
    ]
    return kinds, which.astype(np.int64)


def _runs(kind: Ints, slot: Ints, alone: Flags) -> Ints:
    """Return where the runs begin; those that are ``alone`` are the last ones of their kind and slot."""
    starts = np.flatnonzero(np.append(True, (kind[1:] != kind[:-1]) | (slot[1:] != slot[:-1])))
    place = np.arange(len(kind)) - np.repeat(starts, np.diff(np.append(starts, len(kind))))
    return np.flatnonzero((place % RUN == 0) | alone)
