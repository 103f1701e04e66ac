"""A rank's own time before each collective: what it did since it left the communication before. Pure.

It is the time from the end of the previous symmetric operation that blocked the rank, of any group, to the launch of this one, without
the waits for messages and for operations with a root in between. Each rank has a small state that goes from record to record; the
functions here compute it for all records at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from commwatch.wire import events as ev
from commwatch_agent.ingest.collective_join import NOT_KNOWN_NS
from commwatch_agent.ingest.columns import Flags, Ints, counts
from commwatch_agent.ingest.own_time_state import OwnTime

#: Longer waits (39 hours) are cut off, so that the sums of a batch fit.
_MOST_NS = 1 << 47
#: Run of an operation that blocked the rank: none.
NO_RUN = -1


@dataclass
class Events:
    """What changes the states, record by record; arrays of shape [records]."""

    #: Index of the rank, and bounds of the ranks' records.
    ring: Ints
    bounds: list[tuple[int, int]]
    mark: Flags
    #: Times in it are not known: nothing that came before counts.
    lost: Flags
    #: A symmetric operation that blocked the rank; another one, or a message, that did; and for how long.
    left: Flags
    waited: Flags
    waited_ns: Ints
    #: A collective that is joined; it did not block the rank; it ran on a GPU.
    joined: Flags
    beside: Flags
    on_device: Flags
    launch: Ints
    end: Ints


class _States:
    """The states of the ranks as arrays of shape [ranks]."""

    came_out: Ints
    ended: Ints
    mark_before: Ints
    mark: Ints
    run: Ints
    before_run: Ints

    def __init__(self, states: Sequence[OwnTime], events: Events) -> None:
        rows = [(each.came_out_ns, each.ended_ns, *each.marks_ns, each.run_ns, each.before_run_ns) for each in states]
        self.came_out, self.ended, self.mark_before, self.mark, self.run, self.before_run = np.array(rows, np.int64).T
        bounds = np.array(events.bounds, np.int64)
        #: Ranks with records, and the places of the first and last record of each.
        self.some = np.flatnonzero(bounds[:, 0] < bounds[:, 1])
        self.first, self.last = bounds[self.some, 0], bounds[self.some, 1] - 1


def own_times(states: Sequence[OwnTime], events: Events) -> tuple[Ints, Ints]:
    """Return the own time before each record (``NOT_KNOWN_NS``: not known) and its run (``NO_RUN``: none); move the states on.

    Meaningful only for joined records.
    """
    now = _States(states, events)
    came_out = _came_out(now, events)
    runs, since = np.full(len(events.end), NO_RUN, np.int64), came_out.copy()
    at = np.flatnonzero(events.joined & events.beside)
    if len(at):
        runs[at] = np.maximum(came_out[at], _latest_marks(now, events, at))
    begins = _begins_of_runs(now, events.ring[at], runs[at])
    # Before an operation with a root, those that ran beside the computation may be all that there was, as with DDP.
    rooted = np.flatnonzero(events.joined & ~events.beside & ~events.left)
    ended, before = np.split(_ended(now, events, np.concatenate((at[begins], rooted))), [len(begins)])
    if len(at):
        since[at] = _since_runs(now, events, at, begins, came_out=came_out[at[begins]], ended=ended, runs=runs[at])
    since[rooted] = _later(came_out[rooted], before, events.launch[rooted])
    since[events.on_device] = 0  # the trainer's clock does not show when the GPU was ready
    known = (events.launch >= since) & (since > 0)
    _move(states, now, events)
    return np.where(known, events.launch - since, NOT_KNOWN_NS), runs


def _came_out(now: _States, events: Events) -> Ints:
    """Return ``came_out_ns`` before each record; move it on."""
    before = now.came_out[events.ring]
    sets = events.lost | events.left
    if not (sets | events.waited).any():
        return before
    total = np.cumsum(np.where(events.waited, np.minimum(events.waited_ns, _MOST_NS), 0))
    # Place of the latest record of the same rank that set the time; -1: none.
    latest = np.append(-1, np.flatnonzero(sets))[np.cumsum(sets)]
    starts = np.zeros(len(now.came_out), np.int64)
    starts[now.some] = now.first
    start = starts[events.ring]
    is_set = latest >= start
    base = np.where(is_set, np.where(events.left, events.end, 0)[latest], before)
    passed = total - np.where(is_set, total[latest], np.append(0, total)[start])
    after = np.where(base == 0, 0, np.minimum(base + passed, ev.MAX_PLAUSIBLE))
    inside = start < np.arange(len(total))
    before[inside] = after[np.flatnonzero(inside) - 1]
    now.came_out[now.some] = after[now.last]
    return before


def _latest_marks(now: _States, events: Events, at: Ints) -> Ints:
    """Return the latest step mark before each record ``at`` that is not later than its launch, of the last two."""
    marks = np.flatnonzero(events.mark)
    # The two marks that each rank has from before, then its own.
    ring = np.concatenate((np.repeat(np.arange(len(now.mark)), 2), events.ring[marks]))
    order = np.argsort(ring, kind="stable")
    ends: Ints = np.concatenate((np.stack((now.mark_before, now.mark), axis=1).ravel(), events.end[marks]))[order]
    number = np.cumsum(events.mark)[at] + 2 * events.ring[at] + 1
    latest: Ints = np.where(ends[number] <= events.launch[at], ends[number], ends[number - 1])
    return latest


def _begins_of_runs(now: _States, ring: Ints, run: Ints) -> Ints:
    """Return which records have another run than the record of their rank before; only of records with a run."""
    begins = np.ones(len(ring), np.bool_)
    begins[1:] = run[1:] != run[:-1]
    first = np.ones(len(ring), np.bool_)
    first[1:] = ring[1:] != ring[:-1]
    begins[first] = run[first] != now.run[ring[first]]
    return np.flatnonzero(begins)


def _ended(now: _States, events: Events, wanted: Ints) -> Ints:
    """Return ``ended_ns`` before the records ``wanted``; move it on."""
    ends = np.where(events.joined, events.end, 0)
    lost = np.flatnonzero(events.lost)
    # Highest end of each stretch between places where it is wanted, lost, or where another rank begins.
    places, which = np.unique(np.concatenate((now.first, lost, wanted)), return_inverse=True)
    if not len(places):
        return np.zeros(0, np.int64)
    highest = np.maximum.reduceat(ends, places).tolist()
    is_lost, rings = events.lost[places].tolist(), events.ring[places].tolist()
    before, ring, ended = [], -1, 0
    for of, lost_here, high in zip(rings, is_lost, highest, strict=True):
        if of != ring:
            if ring >= 0:
                now.ended[ring] = ended
            ring, ended = of, int(now.ended[of])
        before.append(ended)
        ended = high if lost_here else max(ended, high)
    now.ended[ring] = ended
    return np.array(before, np.int64)[which[len(which) - len(wanted) :]]


def _since_runs(
    now: _States, events: Events, at: Ints, begins: Ints, *, came_out: Ints, ended: Ints, runs: Ints
) -> Ints:
    """Return when the own time of the records ``at`` began, in runs that begin at ``begins`` of them; move the runs on."""
    launch, ring = events.launch[at[begins]], events.ring[at]
    begun = _later(came_out, ended, launch)
    number = np.cumsum(counts(begins, len(at))) - 1
    here = (number >= 0) & (ring[begins][number] == ring) if len(begins) else np.zeros(len(at), np.bool_)
    since = now.before_run[ring]
    since[here] = begun[number[here]]
    last = np.flatnonzero(np.append(ring[1:] != ring[:-1], True))
    now.run[ring[last]], now.before_run[ring[last]] = runs[last], since[last]
    return since


def _later(came_out: Ints, ended: Ints, launch: Ints) -> Ints:
    """Return ``ended`` where it is the later one and not after the launch, else ``came_out``."""
    later: Ints = np.where((came_out <= ended) & (ended <= launch), ended, came_out)
    return later


def _move(states: Sequence[OwnTime], now: _States, events: Events) -> None:
    """Store what the next records need."""
    marks = np.flatnonzero(events.mark)
    for ring, end in zip(events.ring[marks].tolist(), events.end[marks].tolist(), strict=True):
        now.mark_before[ring], now.mark[ring] = now.mark[ring], end
    rows = np.stack((now.came_out, now.ended, now.mark_before, now.mark, now.run, now.before_run), axis=1).tolist()
    for state, (came_out, ended, before, mark, run, before_run) in zip(states, rows, strict=True):
        state.came_out_ns, state.ended_ns, state.marks_ns = came_out, ended, (before, mark)
        state.run_ns, state.before_run_ns = run, before_run
