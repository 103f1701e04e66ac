"""Which optimizer calls make up a training step: a rule, found in their order. Pure; no clock decides.

A rule takes marks one by one and returns the calls of each step that is over. It is ``broken`` where the loop has changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

#: Optimizer calls of a step, and of those that are looked at to find a rule.
MOST_HELD = 4096
#: A cycle that was not as expected counts for two that were; a rule that owes more is given up.
_STRAYED, _MOST_DOUBT = 2, 8


class Mark(NamedTuple):
    """End of one optimizer call (or explicit mark, ``optimizer`` -1); times in ns of the trainer's clock."""

    seq: int
    optimizer: int
    began_ns: int
    ended_ns: int
    #: Exposed time since the mark before; ``None`` = not known.
    exposed_ns: int | None
    #: Operations then in flight: the step's communication is not complete before they are.
    in_flight: int
    #: No forward pass ran since the call before.
    same_pass: bool = False


class EachPass:
    """Each forward pass is a step: all calls up to the next pass belong to it.

    Args:
        common: optimizers one of which takes part in every step.
    """

    def __init__(self, common: frozenset[int]) -> None:
        self._common = common
        self.broken = False
        #: Marks of the step to come. After an early end these are calls that came late; they lie in the next step.
        self.open: list[Mark] = []
        #: The optimizers called in this pass, and in the pass before; whether this pass's step is over.
        self._calls: list[int] = []
        self._usual: list[int] = []
        self._over = True

    def feed(self, mark: Mark) -> list[list[Mark]]:
        """Take the next mark; returns the calls of the steps that are over now."""
        closed = []
        if not (mark.same_pass and self._calls) or len(self._calls) == MOST_HELD:
            if self._calls:
                self._common &= frozenset(self._calls)
                if not self._common:
                    self.broken = True
                    return []
            closed = self.end()
            self._usual, self._calls, self._over = self._calls, [], False
        self._calls.append(mark.optimizer)
        self.open.append(mark)
        # As many calls as in the pass before: no need to wait for the next pass.
        return [*closed, *self.end()] if self._calls == self._usual else closed

    def end(self) -> list[list[Mark]]:
        """No call comes any more in this pass."""
        if self._over or self._common.isdisjoint(self._calls):
            return []
        closed, self.open, self._over = self.open, [], True
        return [closed]


class Cycle:
    """Optimizers take turns: each time around is a step, which ends at the last of them.

    Args:
        order: the optimizers of one step; one that is called several times is there as often.
        place: where in ``order`` the first mark will be.
    """

    def __init__(self, order: Sequence[int], place: int) -> None:
        self._order = tuple(order)
        self._place = place
        self.broken = False
        #: Marks of the step that is not over yet.
        self.open: list[Mark] = []
        self._strayed = False
        self._doubt = _MOST_DOUBT

    def feed(self, mark: Mark) -> list[list[Mark]]:
        """Take the next mark; returns the calls of the steps that are over now.

        A call that is left out (a gradient scaler skips some) changes nothing: the step ends at the last, or before the next first.
        """
        place = self._find(mark.optimizer)
        if place is None or self._doubt > _MOST_DOUBT:
            self.broken = True
            return []
        closed = []
        self._strayed |= place != self._place
        if place < self._place:
            closed += self.end()
        self.open.append(mark)
        self._place = place + 1
        if self._place == len(self._order):
            closed += self.end()
        return closed

    def end(self) -> list[list[Mark]]:
        """The step is over, whole or not."""
        self._doubt = self._doubt + _STRAYED if self._strayed else max(0, self._doubt - 1)
        closed, self.open = self.open, []
        self._place, self._strayed = 0, False
        return [closed] if closed else []

    def _find(self, optimizer: int) -> int | None:
        for since, until in ((self._place, len(self._order)), (0, self._place)):
            try:
                return self._order.index(optimizer, since, until)
            except ValueError:
                continue
        return None


def find(marks: Sequence[Mark], least: int) -> tuple[int, EachPass | Cycle] | None:
    """The rule that the latest marks follow, half of them or more, and the number of marks before those.

    Args:
        least: so many marks must have come as a cycle foresees, or so many forward passes must have one optimizer in common.

    Returns:
        ``None`` where there is no rule, or not yet.
    """
    numbers = [mark.optimizer for mark in marks]
    length, period = repeats(numbers)
    clear = 2 * length >= len(marks) and length - period >= least
    since = len(marks) - length if clear else 0
    order = numbers[since : since + period]
    if clear and len(set(order)) == period > 1:
        return since, _cycle(order, marks[since:])
    passes = _passes(marks[since:])
    common = frozenset.intersection(*passes[:-1]) if len(passes) > 1 else frozenset()
    if common and (clear or len(passes) > least):
        return since, EachPass(common)
    if len(passes) == len(set(numbers)) == 1:
        return None  # perhaps the first step of an optimizer that is called for each group of its parameters
    return (since, _cycle(order, marks[since:])) if clear else None


def repeats(numbers: Sequence[int]) -> tuple[int, int]:
    """Length of the longest end of the sequence that is one cycle twice or more often, and of the cycle; (0, 0): there is none."""
    backwards, found = numbers[::-1], (0, 0)
    borders = [0] * len(backwards)  # of Knuth, Morris and Pratt: what a beginning ends with, too
    for at in range(1, len(backwards)):
        border = borders[at - 1]
        while border and backwards[at] != backwards[border]:
            border = borders[border - 1]
        borders[at] = border = border + (backwards[at] == backwards[border])
        if 2 * border >= at + 1:
            found = at + 1, at + 1 - border
    return found


def _passes(marks: Sequence[Mark]) -> list[frozenset[int]]:
    """The optimizers called in each forward pass."""
    passes: list[set[int]] = []
    for mark in marks:
        if passes and mark.same_pass:
            passes[-1].add(mark.optimizer)
        else:
            passes.append({mark.optimizer})
    return [frozenset(optimizers) for optimizers in passes]


def _cycle(order: Sequence[int], marks: Sequence[Mark]) -> Cycle:
    """The rule for a loop of these turns, of which ``marks`` are the latest two or more.

    A step ends at the optimizer that is called least often (the generator, after its discriminator), before a forward pass, and
    otherwise where the loop was when it was first seen.
    """
    count = Counter(order)
    rarest = min(count.values())
    places = range(len(order))
    last = max(places, key=lambda at: (count[order[at]] == rarest, not marks[at + 1].same_pass, at))
    return Cycle([*order[last + 1 :], *order[: last + 1]], (len(order) - last - 1) % len(order))
