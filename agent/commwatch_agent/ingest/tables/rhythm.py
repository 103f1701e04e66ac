"""How long a rank usually is in an operation, and between operations, by the place in its work. Pure.

A place is what the rank does (group, op and size class; or the end of a step) after what it did before: the work of a job repeats, and the
same operation may be quick in a step and long after an epoch. What is kept does not grow: the latest ``MOST`` places, and the latest
``MOST_LONG`` times of more than ``LONG_NS``.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from commwatch.wire import events as ev
from commwatch_agent.ingest.columns import Columns, Ints, classes
from commwatch_agent.model.shares import Account
from commwatch_agent.model.views import Usual

Places = npt.NDArray[np.uint32]
#: Most places that are kept, and so few without room for them; their size in bytes.
MOST, _LEAST, _BYTES = 2048, 256, 12
#: Longer times are kept one by one, so many of them.
LONG_NS, MOST_LONG = 1_000_000_000, 128
#: Numbers of places before one that tell it from others, most first; and how often a place with so many before it must have occurred.
_BEFORE, _OFTEN = (8, 4, 2, 1), 20
_MESSAGES = [ev.OP_CODE[name] for name in sorted(ev.P2P)]
#: The place of a step mark.
_STEP = 0


class _Long(NamedTuple):
    """A long time in an operation, with its place and those before it; or between operations, with the places before it."""

    places: tuple[int, ...]
    took_ns: int


class Rhythm:
    """The places of one rank; the caller adds its records in their order."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._places: Places = np.zeros(0, np.uint32)
        self._ends: Ints = np.zeros(0, np.int64)
        self._most = 0
        self._waits: deque[_Long] = deque(maxlen=MOST_LONG)
        self._absences: deque[_Long] = deque(maxlen=MOST_LONG)

    def add(self, places: Places, columns: Columns) -> None:
        """Add operations that have ended, and step marks."""
        if not self._most:
            self._most = MOST if self._account.take(MOST * _BYTES) else _LEAST
        first = len(self._places)
        all_places, all_ends = np.append(self._places, places), np.append(self._ends, columns.end)
        before_ns = np.maximum.accumulate(all_ends)
        took_ns = _took_ns(columns)
        for at in np.flatnonzero((took_ns > LONG_NS) & (places != _STEP))[-MOST_LONG:].tolist():
            self._waits.append(_Long(_until(all_places, first + at + 1), int(took_ns[at])))
        since = max(0, 1 - first)  # nothing is known before the first one
        absent_ns = columns.launch[since:] - before_ns[first + since - 1 : len(all_ends) - 1]
        for at in np.flatnonzero(absent_ns > LONG_NS)[-MOST_LONG:].tolist():
            self._absences.append(_Long(_until(all_places, first + since + at), int(absent_ns[at])))
        self._places, self._ends = all_places[-self._most :], all_ends[-self._most :]

    def inside(self, group: int, op: int, size: int | None, launch_ns: int) -> Usual:
        """Return what is known of the place of an operation in flight: after what ended last, or after what had ended at its launch.

        Operations may run beside each other, so the place that occurred more often is meant.
        """
        own = place(group, op, size)
        began = int((self._ends <= launch_ns).sum())
        pasts = {_until(self._places, until) for until in (len(self._places), began)}
        return max((self._usual((*past, own), self._waits, 1) for past in pasts), key=lambda usual: usual.times)

    def absent_before_ns(self, launch_ns: int) -> int | None:
        """Return for how long the rank was in no operation before one that it launched then; ``None``: not known."""
        before = self._ends[self._ends <= launch_ns]
        return launch_ns - int(before.max()) if len(before) else None

    def absent(self) -> Usual:
        """Return what is known of the time after what ended last, until the rank begins an operation."""
        return self._usual(_until(self._places, len(self._places)), self._absences, 0)

    def _usual(self, places: tuple[int, ...], longs: deque[_Long], own: int) -> Usual:
        """Return what is known of the last of some places; ``own``: how many of them are not before it."""
        usual = Usual(0, None)
        for number in _BEFORE:
            wanted = places[-number - own :]
            if len(wanted) < number + own:
                continue
            times = self._times(wanted) - (own == 0)  # the rank is there now
            longest_ns = max((each.took_ns for each in longs if each.places[-len(wanted) :] == wanted), default=None)
            usual = Usual(max(0, times), None if longest_ns is None else longest_ns / 1e9)
            if times >= _OFTEN:
                break
        return usual

    def _times(self, wanted: tuple[int, ...]) -> int:
        """Return how often some places followed each other."""
        number = len(self._places) - len(wanted) + 1
        if number <= 0:
            return 0
        same = np.ones(number, np.bool_)
        for at, each in enumerate(wanted):
            same &= self._places[at : at + number] == each
        return int(same.sum())


def _took_ns(columns: Columns) -> Ints:
    """Return for how long each operation was under way, as ``wait_graph.age`` counts: of a message, how long a thread waited for it."""
    began = np.where(columns.flags & ev.ON_DEVICE != 0, columns.start, columns.launch)
    return np.where(np.isin(columns.op, _MESSAGES), columns.waited * 1000, columns.end - began)


def places(columns: Columns) -> Places:
    """Return the place of each record of an operation or a step mark."""
    code = (columns.group << 16) | (columns.op << 8) | _class(columns)
    found: Places = np.where(columns.op == ev.STEP_MARK, _STEP, code).astype(np.uint32)
    return found


def _class(columns: Columns) -> Ints:
    has_size = columns.flags & ev.NO_SIZE == 0
    return np.where(has_size, classes(columns.size), 0)


def place(group: int, op: int, size: int | None) -> int:
    """Return the place of one operation; ``size`` in bytes, ``None``: it has none."""
    return group << 16 | op << 8 | (0 if size is None else ev.size_log2(size) + 1)


def _until(places: Places, number: int) -> tuple[int, ...]:
    """Return the last of the first ``number`` places, as many as tell one place from others."""
    return tuple(places[max(0, number - _BEFORE[0] - 1) : number].tolist())
