"""Communication in a rank's steps: the union of its operations, by process group and in total. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice, pairwise
from math import ceil
from operator import add, sub
from statistics import median, median_low
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from commwatch.wire import events as ev
from commwatch.wire.numbers import ahead, in_order
from commwatch_agent.ingest.cycles.ends import End
from commwatch_agent.ingest.optimizer_rounds import Mark
from commwatch_agent.ingest.periods import Periods
from commwatch_agent.ingest.steps import Step, StepTracker
from commwatch_agent.ingest.stragglers import LEAST_PERIODS, RARE_STEPS
from commwatch_agent.ingest.tables.weights import MARK, MOMENT, PIECE, STEP
from commwatch_agent.model.cells import OTHER, SHARE_WINDOW_NS, StepRecord, StepSums
from commwatch_agent.model.intervals import Intervals, length
from commwatch_agent.model.views import ITERATIONS, MARKS, StepView

if TYPE_CHECKING:
    from commwatch_agent.ingest.cycles.iterations import Iterations

#: A step of any type.
_Step = TypeVar("_Step")
#: Most intervals kept while no step ends (inference, a long evaluation): of one label, and of all together.
MOST_PIECES, _MOST_TOGETHER = 65_536, 8 * 65_536
#: Most group labels that are measured separately; the rest share one.
MOST_LABELS = 64
#: Most steps in the window of a share.
MOST_RECENT = 8192
#: A long step takes more than this many times the median of the steps before it; most and least number of these.
LONG_TIMES, NEIGHBOURS, LEAST_NEIGHBOURS = 3, 31, 5
#: Where more than one in ``RARE_STEPS`` of so many steps took so much longer, they are part of the training, and no longer long.
_LATEST = 60
#: Waits for a root do not matter up to this share of an iteration.
_LITTLE = 0.1
#: Fewest steps that are kept: who is late is judged by ``LEAST_PERIODS``, and the two before them.
_FEW = LEAST_PERIODS + 2
#: Least number of steps for a share.
LEAST_STEPS = 3
#: A rate of steps is stale this long after the latest step; later if steps are long.
_STALE_S = 5.0


def is_rate_stale(since_s: float, usual_s: float) -> bool:
    """Return whether a rate of steps is stale: no step has ended for ``since_s``, and a step usually takes ``usual_s``."""
    return since_s > max(_STALE_S, LONG_TIMES * usual_s)


def p95(ordered: Sequence[float]) -> float:
    """Return the 95th percentile of sorted durations, of which there is one at least, by nearest rank, as in summaries."""
    return ordered[ceil(0.95 * len(ordered)) - 1]


class StepTotals:
    """Sums over the steps of one rank."""

    def __init__(self) -> None:
        self.count = self.duration_ns = self.long = 0
        self._comm_ns = self._unknown = 0
        #: From the first step on whose exposed time is known: the sum, the number of steps, and for how many of these it is not known.
        self._exposed_ns = self._since_exposed = self._not_exposed = 0
        #: Communication time by group label.
        self.groups_ns: dict[str, int] = {}
        #: Time in waits for messages; ``None``: there were none.
        self.p2p_wait_ns: int | None = None
        #: The steps of the last minute before the latest one, or the last few if they are longer; without groups, which are not used
        #: and would take most of the memory.
        self.recent: deque[StepRecord] = deque()
        #: The sums over these, without long ones.
        self._usual = sums_of(())

    @property
    def latest_number(self) -> int | None:
        """Number of the latest step; ``None``: there is none."""
        return step_number([step.seq for step in islice(reversed(self.recent), 3 * LEAST_STEPS)])

    def add(self, step: StepRecord) -> None:
        """Add a step."""
        self.count += 1
        self.duration_ns += step.end_ns - step.start_ns
        self._comm_ns += step.comm_ns or 0
        self._unknown += step.comm_ns is None
        self._exposed_ns += step.exposed_ns or 0
        self._since_exposed += step.exposed_ns is not None or self._since_exposed > 0
        self._not_exposed += step.exposed_ns is None and self._since_exposed > 0
        for label, comm in step.groups:
            self.groups_ns[label] = self.groups_ns.get(label, 0) + comm
        if step.p2p_wait_ns is not None:
            self.p2p_wait_ns = (self.p2p_wait_ns or 0) + step.p2p_wait_ns
        self.long += step.long
        self.recent.append(step._replace(groups=()))
        self._count_usual(step, add)
        while len(self.recent) > _FEW and self.recent[0].end_ns < step.end_ns - SHARE_WINDOW_NS:
            self._count_usual(self.recent.popleft(), sub)
        if len(self.recent) > MOST_RECENT:
            self._count_usual(self.recent.popleft(), sub)

    def halve(self) -> None:
        """Drop the older half of the window."""
        for _ in range(-(-len(self.recent) // 2)):
            self._count_usual(self.recent.popleft(), sub)

    def lengthened(self, step: StepRecord) -> None:
        """Mark an added step as long."""
        kept = step._replace(groups=())
        self.long += 1
        if kept in self.recent:
            self.recent[self.recent.index(kept)] = kept._replace(long=True)
            self._count_usual(kept, sub)

    def _count_usual(self, step: StepRecord, by: Callable[[Any, Any], Any]) -> None:
        """Add a recent step to the sums without long steps, or subtract it from them."""
        if not step.long:
            self._usual = StepSums(*map(by, self._usual, sums_of((step,))))

    @property
    def comm_ns(self) -> int | None:
        """Communication time of the steps in ns; ``None``: unknown for more than one in a hundred."""
        return None if 100 * self._unknown > self.count else self._comm_ns

    @property
    def exposed_ns(self) -> int | None:
        """Exposed communication time of the steps in ns; ``None``: not known, or unknown for more than one in a hundred after the first known one."""
        known = self._since_exposed > 0 and 100 * self._not_exposed <= self._since_exposed
        return self._exposed_ns if known else None

    def p2p_wait_share(self) -> float | None:
        """Return the share (0 to 1) of the latest steps, without long ones, in waits for messages; ``None``: not known."""
        steps = [step for step in self.recent if not step.long and step.p2p_wait_ns is not None]
        waited = sum(step.p2p_wait_ns or 0 for step in steps)
        return waited / sum(step.end_ns - step.start_ns for step in steps) if steps else None

    def shares(self, now_ns: int) -> tuple[float, float | None] | None:
        """Return comm share and exposed share (0 to 1) of the latest steps.

        Long steps (a checkpoint, an evaluation, the first one) are left out, because they are not typical of
        training. ``None`` where fewer than three are left, or the rank has not stepped for long.
        """
        return self._usual.shares() if self._are_usual(now_ns) else None

    def usual(self, now_ns: int) -> list[StepRecord]:
        """Return the steps that ``shares`` uses, oldest first; empty if they are too few or too old."""
        return [step for step in self.recent if not step.long] if self._are_usual(now_ns) else []

    def _are_usual(self, now_ns: int) -> bool:
        if self._usual.steps < LEAST_STEPS:
            return False
        still_ns = now_ns - self.recent[-1].end_ns
        return still_ns <= SHARE_WINDOW_NS or still_ns <= LONG_TIMES * median(
            step.end_ns - step.start_ns for step in self.recent if not step.long
        )


def sums_of(steps: Collection[StepRecord]) -> StepSums:
    """Return the sums over steps, in ns."""
    return _sums([(step.end_ns - step.start_ns, step.comm_ns, step.exposed_ns) for step in steps])


def _sums(steps: Collection[tuple[float, float | None, float | None]]) -> StepSums:
    """Return the sums over steps given as (duration, communication, exposed)."""
    known = [step for step in steps if step[1] is not None]
    exposed = [step for step in known if step[2] is not None]
    of_known = sum([step[0] for step in known]), sum([step[1] or 0 for step in known])
    of_exposed = sum([step[0] for step in exposed]), sum([step[2] or 0 for step in exposed])
    return StepSums(len(steps), len(known), *of_known, len(exposed), *of_exposed)


def total(parts: Collection[float | None]) -> float | None:
    """Return the sum of the known parts; ``None``: no part is known, or more than one in a hundred is not."""
    known = [part for part in parts if part is not None]
    return sum(known) if known and 100 * (len(parts) - len(known)) <= len(parts) else None


def part_of(parts: Collection[float | None], steps: Collection[StepView]) -> float | None:
    """Return ``total`` of parts in s / time of the steps; ``None`` if there is no total, or no time."""
    seconds, duration_s = total(parts), sum(step.duration_s for step in steps)
    return seconds / duration_s if seconds is not None and duration_s else None


def step_number(seqs: Collection[int]) -> int | None:
    """Return the number of the latest of some steps of a rank: that of the mark that ended it, divided by the marks of a step; ``None``: no step.

    A step of several optimizers has several marks.
    """
    ordered = in_order(set(seqs))
    apart = [ahead(after, before) for before, after in pairwise(ordered)]
    return ordered[-1] // (median_low(apart) if apart else 1) if ordered else None


def comm_share(steps: Collection[StepView]) -> float | None:
    """Return the comm share (0 to 1) as ``StepSums.shares``."""
    return (_of_views(steps) or (None, None))[0]


def exposed_share(steps: Collection[StepView]) -> float | None:
    """Return the exposed share (0 to 1) as ``StepSums.shares``."""
    return (_of_views(steps) or (None, None))[1]


def of_known(
    ranks: Iterable[Collection[_Step]], share: Callable[[Collection[_Step]], float | None]
) -> tuple[float | None, int]:
    """Return a share over the steps of all ranks where it is known, and the number of these ranks.

    Args:
        ranks: the steps of each rank.
    """
    known = [of_rank for of_rank in ranks if share(of_rank) is not None]
    return share([step for of_rank in known for step in of_rank]), len(known)


def _of_views(steps: Collection[StepView]) -> tuple[float, float | None] | None:
    return _sums([(step.duration_s, step.comm_s, step.exposed_s) for step in steps]).shares()


def trim(unions: Collection[Intervals]) -> None:
    """Drop the oldest intervals beyond a number; an age would not limit them, because times in a ring may be wrong."""
    most = min(MOST_PIECES, _MOST_TOGETHER // max(1, len(unions)))
    for pieces in unions:
        if len(pieces.starts) > most:
            pieces.forget(pieces.ends[-most - 1])


def _any_in(moments: list[int], start_ns: int, end_ns: int) -> bool:
    """Return whether one of the sorted moments is in ``[start_ns, end_ns)``."""
    at = bisect_left(moments, start_ns)
    return at < len(moments) and moments[at] < end_ns


class Over(NamedTuple):
    """A step whose operations have ended, not measured yet."""

    step: Step
    #: How its exposed time is measured; whether its waits for messages are known; whether operations in it were only counted.
    source: str | None
    waits_known: bool
    counted: bool


class StepAccounting:
    """The steps of one rank, from its marks and the intervals of its communication; before the first mark, its iterations instead.

    Args:
        size_of: returns the number of ranks of a group.
    """

    def __init__(self, size_of: Callable[[int], int] = lambda group: 0) -> None:
        self.totals, self.periods = StepTotals(), Periods()
        self._marked = False
        self._tracker = StepTracker()
        self._size_of = size_of
        self._iterations: Iterations | None = None
        #: The end of the latest iteration, and its number.
        self._turned_ns = self._turned = 0
        self._waiting: list[Step] = []
        self._fresh: list[StepRecord] = []
        self._busy: dict[str, Intervals] = {}
        self._messages: Intervals | None = None
        #: Sorted launches of collectives without times that are in no step yet.
        self._untimed: list[int] = []
        #: Sorted moments in the steps whose operations (messages included) were in part only counted.
        self._counted: list[int] = []
        self._durations: deque[int] = deque(maxlen=NEIGHBOURS)
        #: Of the latest steps, whether each took far longer than those before it.
        self._took_long: deque[bool] = deque(maxlen=_LATEST)
        #: How exposed time is measured (``ev.EXPOSED_SOURCES``); ``None``: it has not been known yet.
        self.exposed_source: str | None = None
        #: Waits of a GPU that ended in the latest step but exceed its communication: their end was seen late. And that communication.
        self._seen_late_ns = self._latest_comm_ns = 0
        #: The first steps, until there are enough to compare them with.
        self._first: list[StepRecord] | None = []

    @property
    def unavailable(self) -> str | None:
        """Why the marks give no steps; ``None`` if they do."""
        return self._tracker.unavailable

    @property
    def iterations(self) -> Iterations:
        """Finds the iterations."""
        if self._iterations is None:
            # Brings in numpy, which an agent without trainers does not need.
            from commwatch_agent.ingest.cycles.iterations import Iterations

            self._iterations = Iterations(self._size_of)
        return self._iterations

    def _forget_cycle(self) -> None:
        if self._iterations is not None:
            self._iterations.forget()

    @property
    def are_explicit(self) -> bool:
        """Whether ``commwatch.step()`` was called, as one rank may do for all."""
        return self._tracker.explicit

    @property
    def source(self) -> str | None:
        """Whether the steps are those between marks, or iterations; ``None``: there are none."""
        return MARKS if self._marked else ITERATIONS if self.totals.count else None

    def begin_marks(self) -> None:
        """Note that a mark has come: iterations end, and those before it count no more."""
        self._marked = True
        self._forget_cycle()
        self._waiting, self._fresh, self._first = [], [], []
        self.totals = StepTotals()
        self._durations.clear()
        self._took_long.clear()

    def busy(self, label: str) -> Intervals:
        """Return the intervals in which operations of groups with this label ran."""
        return self._busy.setdefault(
            label if label in self._busy or len(self._busy) < MOST_LABELS else OTHER, Intervals()
        )

    def messages(self) -> Intervals:
        """Return the intervals in which a thread waited for a send or recv."""
        if self._messages is None:
            self._messages = Intervals()
        return self._messages

    def unions(self) -> dict[str | None, Intervals]:
        """Return the intervals of communication by label, and under ``None`` those of waits for messages."""
        messages: dict[str | None, Intervals] = {} if self._messages is None else {None: self._messages}
        return messages | self._busy

    def add_untimed(self, launches_ns: Collection[int]) -> None:
        """Note collectives without an observable end, so that their step's communication is not known."""
        self._untimed += launches_ns
        self._untimed.sort()

    def trim(self, others: Collection[Intervals] = ()) -> None:
        """Drop the oldest intervals and moments that are in no step yet, and those of ``others``."""
        for unions in (self.unions().values(), others):
            trim(unions)
        del self._untimed[:-MOST_PIECES], self._counted[:-MOST_PIECES]

    def bytes(self) -> int:
        """Return about how many bytes the tables take."""
        pieces = sum([len(union.starts) for union in self.unions().values()])
        moments = len(self._untimed) + len(self._counted)
        return (
            PIECE * pieces
            + MOMENT * moments
            + MARK * self._tracker.held
            + STEP * len(self.totals.recent)
            + (0 if self._iterations is None else self._iterations.bytes)
        )

    @property
    def fresh(self) -> int:
        """Number of steps that ``take`` would return."""
        return len(self._fresh)

    def halve(self) -> None:
        """Drop the older half of all that is in no step yet, and of the steps in the window of the shares."""
        for pieces in self.unions().values():
            pieces.halve()
        del self._untimed[: -(len(self._untimed) // 2) or None], self._counted[: -(len(self._counted) // 2) or None]
        self._tracker.forget()
        self._forget_cycle()
        self.totals.halve()

    def over(self, record: ev.Record | End) -> list[Over]:
        """Take a step mark, or the end of an iteration; return the steps that are over, to be measured in this order."""
        if isinstance(record, End):
            return self._turn(record)
        if not self._marked:
            self.begin_marks()
        exposed = record.size_bytes if record.flags & ev.EXPOSED else None
        if exposed is not None:
            self.exposed_source = ev.EXPOSED_SOURCES.get(record.timing)
        if record.flags & ev.UNTIMED:
            insort(self._counted, record.end_ns - 1)
        same_pass = bool(record.flags & ev.SAME_PASS)
        mark = Mark(record.seq, record.peer, record.launch_ns, record.end_ns, exposed, record.aux, same_pass)
        over = self._take_waiting()  # what was in flight at the previous mark has had a step's time to complete
        for step in self._tracker.feed(mark):
            self._waiting.append(step)
            if not step.in_flight:
                over += self._take_waiting()
        return over

    def _turn(self, end: End) -> list[Over]:
        """Take the end of an iteration; return the iteration before it, whose operations have had that time to end."""
        over, start_ns, self._turned_ns = self._take_waiting(), self._turned_ns, end.end_ns
        if not end.first and start_ns < end.end_ns:
            self._turned = max(end.seq, self._turned + 1)
            self._waiting.append(Step(self._turned, start_ns, end.end_ns, None, 1, end.of_root_ns))
        return over

    def _take_waiting(self) -> list[Over]:
        return [self._over(self._waiting.pop(0)) for _ in range(len(self._waiting))]

    def _over(self, step: Step) -> Over:
        counted = _any_in(self._counted, step.start_ns, step.end_ns)
        del self._counted[: bisect_left(self._counted, step.end_ns)]
        return Over(step, self.exposed_source, self._messages is not None, counted)

    def mark(self, record: ev.Record) -> None:
        """Add a step mark."""
        self._measure(self.over(record))

    def tick(self, until_ns: int, known_from_ns: int = 0) -> None:
        """Measure the seconds that are over, if there are no marks, or no steps can be found in them.

        Args:
            until_ns: now, or the launch of the oldest operation in flight; by the clock of the records.
            known_from_ns: the records of operations before it are incomplete.
        """
        if self.unavailable if self._marked else self._iterations is None or not self._iterations.found:
            known_from_ns = max(
                known_from_ns, self._turned_ns
            )  # what is in an iteration was a period, and is forgotten
            self.periods.add_seconds(
                self._busy.values(),
                until_ns,
                lambda start, end: start >= known_from_ns and self._is_known(start, end),
            )

    def _is_known(self, start_ns: int, end_ns: int) -> bool:
        return not (_any_in(self._counted, start_ns, end_ns) or _any_in(self._untimed, start_ns, end_ns))

    def finish(self) -> None:
        """Measure the steps whose operations have ended."""
        self._measure(self._take_waiting())

    def end(self) -> None:
        """Measure the last steps of a rank that has ended; drop what is in no step."""
        self._waiting += self._tracker.end()
        self.finish()
        for pieces in self.unions().values():
            pieces.forget(ev.MAX_PLAUSIBLE)
        self._untimed, self._counted = [], []

    def _measure(self, over: list[Over]) -> None:
        """Measure steps in the intervals so far."""
        for each in over:
            start, end = each.step.start_ns, each.step.end_ns
            unions = {label: pieces.within(start, end) for label, pieces in self._busy.items()}
            groups = tuple((label, sum(ends) - sum(starts)) for label, (starts, ends) in unions.items() if starts)
            waited_ns = 0 if self._messages is None else self._messages.measure(start, end)
            self.add(each, length(unions.values()), groups, waited_ns)
            for pieces in self.unions().values():
                pieces.forget(end)

    def add(self, over: Over, comm_ns: int, groups: tuple[tuple[str, int], ...], waited_ns: int) -> None:
        """Add a step with its communication.

        Args:
            comm_ns, groups: communication in total and by label; used only if all its operations have times.
            waited_ns: waits for messages.
        """
        step, comm, exposed = over.step, None, None
        # An iteration that is mostly a wait for a root has no share of communication: a server waits for its next request in it.
        waits = step.of_root_ns > max(comm_ns / 2, _LITTLE * (step.end_ns - step.start_ns))
        if waits or over.counted or _any_in(self._untimed, step.start_ns, step.end_ns):
            groups = ()
        else:
            comm = comm_ns
            exposed = None if step.exposed_ns is None else self._exposed(step.exposed_ns, comm, over.source)
        waited = waited_ns if over.waits_known and not over.counted else None
        self._judge(StepRecord(step.seq, step.start_ns, step.end_ns, comm, exposed, groups, waited))
        del self._untimed[: bisect_left(self._untimed, step.end_ns)]

    def _exposed(self, waited_ns: int, comm_ns: int, source: str | None) -> int:
        """Return the exposed time of a step: what is known to have waited, and at most its communication.

        The waits of a GPU are seen when they are over, and those of one step may be seen in the next. So what is too much for one step
        counts in the next one.
        """
        known = waited_ns + self._seen_late_ns
        exposed = min(known, comm_ns)
        late = source == ev.EXPOSED_SOURCES[ev.BY_EVENTS]
        self._seen_late_ns = min(known - exposed, max(comm_ns, self._latest_comm_ns)) if late else 0
        self._latest_comm_ns = comm_ns
        return exposed

    def take(self) -> list[StepRecord]:
        """Return the steps since the last call; an earlier step is returned again if it turned out to be long."""
        steps, self._fresh = self._fresh, []
        return steps

    def _judge(self, step: StepRecord) -> None:
        """Add a step, and decide whether it was long; for the first ones once there are others to compare them with.

        No iteration is long: if it is only a part of a step, the one that contains its computation is no exception.
        """
        duration = step.end_ns - step.start_ns
        if self._marked and self._first is None:
            self._took_long.append(duration > LONG_TIMES * median(self._durations))
            is_rare = RARE_STEPS * sum(self._took_long) <= _LATEST
            step = step._replace(long=self._took_long[-1] and is_rare)
        self._durations.append(duration)
        self.totals.add(step)
        self._fresh.append(step)
        self.periods.add_step(duration, step.comm_ns)
        if self._marked and self._first is not None:
            self._first.append(step)
            if len(self._first) > LEAST_NEIGHBOURS:
                self._judge_first(self._first, LONG_TIMES * median(self._durations))
                self._first = None

    def _judge_first(self, first: list[StepRecord], limit: float) -> None:
        for step in first:
            self._took_long.append(step.end_ns - step.start_ns > limit)
            if self._took_long[-1]:
                self._fresh.append(step._replace(long=True))
                self.totals.lengthened(step)
