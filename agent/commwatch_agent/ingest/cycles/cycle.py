"""The cycle that the operations of a rank repeat. Pure; no clock decides.

It is found in the order in which the rank launched its operations. Then one of its groups has the iterations: each turn ends at the same
place of that group's operations, by their numbers, so that all ranks of the group end a turn at the same operation. A sequence that does
not repeat, or only after more than ``MOST_CYCLE`` operations, has no cycle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from commwatch_agent.ingest.columns import Ints
from commwatch_agent.ingest.cycles.ends import End

#: Most operations of a cycle; and of the latest ones, in which it is searched. A rank keeps no others.
MOST_CYCLE = 4096
MOST_KEPT = 3 * MOST_CYCLE + 64
#: For how long a cycle must have been repeated before it is one. The time doubles after a cycle that ended sooner than that, up to a limit:
#: a loop within a longer cycle is not taken for it again and again. And after how many operations the time does not matter.
LEAST_NS, MOST_NS, _MANY = 2_000_000_000, 64_000_000_000, 4096
#: How many turns a cycle must have had and how many operations it must have predicted; and where that is less than half of what is kept,
#: or other groups' operations repeat none: fewer equal turns may be chance.
_TURNS, _PREDICTED, _TURNS_BY_CHANCE, _PREDICTED_BY_CHANCE = 3, 64, 8, 16
#: How many turns suffice after this many times the time, which the operations of one group among others need in any case.
_TURNS_OF_LONG, _LONG = 5, 10
#: Shorter turns are taken together, as many as a power of two, so that all ranks end an iteration with the same one.
_SHORTEST_NS = 10_000_000
#: Least operations that a cycle must have predicted to be looked at, and most lengths of cycles that are.
_LEAST_ALIKE, _MOST_TRIED = 4, 64
#: Long pauses are looked for among these parts of all; how many there must be, and how many of them after equally many operations.
_PARTS, _LEAST_PAUSES, _REGULAR = (1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128), 8, 0.9
#: After so many turns that are alike, or so much time, without such pauses there are none.
_MANY_ALIKE, _LONG_ALIKE_NS = 128, 10_000_000_000
#: Most operations that wait for an earlier one of their group, which ends later.
_MOST_AHEAD = 256
#: Places in a code: of the size class, the peer of a message, and the group.
CLASS_SHIFT, PEER_SHIFT, GROUP_SHIFT = 8, 16, 40


class Operations(NamedTuple):
    """Some operations of a rank, in the order of its records; arrays of shape [operations]."""

    #: What it is: same for the same operation on all ranks, but for the group (from ``GROUP_SHIFT``).
    code: Ints
    #: Number in its group.
    seq: Ints
    launch: Ints
    end: Ints

    def some(self, wanted: Ints | slice) -> Operations:
        """Return those at some places."""
        return Operations(*(values[wanted] for values in self))


class Cycle:
    """The cycle of one group.

    Args:
        codes: of the operations of one turn.
        begin: number of an operation that begins a turn.
        next_seq: number of the next operation.
        launch_ns: of the latest operation.
    """

    def __init__(self, codes: Ints, begin: int, next_seq: int, launch_ns: int) -> None:
        self.codes, self._begin, self._next, self.since_ns = codes, begin, next_seq, launch_ns
        self._group = int(codes[0]) >> GROUP_SHIFT
        #: Operations that wait for an earlier one, which has not ended.
        self._ahead = Operations(*[np.empty(0, np.int64)] * 4)
        self._begun = False
        #: Operations of the rank since the latest end of a turn.
        self._since_end = 0

    def follow(self, operations: Operations) -> tuple[list[End], int]:
        """Return the ends of turns, and how many operations come before one that the cycle does not have."""
        at = np.flatnonzero(operations.code >> GROUP_SHIFT == self._group)
        mine = operations if len(at) == len(operations.code) else operations.some(at)
        if len(self._ahead.seq) or not self._are_next(mine.seq):
            mine, at = self._in_order(mine, at)
            if len(self._ahead.seq) > _MOST_AHEAD or (len(self._ahead.seq) and self._ahead.seq[0] < self._next):
                return [], 0
        number, turn = len(at), (self._next - self._begin) % len(self.codes)
        wrong = mine.code != np.tile(self.codes, 1 + (turn + number) // len(self.codes))[turn : turn + number]
        right = int(wrong.argmax()) if wrong.any() else number
        last = np.arange(len(self.codes) - 1 - turn, right, len(self.codes))
        ends = [
            End(*each, first=False)
            for each in zip(at[last].tolist(), mine.seq[last].tolist(), mine.end[last].tolist(), strict=True)
        ]
        if ends and not self._begun:
            self._begun, ends[0] = True, ends[0]._replace(first=True)
        if right < number:
            return ends, int(at[right])
        self._next += right
        self._since_end = len(operations.code) - 1 - ends[-1].place if ends else self._since_end + len(operations.code)
        return ends, len(operations.code) - (self._since_end > MOST_CYCLE)

    def goes_on(self, operations: Operations) -> bool:
        """Return whether the cycle has these operations; they end no iteration."""
        _, number = self.follow(operations)
        self._begun = False
        return number == len(operations.code)

    def _are_next(self, seq: Ints) -> bool:
        return np.array_equal(seq, np.arange(self._next, self._next + len(seq)))

    def _in_order(self, mine: Operations, at: Ints) -> tuple[Operations, Ints]:
        """Return the group's operations by number up to the first one that is missing, with the places after which they are known."""
        at = np.append(np.zeros(len(self._ahead.seq), np.int64), at)
        mine = Operations(*map(np.append, self._ahead, mine))
        order = np.argsort(mine.seq, kind="stable")
        mine = mine.some(order)
        missing = mine.seq != np.arange(self._next, self._next + len(mine.seq))
        number = int(missing.argmax()) if missing.any() else len(missing)
        self._ahead = mine.some(slice(number, None))
        return mine.some(slice(number)), np.maximum.accumulate(at[order][:number])


