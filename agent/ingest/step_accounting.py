"""How much of a rank's steps was communication: the union of its operations, by process group and in all. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterable
from statistics import median
from typing import TypeVar

from commwatch.collectors.wire import events as ev
from commwatch.core.cells import OTHER, SHARE_WINDOW_NS, StepRecord, StepSums
from commwatch.core.intervals import Intervals, covered
from commwatch.core.views import StepView
from commwatch.ingest.cycles import Mark
from commwatch.ingest.periods import Periods
from commwatch.ingest.steps import Step, StepTracker

#: A step of whatever form.
_Step = TypeVar("_Step")
#: Pieces of communication kept while no step ends (inference, a long evaluation): of one label, and of all together.
MOST_PIECES, _MOST_TOGETHER = 65_536, 8 * 65_536
#: Group labels whose communication is measured each for itself; the rest share one.
MOST_LABELS = 64
#: Steps that shares look back over, however short they are.
MOST_RECENT = 8192
#: A step is long if it took more than so many times the median of the steps before it: of so many, and at least so many.
LONG_TIMES, NEIGHBOURS, LEAST_NEIGHBOURS = 3, 31, 5
#: A share needs so many steps.
LEAST_STEPS = 3
#: Without a step for so long nothing moves, unless steps take nearly as long.
_STILL_S = 5.0


def stands_still(since_s: float, usual_s: float) -> bool:
    """Whether a rate of steps says nothing any more: none has ended for ``since_s``, where one usually takes ``usual_s``."""
    return since_s > max(_STILL_S, LONG_TIMES * usual_s)


class StepTotals:
    """Sums over the steps of one rank."""

    def __init__(self) -> None:
        self.count = self.duration_ns = self.long = 0
        self._comm_ns = self._unknown = 0
        #: ``None``: not known.
        self.exposed_ns: int | None = None
        #: Communication time by group label.
        self.groups_ns: dict[str, int] = {}
        #: Time in waits for messages; ``None``: there were none.
        self.p2p_wait_ns: int | None = None
        #: The steps of the last minute before the latest one, or the last few where they take longer; without their groups, which nobody
        #: asks of them and which would be most of what they take.
        self.recent: deque[StepRecord] = deque(maxlen=MOST_RECENT)

    def add(self, step: StepRecord) -> None:
        """Take in one step."""
        self.count += 1
        self.duration_ns += step.end_ns - step.start_ns
        self._comm_ns += step.comm_ns or 0
        self._unknown += step.comm_ns is None
        if step.exposed_ns is not None:
            self.exposed_ns = (self.exposed_ns or 0) + step.exposed_ns
        for label, comm in step.groups:
            self.groups_ns[label] = self.groups_ns.get(label, 0) + comm
        if step.p2p_wait_ns is not None:
            self.p2p_wait_ns = (self.p2p_wait_ns or 0) + step.p2p_wait_ns
        self.long += step.long
        self.recent.append(step._replace(groups=()))
        while len(self.recent) > LEAST_NEIGHBOURS and self.recent[0].end_ns < step.end_ns - SHARE_WINDOW_NS:
            self.recent.popleft()

    def lengthened(self, step: StepRecord) -> None:
        """One that has been taken in proved to be long."""
        kept = step._replace(groups=())
        self.long += 1
        if kept in self.recent:
            self.recent[self.recent.index(kept)] = kept._replace(long=True)

    @property
    def comm_ns(self) -> int | None:
        """Communication in them; ``None``: of more than one in a hundred it is not known."""
        return None if 100 * self._unknown > self.count else self._comm_ns

    def p2p_wait_share(self) -> float | None:
        """The part of the latest steps but for the long ones spent in waits for messages; ``None``: of none of them are they known."""
        steps = [step for step in self.recent if not step.long and step.p2p_wait_ns is not None]
        waited = sum(step.p2p_wait_ns or 0 for step in steps)
        return waited / sum(step.end_ns - step.start_ns for step in steps) if steps else None

    def shares(self, now_ns: int) -> tuple[float, float | None] | None:
        """Comm share and exposed share of the latest steps.

        Steps that took far longer than their neighbours (a checkpoint, an evaluation, the first one) are left out: they say
        nothing about training. ``None`` where fewer than three are left, or the rank has not stepped for long.
        """
        return shares_of(self.usual(now_ns))

    def usual(self, now_ns: int) -> list[StepRecord]:
        """The steps that ``shares`` goes by, oldest first; none where it gives none."""
        steps = [step for step in self.recent if not step.long]
        if len(steps) < LEAST_STEPS:
            return []
        usual = median(step.end_ns - step.start_ns for step in steps)
        return [] if now_ns - self.recent[-1].end_ns > max(SHARE_WINDOW_NS, LONG_TIMES * usual) else steps


def shares_of(steps: Collection[StepRecord]) -> tuple[float, float | None] | None:
    """``StepSums.shares`` of steps."""
    return _shares([(step.end_ns - step.start_ns, step.comm_ns, step.exposed_ns) for step in steps])


def _shares(steps: Collection[tuple[float, float | None, float | None]]) -> tuple[float, float | None] | None:
    """The same of steps as (duration, communication, exposed)."""
    known = [(duration, comm, exposed) for duration, comm, exposed in steps if comm is not None]
    exposed = [(duration, exposed) for duration, _, exposed in known if exposed is not None]
    duration, comm = sum(duration for duration, _, _ in known), sum(comm for _, comm, _ in known)
    of_exposed = sum(duration for duration, _ in exposed), sum(each for _, each in exposed)
    return StepSums(len(steps), len(known), duration, comm, len(exposed), *of_exposed).shares()


def total(parts: Collection[float | None]) -> float | None:
    """Their sum; ``None``: there are none, or more than one in a hundred is not known."""
    known = [part for part in parts if part is not None]
    return sum(known) if known and 100 * (len(parts) - len(known)) <= len(parts) else None


def part_of(parts: Collection[float | None], steps: Collection[StepView]) -> float | None:
    """``total`` of seconds over the steps' time; ``None`` as there, and where they took none."""
    seconds, duration_s = total(parts), sum(step.duration_s for step in steps)
    return seconds / duration_s if seconds is not None and duration_s else None


