"""The state of one trainer, besides the operations that it records. Pure: the intake and ``Processes`` keep it current."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from commwatch.collectors.probe.governor import FULL
from commwatch.collectors.wire import events as ev
from commwatch.core.endings import Ending
from commwatch.core.names_file import Names
from commwatch.ingest.why_late import MOST_SAMPLES, Sample


class TrainerState(Names):
    """The state of one run of one rank.

    Args:
        identity: of its ring.
    """

    def __init__(self, identity: dict[str, Any]) -> None:
        super().__init__()
        self.identity = identity
        self.rank: int = identity["rank"]
        #: Wall time minus the trainer's clock.
        self.offset_ns: int = identity["wall_offset_ns"]
        #: The user who wrote the ring; ``None``: not known, so no file that the trainer names is read.
        self.owner_uid: int | None = None
        self.in_flight: list[ev.Record] = []
        self.alive = True
        #: The trainer's pid as the agent sees it; ``None``: not visible.
        self.pid: int | None = None
        #: Pid and state of its process at the latest sample, as in ``collectors.node.process``.
        self.process: tuple[int, str | None] | None = None
        #: The latest samples of its process and GPU.
        self.samples: deque[Sample] = deque(maxlen=MOST_SAMPLES)
        self.closed_properly = False
        #: How it ended; ``None``: not ended.
        self.ending: Ending | None = None
        self.gone_ns: int | None = None  # monotonic time when its trainer was found ended
        self.heartbeat_ns = self.dropped = self.probe_ns = self.overflow = 0
        #: When the table of operations in flight was last found to have overflowed.
        self.overflow_ns: int | None = None
        #: How much the probe records (``governor.MODES``), and since when.
        self.mode = FULL
        self.mode_since_ns = 0

    def pending(self) -> Iterator[ev.Record]:
        """Yield the operations in flight: sends and receives only if a thread waits for them; on a GPU those that it has reached."""
        return (
            noted
            for noted in self.in_flight
            if noted.flags & ev.BLOCKED or not (noted.flags & ev.ON_DEVICE or self.op_name(noted.op) in ev.P2P)
        )
