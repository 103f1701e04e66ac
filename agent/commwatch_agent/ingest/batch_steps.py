"""Measures the communication in the steps of several ranks at a time. Pure.

The result is that of one record after the other: an operation that is recorded after a step was measured does not count in that step.
So its beginning is cut off where the measured steps end; what is cut off is added later, for steps that marks out of order give.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from commwatch.wire import events as ev
from commwatch_agent.ingest.columns import Flags, Ints
from commwatch_agent.ingest.cycles.ends import End
from commwatch_agent.ingest.step_accounting import Over, StepAccounting
from commwatch_agent.ingest.unions import Unions, unions
from commwatch_agent.model.intervals import Intervals


class Busy(NamedTuple):
    """When ranks communicated; arrays of shape [intervals]."""

    #: Number of the stretch between two marks; all stretches of a rank come before those of the next one.
    stretch: Ints
    #: Index in ``BatchSteps.targets``; start and end.
    target: Ints
    start: Ints
    end: Ints


class Untimed(NamedTuple):
    """Operations without times; arrays of shape [operations]."""

    stretch: Ints
    ring: Ints
    launch: Ints


class BatchSteps:
    """The steps that end in some records.

    Args:
        ranks: the steps of each rank.
        marks: the step marks of each rank, or the ends of its iterations; they are taken.
        first_wait: number of marks before each rank's first wait for a message; ``None``: it does not wait.
    """

    def __init__(
        self,
        ranks: Sequence[StepAccounting],
        marks: Sequence[Sequence[ev.Record | End]],
        first_wait: Sequence[int | None],
    ) -> None:
        self._ranks = ranks
        #: By stretch: when the steps end that were over before it; the turn in which it is added; whether no step is over after it. There
        #: is one turn, or more if marks are not in order: a step that began before another one ended is measured after that one.
        self._limits: list[int] = []
        self._turns: list[int] = []
        self._open: list[bool] = []
        #: By turn: the steps that are over, with the index of their rank.
        self._over: list[list[tuple[int, Over]]] = [[]]
        for ring, (steps, of_rank, wait) in enumerate(zip(ranks, marks, first_wait, strict=True)):
            self._take(ring, steps, of_rank, wait)
        #: The unions of all ranks, by label, and of waits for messages.
        self.targets: list[Intervals] = []
        self._ring_of = list[int]()
        self._labels = list[list[tuple[str | None, int]]]()
        for ring, steps in enumerate(ranks):
            named = steps.unions()
            self._labels.append([(label, len(self.targets) + at) for at, label in enumerate(named)])
            self.targets += named.values()
            self._ring_of += [ring] * len(named)

    def _take(self, ring: int, steps: StepAccounting, marks: Sequence[ev.Record | End], wait: int | None) -> None:
        """Take the marks of a rank."""
        turn = until_ns = stretches = 0
        for number, record in enumerate(marks):
            if wait is not None and wait <= number:
                steps.messages()
            stretches += 1
            for each in steps.over(record):
                if each.step.start_ns < until_ns:
                    turn, until_ns = turn + 1, 0
                self._note(stretches, until_ns, turn, False)
                self._over += [[] for _ in range(turn + 1 - len(self._over))]
                self._over[turn].append((ring, each))
                until_ns, stretches = max(until_ns, each.step.end_ns), 0
        self._note(stretches + 1, until_ns, turn, True)
        if wait is not None:
            steps.messages()

    def _note(self, stretches: int, limit_ns: int, turn: int, is_open: bool) -> None:
        self._limits += [limit_ns] * stretches
        self._turns += [turn] * stretches
        self._open += [is_open] * stretches

    def add(self, busy: Busy, untimed: Untimed) -> None:
        """Add the operations, and measure the steps that are over."""
        limits, turns, is_open = (np.array(each) for each in (self._limits, self._turns, self._open))
        late = untimed.launch < limits[untimed.stretch]
        for turn, over in enumerate(self._over):
            self._note_untimed(untimed, ~late & (turns[untimed.stretch] == turn))
            mine = busy
            if len(self._over) > 1:
                places = np.flatnonzero(turns[busy.stretch] == turn)
                mine = Busy(*(values[places] for values in busy))
            self._add(mine, limits[mine.stretch], is_open[mine.stretch], over)
        self._note_untimed(untimed, late & is_open[untimed.stretch])

    def _note_untimed(self, untimed: Untimed, wanted: Flags) -> None:
        launches: dict[int, list[int]] = {}
        for ring, launch in zip(untimed.ring[wanted].tolist(), untimed.launch[wanted].tolist(), strict=True):
            launches.setdefault(ring, []).append(launch)
        for ring, of_rank in launches.items():
            self._ranks[ring].add_untimed(of_rank)

    def _add(self, busy: Busy, limit: Ints, is_open: Flags, over: Sequence[tuple[int, Over]]) -> None:
        """Add operations to the unions; measure steps, and forget what came before their ends."""
        if not len(busy.target) and not over:
            return
        until_ns = [0] * len(self._ranks)
        for ring, each in over:
            until_ns[ring] = max(until_ns[ring], each.step.end_ns)
        kept = [(target, self.targets[target]) for target, ring in enumerate(self._ring_of) if until_ns[ring]]
        numbers = [len(union.starts) for _, union in kept]
        pieces = unions(
            np.append(busy.target, np.repeat(np.array([target for target, _ in kept], np.int64), numbers)),
            np.concatenate([np.maximum(busy.start, limit), *(np.array(union.starts) for _, union in kept)]),
            np.concatenate([busy.end, *(np.array(union.ends) for _, union in kept)]),
        )
        for _, union in kept:
            union.starts, union.ends = array("q"), array("q")
        ring_of = np.array(self._ring_of, np.int64)
        until = np.array(until_ns, np.int64)[ring_of]
        left = pieces.some(np.flatnonzero(pieces.ends > until[pieces.keys]))
        bounds = np.searchsorted(left.keys, np.arange(len(self.targets) + 1)).tolist()
        starts, ends = array("q", left.starts.tobytes()), array("q", left.ends.tobytes())
        for union, (first, last) in zip(self.targets, pairwise(bounds), strict=True):
            union.extend(starts[first:last], ends[first:last])
        cut = np.flatnonzero((busy.start < limit) & (is_open | (busy.end > until[busy.target])))
        cut_off = busy.target[cut], busy.start[cut], np.minimum(busy.end, limit)[cut]
        for target, start, end in zip(*(each.tolist() for each in cut_off), strict=True):
            self.targets[target].add(start, end)
        if over:
            self._measure(over, pieces, ring_of)

    def _measure(self, over: Sequence[tuple[int, Over]], pieces: Unions, ring_of: Ints) -> None:
        """Measure steps in the pieces of all targets."""
        waits = np.array([label is None for of_rank in self._labels for label, _ in of_rank], np.bool_)
        labelled = np.flatnonzero(~waits[pieces.keys])
        every = unions(ring_of[pieces.keys[labelled]], pieces.starts[labelled], pieces.ends[labelled])
        since = np.array([each.step.start_ns for _, each in over], np.int64)
        until = np.array([each.step.end_ns for _, each in over], np.int64)
        comm = every.measure(np.array([ring for ring, _ in over], np.int64), since, until).tolist()
        asked = [(at, target) for at, (ring, _) in enumerate(over) for _, target in self._labels[ring]]
        at, target = np.array(asked, np.int64).reshape(-1, 2).T
        found = iter(pieces.measure(target, since[at], until[at]).tolist())
        for (ring, each), comm_ns in zip(over, comm, strict=True):
            parts = {label: next(found) for label, _ in self._labels[ring]}
            waited_ns = parts.pop(None, 0)
            groups = tuple((label, part) for label, part in parts.items() if label is not None and part)
            self._ranks[ring].add(each, comm_ns, groups, waited_ns)