def comm_share(steps: Collection[StepView]) -> float | None:
    """Of steps together, as ``StepSums`` has it."""
    return (_of_views(steps) or (None, None))[0]


def exposed_share(steps: Collection[StepView]) -> float | None:
    """Of steps together, as ``StepSums`` has it."""
    return (_of_views(steps) or (None, None))[1]


def of_known(
    ranks: Iterable[Collection[_Step]], share: Callable[[Collection[_Step]], float | None]
) -> tuple[float | None, int]:
    """A share of the steps of those ranks of which it is known, and how many ranks these are.

    Args:
        ranks: the steps of each.
    """
    known = [of_rank for of_rank in ranks if share(of_rank) is not None]
    return share([step for of_rank in known for step in of_rank]), len(known)


def _of_views(steps: Collection[StepView]) -> tuple[float, float | None] | None:
    return _shares([(step.duration_s, step.comm_s, step.exposed_s) for step in steps])


def trim(unions: Collection[Intervals]) -> None:
    """Forget the oldest pieces where there are too many: by a clock that somebody has written they may all be of one moment."""
    most = min(MOST_PIECES, _MOST_TOGETHER // max(1, len(unions)))
    for pieces in unions:
        if len(pieces.starts) > most:
            pieces.forget(pieces.ends[-most - 1])


def _any_in(moments: list[int], start_ns: int, end_ns: int) -> bool:
    """Whether one of the moments, which are in order, lies between the two."""
    at = bisect_left(moments, start_ns)
    return at < len(moments) and moments[at] < end_ns


class StepBook:
    """The steps of one rank: from marks, and from the intervals in which it communicated."""

    def __init__(self) -> None:
        self.totals, self.periods = StepTotals(), Periods()
        self._marked = False
        self._tracker = StepTracker()
        self._waiting: list[Step] = []
        self._fresh: list[StepRecord] = []
        self._busy: dict[str, Intervals] = {}
        self._messages: Intervals | None = None
        #: When collectives without times were launched that no step has claimed yet, in order.
        self._untimed: list[int] = []
        #: Moments, in order, in such steps some of whose operations, messages among them, were only counted.
        self._counted: list[int] = []
        self._durations: deque[int] = deque(maxlen=NEIGHBOURS)
        #: The first steps, until there are enough to judge them by.
        self._first: list[StepRecord] | None = []

    @property
    def unavailable(self) -> str | None:
        """Why there are no steps, where the marks do not tell them."""
        return self._tracker.unavailable

    def busy(self, label: str) -> Intervals:
        """When operations of the groups with this label ran."""
        return self._busy.setdefault(
            label if label in self._busy or len(self._busy) < MOST_LABELS else OTHER, Intervals()
        )

    def messages(self) -> Intervals:
        """When a thread stood in a wait for a send or recv."""
        if self._messages is None:
            self._messages = Intervals()
        return self._messages

    def untimed(self, launch_ns: int) -> None:
        """A collective without an observable end: the communication of its step is not known."""
        insort(self._untimed, launch_ns)

    def trim(self, others: Collection[Intervals] = ()) -> None:
        """Forget the oldest of what no step has claimed, and of other unions."""
        for unions in (self._all(), others):
            trim(unions)
        del self._untimed[:-MOST_PIECES], self._counted[:-MOST_PIECES]

    def mark(self, record: ev.Record) -> None:
        """Take in a step mark."""
        self._marked = True
        exposed = record.size_bytes if record.flags & ev.EXPOSED else None
        if record.flags & ev.UNTIMED:
            insort(self._counted, record.end_ns - 1)
        same_pass = bool(record.flags & ev.SAME_PASS)
        mark = Mark(record.seq, record.peer, record.launch_ns, record.end_ns, exposed, record.aux, same_pass)
        self.finish()  # what was in flight at the mark before has had a step's time to complete
        for step in self._tracker.feed(mark):
            self._waiting.append(step)
            if not step.in_flight:
                self.finish()

    def tick(self, until_ns: int, known_from_ns: int = 0) -> None:
        """Measure the seconds that are over, where no steps are marked, or none can be told.

        Args:
            until_ns: now, or the launch of the oldest operation in flight; by the clock of the records.
            known_from_ns: of what ran before, some is not recorded.
        """
        if not self._marked or self.unavailable:
            self.periods.add_seconds(
                self._busy.values(),
                until_ns,
                lambda start, end: start >= known_from_ns and self._is_known(start, end),
            )

    def _is_known(self, start_ns: int, end_ns: int) -> bool:
        return not (_any_in(self._counted, start_ns, end_ns) or _any_in(self._untimed, start_ns, end_ns))

    def finish(self) -> None:
        """Measure the steps whose operations have ended."""
        for step in self._waiting:
            self._judge(self._measured(step))
            for pieces in self._all():
                pieces.forget(step.end_ns)
            for moments in (self._untimed, self._counted):
                del moments[: bisect_left(moments, step.end_ns)]
        self._waiting = []

    def end(self) -> None:
        """The rank has ended: no step will claim what is left."""
        self._waiting += self._tracker.end()
        self.finish()
        for pieces in self._all():
            pieces.forget(ev.MAX_PLAUSIBLE)
        self._untimed, self._counted = [], []

    def _measured(self, step: Step) -> StepRecord:
        counted = _any_in(self._counted, step.start_ns, step.end_ns)
        waited = None if counted or self._messages is None else self._messages.measure(step.start_ns, step.end_ns)
        if counted or _any_in(self._untimed, step.start_ns, step.end_ns):
            return StepRecord(step.seq, step.start_ns, step.end_ns, None, None, (), waited)
        groups = tuple(
            (label, comm) for label, busy in self._busy.items() if (comm := busy.measure(step.start_ns, step.end_ns))
        )
        comm = groups[0][1] if len(groups) == 1 else covered(self._busy.values(), step.start_ns, step.end_ns)
        exposed = None if step.exposed_ns is None else min(step.exposed_ns, comm)
        return StepRecord(step.seq, step.start_ns, step.end_ns, comm, exposed, groups, waited)

    def take(self) -> list[StepRecord]:
        """Hand over the steps that have come since the last call; one that came before is there again if it proved long."""
        steps, self._fresh = self._fresh, []
        return steps

    def _all(self) -> list[Intervals]:
        return [*self._busy.values(), *([] if self._messages is None else [self._messages])]

    def _judge(self, step: StepRecord) -> None:
        """Tell whether a step was long; the first ones once there are others to compare them with."""
        duration = step.end_ns - step.start_ns
        if self._first is None:
            step = step._replace(long=duration > LONG_TIMES * median(self._durations))
        self._durations.append(duration)
        self.totals.add(step)
        self._fresh.append(step)
        self.periods.add_step(duration, step.comm_ns)
        if self._first is not None:
            self._first.append(step)
            if len(self._first) > LEAST_NEIGHBOURS:
                self._judge_first(self._first, LONG_TIMES * median(self._durations))
                self._first = None

    def _judge_first(self, first: list[StepRecord], limit: float) -> None:
        for step in first:
            if step.end_ns - step.start_ns > limit:
                self._fresh.append(step._replace(long=True))
                self.totals.lengthened(step)
