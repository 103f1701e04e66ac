"""Replays the programs of all ranks: a discrete-event simulation. Pure.

A rank runs until it waits for an operation that has not ended. An operation of a group with several ranks begins when the last of them has
launched it and the group's operation before it has ended. Each rank begins a step when it has ended the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain, pairwise
from math import inf
from statistics import fmean
from typing import NamedTuple

from commwatch.wire.events import P2P
from commwatch_agent.whatif.model import LAUNCHES, CannotAnswer, Kind, Model, Op, Program

_CONTRADICTION = "the recorded operations of the ranks do not fit together, so the steps cannot be replayed"

#: Of a launch: the step, and the place in its program.
_Place = tuple[int, int]


class Step(NamedTuple):
    """A step in the replay: means over the ranks, in seconds."""

    duration_s: float
    #: In which an operation of the rank was in flight, and in which the rank waited for one.
    comm_s: float
    exposed_s: float


@dataclass
class _State:
    """An operation in the replay."""

    #: Parts that are not launched yet, of those that others need.
    missing: int = 0
    ready_s: float = 0.0
    #: When it ended; ``None``: it has not.
    end_s: float | None = None
    #: Ranks that wait for it.
    waiting: list[int] | None = None


class _Rank:
    """A rank in the replay."""

    def __init__(self, steps: list[Program], begin_s: float) -> None:
        self.steps, self.step, self.at, self.now_s = steps, 0, 0, begin_s
        self.begins_s, self.exposed_s = [begin_s], [0.0]
        #: When it launched its parts, how (``Do.seconds``), and the numbers of the operations.
        self.launched: dict[int, tuple[float, Kind, float]] = {}
        #: When it began to wait for messages.
        self.waits_s: dict[int, float] = {}


class _Replay:
    def __init__(self, model: Model) -> None:
        self._ops = model.ops
        self.states: dict[int, _State] = {}
        self.ranks = {rank: _Rank(steps, model.begins_s[rank]) for rank, steps in model.programs.items()}
        places: dict[int, _Place] = {}
        for steps in model.programs.values():
            for at, program in enumerate(steps):
                for place, (kind, _, op) in enumerate(program):
                    if kind in LAUNCHES:
                        self.states.setdefault(op, _State()).missing += kind != Kind.TAKE
                        places[op] = min(places.get(op, (at, place)), (at, place))
        self._before = _before(self._ops, model.programs, places)
        self._next = {before: op for op, before in self._before.items()}
        self.runnable = list(self.ranks)

    def run(self) -> None:
        """Run all ranks to their end.

        Raises:
            CannotAnswer: ranks wait for one another forever, because the records contradict one another.
        """
        while self.runnable:
            self._run(self.runnable.pop())
        if any(rank.step < len(rank.steps) for rank in self.ranks.values()):
            raise CannotAnswer(_CONTRADICTION)

    def _run(self, number: int) -> None:
        rank = self.ranks[number]
        while rank.step < len(rank.steps):
            program = rank.steps[rank.step]
            while rank.at < len(program):
                kind, seconds, op = program[rank.at]
                if kind == Kind.COMPUTE:
                    rank.now_s += seconds
                elif kind == Kind.WAIT:
                    end_s = self.end_of(rank, op)
                    if end_s is None:
                        state = self.states[op]
                        state.waiting = [*(state.waiting or ()), number]
                        return
                    rank.exposed_s[-1] += max(0.0, end_s - rank.now_s)
                    if self.is_message(op):
                        rank.waits_s[op] = rank.now_s
                    rank.now_s = max(rank.now_s, end_s)
                else:
                    rank.launched[op] = (rank.now_s, kind, seconds)
                    if kind != Kind.TAKE:
                        self._launch(op, rank.now_s)
                    elif self.states[op].end_s is None:
                        self._finish(op)  # if no rank that gives is known
                rank.at += 1
            rank.step, rank.at = rank.step + 1, 0
            rank.begins_s.append(rank.now_s)
            rank.exposed_s.append(0.0)

    def _launch(self, op: int, now_s: float) -> None:
        state = self.states[op]
        state.missing -= 1
        state.ready_s = max(state.ready_s, now_s)
        self._finish(op)

    def _finish(self, op: int | None) -> None:
        """End an operation that is ready, and those that were waiting for its end."""
        while op is not None and op in self.states:
            state, before = self.states[op], self._before.get(op)
            earlier_s = 0.0 if before is None else self.states[before].end_s
            if state.missing or earlier_s is None:
                return
            one = self._ops[op]
            begin_s = max(state.ready_s, earlier_s)
            state.end_s = begin_s + one.work_s * one.scale
            self.runnable += state.waiting or ()
            state.waiting = None
            op = self._next.get(op)

    def is_message(self, op: int) -> bool:
        """Return whether an operation is a send or recv."""
        return self._ops[op].op in P2P

    def end_of(self, rank: _Rank, op: int) -> float | None:
        """Return when the part of a rank ends; ``None``: that is not known yet."""
        at_s, kind, seconds = rank.launched[op]
        scale = self._ops[op].scale
        if kind == Kind.GIVE:
            return at_s + seconds * scale
        state = self.states[op]
        if state.end_s is None:
            return None
        if kind == Kind.LAUNCH:
            return max(at_s, state.end_s - seconds * scale)
        return max(at_s, state.ready_s) + seconds * scale


def _before(
    ops: Mapping[int, Op], programs: Mapping[int, list[Program]], places: Mapping[int, _Place]
) -> dict[int, int]:
    """Return for each queued operation the one before it in its group.

    Operations of a group have the order in which each rank launches them. Where that leaves a choice, the first in the programs comes first.

    Raises:
        CannotAnswer: ranks launch the operations of a group in different orders.
    """
    missing = {number: 0 for number in places if ops[number].queued}
    after: dict[int, list[int]] = {number: [] for number in missing}
    for first, second in _neighbours(ops, programs):
        after[first].append(second)
        missing[second] += 1
    ready = [(places[number], number) for number, count in missing.items() if not count]
    heapify(ready)
    last: dict[str, int] = {}
    before = {}
    while ready:
        _, number = heappop(ready)
        group_id = ops[number].group_id
        if group_id in last:
            before[number] = last[group_id]
        last[group_id] = number
        for second in after[number]:
            missing[second] -= 1
            if not missing[second]:
                heappush(ready, (places[second], second))
    if any(missing.values()):
        raise CannotAnswer(_CONTRADICTION)
    return before


def _neighbours(ops: Mapping[int, Op], programs: Mapping[int, list[Program]]) -> set[tuple[int, int]]:
    """Return the pairs of queued operations of a group of which a rank launches one right after the other."""
    found = set()
    for steps in programs.values():
        last: dict[str, int] = {}
        for kind, _, number in chain.from_iterable(steps):
            if kind in LAUNCHES and ops[number].queued:
                group_id = ops[number].group_id
                if group_id in last:
                    found.add((last[group_id], number))
                last[group_id] = number
    return found


def replay(model: Model) -> list[Step]:
    """Return the steps of a replay.

    Raises:
        CannotAnswer: ranks wait for one another forever, or launch the operations of a group in different orders.
    """
    run = _Replay(model)
    run.run()
    by_rank = [_steps(run, rank) for rank in run.ranks.values()]
    return [Step(*map(fmean, zip(*steps, strict=True))) for steps in zip(*by_rank, strict=True)]


def _steps(run: _Replay, rank: _Rank) -> list[Step]:
    """Return the steps of one rank."""
    count = len(rank.steps)
    comm_s, step, covered_s = [0.0] * count, 0, rank.begins_s[0]
    for launch_s, end_s in sorted(_intervals(run, rank)):
        begin_s = max(launch_s, covered_s)
        while step < count - 1 and rank.begins_s[step + 1] <= begin_s:
            step += 1
        for at in range(step, count):  # an operation may end in a later step
            until_s = min(end_s, rank.begins_s[at + 1])
            comm_s[at] += max(0.0, until_s - max(begin_s, rank.begins_s[at]))
            if until_s == end_s:
                break
        covered_s = max(covered_s, end_s)
    durations = (end - begin for begin, end in pairwise(rank.begins_s))
    return [Step(*each) for each in zip(durations, comm_s, rank.exposed_s, strict=False)]


def _intervals(run: _Replay, rank: _Rank) -> Iterator[tuple[float, float]]:
    """Yield when operations were in flight; messages, while the rank waited for them."""
    for op, (at_s, *_) in rank.launched.items():
        begin_s, end_s = rank.waits_s.get(op, inf) if run.is_message(op) else at_s, run.end_of(rank, op)
        if end_s is not None and begin_s < end_s:
            yield begin_s, end_s