def find(operations: Operations, least_ns: int, size_of: Callable[[int], int]) -> Cycle | None:
    """Return the cycle that the latest operations repeat; ``None``: there is none.

    Args:
        operations: by launch.
        least_ns: for how long they must have repeated it, unless there are many.
        size_of: as for ``Finder``.
    """
    length, period = repeats(operations.code)
    if _is_clear(operations.launch, length, period, least_ns):
        counts = Counter((operations.code[-period:] >> GROUP_SHIFT).tolist())
        group = min(counts, key=lambda one: (-size_of(one), counts[one], one))
        return _cycle_of(_of_group(operations, group), counts[group], alone=len(counts) == 1)
    # The operations of the largest group may repeat a cycle, with any number of others between them.
    groups = np.unique(operations.code >> GROUP_SHIFT).tolist()
    for group in sorted(groups, key=lambda one: (-size_of(one), one)) if len(groups) > 1 else ():
        mine = _of_group(operations, group)
        length, period = repeats(mine.code)
        turn_ns = int(mine.launch[-1] - mine.launch[-length]) * period // length if length else 0
        if operations.launch[-1] - mine.launch[-1] > 2 * turn_ns:
            continue  # it is not used now
        is_short = period * len(operations.code) <= MOST_CYCLE * len(mine.code)
        is_clear = is_short and _is_clear(mine.launch, length, period, _LONG * least_ns, alone=False)
        return _cycle_of(mine, period) if is_clear else None
    return None


