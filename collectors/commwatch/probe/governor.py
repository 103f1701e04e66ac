"""Choose how much the probe records, by its cost to the training: all, a sample, or only counts. Pure.

The probe measures the CPU time of its own bookkeeping for one operation in 64, or more where operations are few. In windows of a second
the governor compares that with the budget: after two windows above it, less is recorded; after a while within it, the richer mode is
tried again, after twice as long each time that failed. ``native/governor.h`` has these rules for the native hook.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from commwatch.wire.events import size_log2
from commwatch.wire.modes import COUNTERS, FULL, SAMPLE_BITS, SAMPLING
from commwatch.wire.variables import part

#: Operations, or ns, between two measurements of the bookkeeping. Each counts for all operations since the one before.
COST_SAMPLE, COST_NS = 64, 50_000_000
#: A measurement counts at most ``COST_BOUND`` times the third largest of the latest ones.
COST_BOUND, COST_REMEMBERED, COST_RARE = 4, 15, 2
#: Share of the time (0 to 1) that the probe may take by hook, unless ``COMMWATCH_BUDGET`` is set. The Python hook costs 20 to 60 us an
#: operation among other work: at 0.5% it would lose the shares of ordinary FSDP jobs, which have some hundred operations a second.
DEFAULT_BUDGET = {"native": 0.005, "python": 0.02}
#: Time between two checks. A window ends at the first check with ``ENOUGH`` measurements, or with none, for then there was no operation;
#: with fewer, after ``LONGEST_NS``.
LOOK_NS = 1_000_000_000
ENOUGH, LONGEST_NS = 4, 10_000_000_000
#: Windows above the budget after which less is recorded.
PATIENCE = 2
#: Windows within the budget after which a richer mode is tried: at first, and at most; doubled after each failed trial.
FIRST_TRIAL, LAST_TRIAL = 4, 512

#: Runs of 16 numbers are sampled, because the begin of an operation depends on the one before. The runs are spread evenly and are equal
#: on all ranks, so that their records can be joined.
RUN_BITS = 4
SPREAD = 0x9E3779B1  # 2**32 over the golden ratio
#: Most bytes of outputs that are kept in order to time operations on GPUs: PyTorch's handle of an operation holds its outputs.
MOST_KEPT = 256 << 20


def is_sampled(seq: int) -> bool:
    """Return whether the operation with this number is recorded in mode ``sampling``."""
    return ((seq >> RUN_BITS) * SPREAD & 0xFFFFFFFF) >> (32 - SAMPLE_BITS) == 0


def is_recorded(mode: int, seq: int) -> bool:
    """Return whether the operation with this number gets a record in this mode; if not, it is only counted."""
    return mode == FULL or (mode == SAMPLING and is_sampled(seq))


def budget_of(env: Mapping[str, str], hook: str) -> float:
    """Return the budget in force for this hook, a share of the time, 0 to 1; 0: no limit, everything is recorded."""
    given = part(env.get("COMMWATCH_BUDGET", ""))
    return DEFAULT_BUDGET[hook] if given is None else given


class CostTurns:
    """Chooses the operations whose bookkeeping is measured.

    A measurement is due after ``COST_SAMPLE`` operations or ``COST_NS``. One of the operations that follow is then drawn at random: the first
    after a pause is the most expensive, because its code and data have left the caches, and would make all others appear as expensive.
    """

    def __init__(self) -> None:
        self._operations, self._latest_ns, self._state = 0, -1, 1
        #: Operations to let pass before the one that is measured; -1: no measurement is due.
        self._ahead = -1

    def next(self, now_ns: int) -> int:
        """Return the number of operations for which this one is measured; 0: it is not measured."""
        self._operations += 1
        if self._ahead < 0:
            if self._latest_ns < 0:
                self._latest_ns = now_ns
            if self._operations < COST_SAMPLE and now_ns - self._latest_ns < COST_NS:
                return 0
            self._state = (self._state * 1664525 + 1013904223) & 0xFFFFFFFF
            self._ahead = self._state * self._operations >> 32
        self._ahead -= 1
        if self._ahead >= 0:
            return 0
        self._latest_ns = now_ns
        since, self._operations = self._operations, 0
        return since


class UsualCost:
    """Bounds outliers of measurements: during one the kernel may preempt the thread, and count its own work as the thread's.

    That is rare. A cost that occurs in more than ``COST_RARE`` of the latest ``COST_REMEMBERED`` measurements counts in full, because some
    kinds of operations, and some parts of the bookkeeping, cost more than others.
    """

    def __init__(self) -> None:
        self._latest: list[int] = []
        self._number = 0

    def bound(self, took_ns: int) -> int:
        """Return the part of a measurement that counts, in ns."""
        if self._number < COST_REMEMBERED:
            self._latest.append(took_ns)
        else:
            self._latest[self._number % COST_REMEMBERED] = took_ns
        self._number += 1
        known = sorted(self._latest)  # a copy: another thread may measure at the same time
        return min(took_ns, COST_BOUND * known[max(len(known) - 1 - COST_RARE, 0)])


class Governor:
    """Decides the mode, window by window.

    Args:
        budget: share of the time that the probe may take, 0 to 1; 0: no limit.
    """

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self.mode = FULL
        self._above = self._within = 0
        self._trial = FIRST_TRIAL // 2

    @staticmethod
    def is_over(elapsed_ns: int, measured: int) -> bool:
        """Return whether a window of this length, with so many measurements, is over."""
        return elapsed_ns >= (LONGEST_NS if 0 < measured < ENOUGH else LOOK_NS)

    def window(self, share: float) -> int:
        """Return the mode from now on, after a window in which the probe took this share of the time, 0 to 1."""
        if 0 < self._budget < share:
            self._above, self._within = self._above + 1, 0
            if self._above >= PATIENCE and self.mode < COUNTERS:
                self.mode, self._above = self.mode + 1, 0
                self._trial = min(2 * self._trial, LAST_TRIAL)
            return self.mode
        self._above, self._within = 0, self._within + 1
        if self._within >= self._trial:
            if self.mode == FULL:
                self._trial = FIRST_TRIAL // 2  # it has held
            else:
                self.mode, self._within = self.mode - 1, 0
        return self.mode


class Count(NamedTuple):
    """Operations of one kind and size class that were only counted."""

    op: int
    group: int
    flags: int
    number: int
    bytes: int
    #: Number and launch of the latest.
    seq: int
    launch_ns: int


class Counts:
    """Operations that are only counted, from any thread, until ``take`` sums them."""

    def __init__(self) -> None:
        self._latest: deque[tuple[int, int, int, int, int, int]] = deque()
        #: Count one: op, group, flags, size in bytes, number, launch. Neither this nor ``take`` holds a lock.
        self.add = self._latest.append

    def take(self) -> list[Count]:
        """Return the counts since the last call, by op, group and size class."""
        sums: dict[tuple[int, int, int, int], list[int]] = {}
        for _ in range(len(self._latest)):
            op, group, flags, size, seq, launch = self._latest.popleft()
            counted = sums.setdefault((op, group, flags, size_log2(size)), [0, 0, 0, 0])
            counted[:] = counted[0] + 1, counted[1] + size, seq, launch
        return [Count(*key[:3], *counted) for key, counted in sums.items()]
