"""Communication time of one rank by period: training steps, or a second where steps are not marked. Pure.

Sums and sums of squares give the mean and the spread, which a comparison of ranks on different nodes needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from commwatch_agent.model.intervals import Intervals, covered

SECOND_NS = 1_000_000_000
#: Shorter steps are added up to a period of at least this; a longer step is a period by itself.
_LEAST_NS = 250_000_000
#: Records of concurrent operations may arrive up to this much later.
_LAG_NS = 2 * SECOND_NS
#: Most seconds that are measured after a long wait: the latest.
_MOST_SECONDS = 60


class Periods:
    """Sums over the periods of one rank whose communication is known."""

    def __init__(self) -> None:
        self.count = self.duration_ns = self.comm_ns = 0
        #: Sum of the squared communication times, in square seconds.
        self.comm_squares = 0.0
        #: Duration and communication of the current period's steps.
        self._open_ns = 0, 0
        #: Start of the next second to measure; ``None``: no communication yet.
        self._next_ns: int | None = None

    def add(self, duration_ns: int, comm_ns: int) -> None:
        """Count a period."""
        self.count += 1
        self.duration_ns += duration_ns
        self.comm_ns += comm_ns
        self.comm_squares += (comm_ns / 1e9) ** 2

    def add_step(self, duration_ns: int, comm_ns: int | None) -> None:
        """Add a step; if its communication is not known, drop the period that it belongs to."""
        if comm_ns is None:
            self._open_ns = 0, 0
            return
        duration_ns, comm_ns = self._open_ns[0] + duration_ns, self._open_ns[1] + comm_ns
        if duration_ns < _LEAST_NS:
            self._open_ns = duration_ns, comm_ns
        else:
            self.add(duration_ns, comm_ns)
            self._open_ns = 0, 0

    def add_seconds(self, busy: Collection[Intervals], until_ns: int, is_known: Callable[[int, int], bool]) -> None:
        """Count the whole seconds that are over.

        Args:
            busy: the intervals in which the rank communicated.
            until_ns: now, or the launch of the oldest operation in flight; in ns of the clock of ``busy``.
            is_known: returns whether the communication between two times is known.
        """
        if self._next_ns is None:
            first = min((pieces.starts[0] for pieces in busy if pieces.starts), default=None)
            if first is None:
                return
            self._next_ns = -(-first // SECOND_NS) * SECOND_NS
        last_ns = (until_ns - _LAG_NS) // SECOND_NS * SECOND_NS
        for start in range(max(self._next_ns, last_ns - _MOST_SECONDS * SECOND_NS), last_ns, SECOND_NS):
            if is_known(start, start + SECOND_NS):
                self.add(SECOND_NS, covered(busy, start, start + SECOND_NS))
        self._next_ns = max(self._next_ns, last_ns)