def repeats(codes: Ints) -> tuple[int, int]:
    """Return the lengths of the longest suffix that repeats a cycle, and of the cycle; (0, 0): none has predicted ``_LEAST_ALIKE`` operations."""
    backwards, number = codes[::-1], len(codes)
    periods, alike = np.arange(1, max(1, number - _LEAST_ALIKE)), 0
    # Lengths of cycles that have predicted the latest operation, the one before it, and so on.
    for most in (_LEAST_ALIKE, 16, 64, 256, 1024):
        if alike < _LEAST_ALIKE or len(periods) > _MOST_TRIED:
            for at in range(alike, min(most, number // 2)):
                periods = periods[: int(np.searchsorted(periods, number - at))]
                periods = periods[backwards[periods + at] == backwards[at]]
            alike = most
    found = 0, 0
    for period in periods[:_MOST_TRIED].tolist():
        wrong = backwards[period:] != backwards[: number - period]
        length = period + int(wrong.argmax()) if wrong.any() else number
        found = max(found, (length, period), key=lambda one: one[0])
        if length == number:
            break
    return found


def _of_group(operations: Operations, group: int) -> Operations:
    """Return the operations of a group, by number."""
    mine = operations.some(np.flatnonzero(operations.code >> GROUP_SHIFT == group))
    return mine.some(np.argsort(mine.seq, kind="stable"))


def _is_clear(launch: Ints, length: int, period: int, least_ns: int, *, alone: bool = True) -> bool:
    """Return whether the repetition of the latest operations is a cycle: often enough, for long enough, and not too long.

    Args:
        alone: there are no others between them.
    """
    if not 0 < period <= MOST_CYCLE:
        return False
    lasted_ns, predicted = int(launch[-1] - launch[-length]), length - period
    if length < _MANY and lasted_ns < least_ns:
        return False
    if length >= _TURNS_BY_CHANCE * period and predicted >= _PREDICTED_BY_CHANCE:
        return True
    if not alone or 2 * length < len(launch):
        return False
    is_long = length >= _TURNS_OF_LONG * period and lasted_ns >= _LONG * least_ns
    return is_long or (length >= _TURNS * period and predicted >= _PREDICTED)


def _cycle_of(mine: Operations, period: int, *, alone: bool = False) -> Cycle | None:
    """Return the cycle of a group's operations, which repeat after ``period``; ``None``: some are missing, or more are needed.

    Args:
        alone: no other group is in the cycle.
    """
    until, turn_ns = int(mine.seq[-1]) + 1, int(mine.launch[-1] - mine.launch[0]) * period // len(mine.seq)
    latest = mine.some(slice(-period, None))
    if not np.array_equal(latest.seq, np.arange(until - period, until)):
        return None
    codes = latest.code.tolist()
    # If the group repeats a shorter cycle, an iteration begins with a number that all its ranks agree on.
    shortest = next(n for n in range(1, period + 1) if period % n == 0 and codes[n:] == codes[:-n])
    begin = (until - period + _begin(codes)) % shortest
    together, regular = 1, _regular_pause(mine)
    alike = shortest < period or (alone and period == 1)
    if (
        regular is None
        and alike
        and len(mine.seq) < _MANY_ALIKE * period
        and mine.launch[-1] - mine.launch[0] < _LONG_ALIKE_NS
    ):
        return None  # pauses may still tell where a turn begins
    if regular is not None and regular[0] % period == 0:
        together, begin = regular[0] // period, regular[1]
    while together * turn_ns < _SHORTEST_NS and 2 * together * period <= MOST_CYCLE:
        together *= 2
    turns = np.tile(np.roll(latest.code, until - period - begin), together)
    return Cycle(turns, begin, until, int(mine.launch[-1]))


def _regular_pause(mine: Operations) -> tuple[int, int] | None:
    """Return how many of a group's operations lie between its regular long pauses, and after which numbers modulo that they come.

    A step whose operations are all alike repeats a cycle of one operation; only the time of its computation tells where it begins.
    """
    pauses = mine.launch[1:] - np.maximum.accumulate(mine.end)[:-1]
    for part in _PARTS:
        at = np.flatnonzero(pauses > max(0, np.quantile(pauses, 1 - part) // 2))
        # Before the first operation there may have been another: whether there was depends on where one begins to look.
        if len(at) + 1 < max(_LEAST_PAUSES, part * len(pauses)):
            return None
        apart, numbers = np.bincount(np.minimum(np.diff(at), MOST_CYCLE)), mine.seq[at + 1]
        most = int(apart.argmax())
        if 1 < most < MOST_CYCLE and apart[most] >= _REGULAR * (len(at) - 1):
            phases = np.bincount(numbers % most)
            if phases.max() >= _REGULAR * len(at):
                return most, int(phases.argmax())
    return None


def _begin(codes: Sequence[int]) -> int:
    """Return where the least rotation of a cycle begins, which is the same wherever the cycle was first seen."""
    length, first, second, same = len(codes), 0, 1, 0
    while first < length and second < length and same < length:
        one, other = codes[(first + same) % length], codes[(second + same) % length]
        if one == other:
            same += 1
            continue
        if one > other:
            first += same + 1
        else:
            second += same + 1
        second += first == second
        same = 0
    return min(first, second)
