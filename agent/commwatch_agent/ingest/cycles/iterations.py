"""Iterations of a rank whose steps nothing marks: the turns of the cycle that its operations repeat. Pure; no clock decides."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from commwatch_agent.ingest.columns import Flags, Ints
from commwatch_agent.ingest.cycles.cycle import GROUP_SHIFT, LEAST_NS, MOST_KEPT, MOST_NS, Cycle, Operations, find
from commwatch_agent.ingest.cycles.ends import End

#: Operations are searched for a cycle when they span this much more time than at the last search; twice as much after each failure.
_SEARCH_NS, _MOST_SEARCH_NS = 500_000_000, 16_000_000_000
#: With so many collectives, a rank has no iterations of messages.
_ENOUGH = 8
#: So many of the latest operations may not have ended while later ones have.
_MOST_LATEST = 64
#: Bytes that one kept operation takes.
KEPT = 32


class Finder:
    """Finds the iterations of one rank in its operations.

    Args:
        size_of: returns the number of ranks of a group.
    """

    def __init__(self, size_of: Callable[[int], int]) -> None:
        self._size_of = size_of
        self._kept: list[Operations] = []
        #: Number of operations in which a cycle is searched.
        self.number = 0
        self._cycle: Cycle | None = None
        #: For how long the next cycle must have been repeated.
        self._least_ns = LEAST_NS
        #: Launch of the operation at the last search; and how much later the next search is.
        self._searched_ns: int | None = None
        self._search_ns = _SEARCH_NS

    @property
    def found(self) -> bool:
        """Whether the operations repeat a cycle now."""
        return self._cycle is not None

    @property
    def bytes(self) -> int:
        """About how many bytes the kept operations take."""
        return KEPT * (self.number + (0 if self._cycle is None else len(self._cycle.codes)))

    def forget(self) -> None:
        """Forget all operations and the cycle."""
        self._kept, self.number, self._cycle = [], 0, None
        self._searched_ns, self._search_ns = None, _SEARCH_NS

    def feed(self, operations: Operations) -> list[End]:
        """Add the next operations; return the ends of iterations among them, in order."""
        ends, taken = list[End](), 0
        while taken < len(operations.code):
            rest = operations.some(slice(taken, None))
            if self._cycle is None:
                taken += self._learn(rest)
            else:
                found, number = self._follow(self._cycle, rest)
                ends += [end._replace(place=taken + end.place) for end in found]
                taken += number
        return ends

    def _follow(self, cycle: Cycle, operations: Operations) -> tuple[list[End], int]:
        """Return the ends of turns, and how many operations come before one that the cycle does not have."""
        ends, number = cycle.follow(operations)
        if number < len(operations.code):
            soon = int(operations.launch[number]) - cycle.since_ns < self._least_ns
            self._least_ns = min(2 * self._least_ns, MOST_NS) if soon else LEAST_NS
            self.forget()
        return ends, number

    def _learn(self, operations: Operations) -> int:
        """Keep operations up to the next search for a cycle; return their number."""
        if self._searched_ns is None:
            self._searched_ns = int(operations.launch[0])
        due = operations.launch >= self._searched_ns + self._search_ns
        is_due = bool(due.any())
        number = int(due.argmax()) + 1 if is_due else len(due)
        more = operations.some(slice(max(0, number - MOST_KEPT), number))
        self._kept.append(Operations(*(values.copy() for values in more)))  # the others do not stay in memory
        self.number += len(self._kept[-1].code)
        while self.number - len(self._kept[0].code) >= MOST_KEPT:
            self.number -= len(self._kept.pop(0).code)
        if is_due:
            self._search(int(operations.launch[number - 1]))
        return number

    def _search(self, now_ns: int) -> None:
        kept = Operations(*map(np.concatenate, zip(*self._kept, strict=True))).some(slice(-MOST_KEPT, None))
        kept = kept.some(np.argsort(kept.launch, kind="stable"))
        self._kept, self.number = [kept], len(kept.code)
        # Among the latest, those that have not ended are missing.
        latest = len(kept.code) - min(_MOST_LATEST, len(kept.code) // 8)
        cycle = find(kept.some(slice(latest)), self._least_ns, self._size_of)
        if cycle is not None and cycle.goes_on(kept.some(slice(latest, None))):
            self.forget()
            self._cycle = cycle
            return
        self._searched_ns, self._search_ns = now_ns, min(2 * self._search_ns, _MOST_SEARCH_NS)


class Iterations:
    """The iterations of one rank: those of its collectives, or if it has hardly any, those of its messages."""

    def __init__(self, size_of: Callable[[int], int]) -> None:
        self._collectives, self._messages = Finder(size_of), Finder(size_of)
        self._counted = 0
        #: As in ``End``, since the latest one.
        self._of_root_ns = 0

    @property
    def found(self) -> bool:
        """Whether the operations repeat a cycle now."""
        return self._collectives.found or self._messages.found

    @property
    def bytes(self) -> int:
        """About how many bytes the kept operations take."""
        return self._collectives.bytes + self._messages.bytes

    def forget(self) -> None:
        """Forget all operations and the cycle."""
        self._collectives.forget()
        self._messages.forget()

    def feed(self, operations: Operations, message: Flags, of_root_ns: Ints | None) -> list[End]:
        """Add the next operations; return the ends of iterations among them, in order.

        Args:
            message: [operations]: whether it is a message.
            of_root_ns: [operations]: time up to its end in operations in which ranks wait for a root; ``None``: there are none.
        """
        at = np.flatnonzero(~message), np.flatnonzero(message)
        parts = (operations, operations.some(at[1])) if not len(at[1]) else tuple(map(operations.some, at))
        ends = [
            end._replace(place=int(at[n][end.place])) for n, found in enumerate(self._ends(*parts)) for end in found
        ]
        if of_root_ns is not None and len(of_root_ns):
            before_ns = 0
            for number, end in enumerate(ends):
                until_ns = int(of_root_ns[end.place])
                ends[number] = end._replace(of_root_ns=self._of_root_ns + until_ns - before_ns)
                self._of_root_ns, before_ns = 0, until_ns
            self._of_root_ns += int(of_root_ns[-1]) - before_ns
        return ends

    def _ends(self, collectives: Operations, messages: Operations) -> tuple[list[End], list[End]]:
        """Add the next operations; return the ends of iterations after collectives, or after messages, in order."""
        ends = self._collectives.feed(collectives)
        if self._collectives.found or self._collectives.number >= _ENOUGH:
            self._messages.forget()
            return ends, []
        # Messages have no number in their group, but end in the order of their launches where threads wait for them.
        numbers = np.arange(self._counted, self._counted + len(messages.code))
        self._counted += len(numbers)
        together = messages.code & ((1 << GROUP_SHIFT) - 1)
        of_messages = self._messages.feed(messages._replace(code=together, seq=numbers))
        return (ends, []) if ends else ([], of_messages)
