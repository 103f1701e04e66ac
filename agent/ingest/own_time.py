"""A rank's own time before each collective: what it did since it left the communication before. Pure.

It is the time from the end of the previous symmetric operation that blocked the rank, of any group, to the launch of this one, without
the waits for messages and for operations with a root in between. Each rank has a small state that goes from record to record; the
functions here compute it for all records at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commwatch.collectors.wire import events as ev
from commwatch.ingest.collective_join import NOT_KNOWN_NS
from commwatch.ingest.columns import Flags, Ints
from commwatch.ingest.own_time_state import OwnTime

#: Longer waits (39 hours) are cut off, so that the sums of a batch fit.
_MOST_NS = 1 << 47
#: Run of an operation that blocked the rank: none.
NO_RUN = -1


@dataclass
class Events:
    """What changes the state, record by record; arrays of shape [records]."""

    #: Bounds of the ranks' records.
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


def own_times(states: list[OwnTime], events: Events) -> tuple[Ints, Ints]:
    """Return the own time before each record (``NOT_KNOWN_NS``: not known) and its run (``NO_RUN``: none); move the states on.

    Meaningful only for joined records.
    """
    came_out = _came_out(states, events)
    ended = _ended(states, events)
    runs, since = np.full(len(events.end), NO_RUN, np.int64), came_out.copy()
    at = np.flatnonzero(events.joined & events.beside)
    if len(at):
        runs[at], since[at] = _runs(states, events, at, came_out[at], ended[at])
    since[events.on_device] = 0  # the trainer's clock does not show when the GPU was ready
    known = (events.launch >= since) & (since > 0)
    _move_marks(states, events)
    return np.where(known, events.launch - since, NOT_KNOWN_NS), runs


def _came_out(states: list[OwnTime], events: Events) -> Ints:
    """Return ``came_out_ns`` before each record; leave that after the last one in the states."""
    changes = np.flatnonzero(events.lost | events.left | events.waited)
    before = np.empty(len(events.end), np.int64)
    added = np.where(events.waited, np.minimum(events.waited_ns, _MOST_NS), 0)
    total = np.cumsum(added)
    new = np.where(events.left, events.end, 0)
    sets = np.where(events.lost | events.left, np.arange(len(new)), -1)
    latest = np.maximum.accumulate(sets) if len(changes) else sets
    for state, (since, until) in zip(states, events.bounds, strict=True):
        if since == until:
            continue
        at = latest[since:until]
        base = np.where(at >= since, new[at], state.came_out_ns)
        start = total[since - 1] if since else 0
        passed = total[since:until] - np.where(at >= since, total[at], start)
        after = np.where(base == 0, 0, base + passed)
        before[since], before[since + 1 : until] = state.came_out_ns, after[:-1]
        state.came_out_ns = min(int(after[-1]), ev.MAX_PLAUSIBLE)
    return before


def _ended(states: list[OwnTime], events: Events) -> Ints:
    """Return ``ended_ns`` before each record; leave that after the last one in the states."""
    before = np.empty(len(events.end), np.int64)
    ends = np.where(events.joined, events.end, 0)
    lost = np.flatnonzero(events.lost)
    for state, (since, until) in zip(states, events.bounds, strict=True):
        cuts, carried = lost[np.searchsorted(lost, since) : np.searchsorted(lost, until)].tolist(), state.ended_ns
        for first, last in zip([since, *cuts], [*cuts, until], strict=True):
            if first < last:
                highest = np.maximum(np.maximum.accumulate(ends[first:last]), carried)
                before[first], before[first + 1 : last] = state.ended_ns, highest[:-1]
                state.ended_ns = int(highest[-1])
            carried = 0
    return before


def _runs(states: list[OwnTime], events: Events, at: Ints, came_out: Ints, ended: Ints) -> tuple[Ints, Ints]:
    """Return the run of the records ``at``, which did not block their rank, and when their own time began."""
    before, latest = _marks(states, events)
    launch, since = events.launch[at], np.empty(len(at), np.int64)
    run = np.maximum(came_out, np.where(latest[at] <= launch, latest[at], before[at]))
    begun = np.where((came_out <= ended) & (ended <= launch), ended, came_out)
    for state, (first, last) in zip(states, events.bounds, strict=True):
        mine = slice(*np.searchsorted(at, (first, last)).tolist())
        if mine.start == mine.stop:
            continue
        changed = np.empty(mine.stop - mine.start, np.bool_)
        changed[0], changed[1:] = run[mine.start] != state.run_ns, run[mine][1:] != run[mine][:-1]
        places = np.maximum.accumulate(np.where(changed, np.arange(len(changed)), -1))
        since_run = np.where(places >= 0, begun[mine][places], state.before_run_ns)
        since[mine] = since_run
        state.run_ns, state.before_run_ns = int(run[mine.stop - 1]), int(since_run[-1])
    return run, since


def _marks(states: list[OwnTime], events: Events) -> tuple[Ints, Ints]:
    """Return the last mark but one, and the last mark, before each record."""
    before, latest = np.empty(len(events.end), np.int64), np.empty(len(events.end), np.int64)
    for state, (since, until) in zip(states, events.bounds, strict=True):
        marks = np.flatnonzero(events.mark[since:until]) + since
        ends = [*state.marks_ns, *events.end[marks].tolist()]
        cuts = marks.tolist()
        for number, (first, last) in enumerate(zip([since, *cuts], [*cuts, until], strict=True)):
            before[first:last], latest[first:last] = ends[number], ends[number + 1]
    return before, latest


def _move_marks(states: list[OwnTime], events: Events) -> None:
    for state, (since, until) in zip(states, events.bounds, strict=True):
        ends = [*state.marks_ns, *events.end[since:until][events.mark[since:until]].tolist()]
        state.marks_ns = ends[-2], ends[-1]
