"""What is known of a rank between two records: its own time (``own_time``), and how long it was blocked (``blocked_steps``). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from commwatch.wire import events as ev


@dataclass
class OwnTime:
    """What is known of a rank between two records; times in ns of its clock."""

    #: End of the latest symmetric operation that blocked it, plus later waits; and of its latest collective of any kind; 0: not known.
    came_out_ns: int = 0
    ended_ns: int = 0
    #: The latest two step marks.
    marks_ns: tuple[int, int] = (0, 0)
    #: Key of the current run of operations that do not block their caller (``OwnLateness``), and when the communication before it ended.
    run_ns: int = -1
    before_run_ns: int = 0


class Blocked(NamedTuple):
    """Of the operations of a rank that ended since its latest step mark."""

    #: How long threads were blocked in them, at most.
    ns: int = 0
    #: In how many of them that was seen, though they did not block their caller; and of how many it is not known.
    seen: int = 0
    not_known: int = 0

    def bounded(self, mark: ev.Record) -> ev.Record:
        """Return a step mark with an exposed time that these operations allow."""
        is_known = self.seen and not self.not_known and mark.flags & ev.EXPOSED and mark.timing == ev.BY_NONE
        return mark._replace(size_bytes=min(mark.size_bytes, self.ns)) if is_known else mark
