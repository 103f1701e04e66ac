"""What is known of a rank's own time between two records (``own_time``). Pure."""

from __future__ import annotations

from dataclasses import dataclass


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
