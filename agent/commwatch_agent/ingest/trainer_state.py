"""The state of one trainer, besides the operations that it records. Pure: the intake and ``Processes`` keep it current."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from commwatch.wire import events as ev
from commwatch.wire.modes import FULL
from commwatch.wire.ring import Outside
from commwatch_agent.ingest.tables.weights import IN_FLIGHT, SAMPLE
from commwatch_agent.ingest.why_late import MOST_SAMPLES, Sample
from commwatch_agent.model.endings import Ending
from commwatch_agent.model.names_file import Names
from commwatch_agent.model.shares import Account
from commwatch_agent.model.views import RankTraffic
from commwatch_collectors.node.cores import Cores
from commwatch_collectors.node.judged_activity import Activity

#: Samples with a longer time between them are not of one stretch.
_GAP_NS = 10 * 10**9


class TrainerState(Names):
    """The state of one run of one rank.

    Args:
        identity: of its ring.
        account: as for ``Names``.
    """

    def __init__(self, identity: dict[str, Any], account: Account | None = None) -> None:
        super().__init__(account)
        self.identity = identity
        self.rank: int = identity["rank"]
        #: Wall time minus the trainer's clock.
        self.offset_ns: int = identity["wall_offset_ns"]
        #: The user who wrote the ring; ``None``: not known, so no file that the trainer names is read.
        self.owner_uid: int | None = None
        #: Key of its run on this node (``runs.KnownRun``); empty: not known.
        self.run_key = ""
        self.in_flight: list[ev.Record] = []
        #: The part of its ring with the split sizes of its latest calls (``wire.splits``); empty: none is noted.
        self.splits = b""
        #: What it waits for outside operations.
        self.outside = Outside(0, 0, 0, "", "")
        self.alive = True
        #: The trainer's pid as the agent sees it; ``None``: not visible.
        self.pid: int | None = None
        #: Pid and state of its process at the latest sample, as in ``collectors.node.process``.
        self.process: tuple[int, str | None] | None = None
        #: What it does while others wait for it, and when that was found, on the monotonic clock; ``None``: none waits, or not known.
        self.activity: tuple[int, Activity] | None = None
        #: What its TCP connections do while it communicates much, and when that was found, on the monotonic clock; ``None``: not looked at.
        self.traffic: tuple[int, RankTraffic] | None = None
        #: The latest samples of its process and GPU, of the time before a standstill if it is in one.
        self.samples: deque[Sample] = deque(maxlen=MOST_SAMPLES)
        #: Its cores and threads when it last was found to lack cores; ``None``: not known, or it never did.
        self.cores: Cores | None = None
        self.closed_properly = False
        #: It has destroyed its default group, so the ring is closed, but its process lives.
        self.has_left = False
        #: How it ended; ``None``: not ended.
        self.ending: Ending | None = None
        self.gone_ns: int | None = None  # monotonic time when its trainer was found ended
        #: When its probe last sent a heartbeat, which it does from the first operation on; 0: not yet.
        self.heartbeat_ns = 0
        self.dropped = self.probe_ns = self.overflow = 0
        #: When the table of operations in flight was last found to have overflowed.
        self.overflow_ns: int | None = None
        #: How much the probe records (``modes.MODES``), and since when.
        self.mode = FULL
        self.mode_since_ns = 0

    def hold_in_flight(self, records: list[ev.Record]) -> None:
        """Take the operations in flight, oldest first; without room for all of them, no more than before."""
        before = len(self.in_flight)
        if not before and not records:
            return
        has_room = self.account.change(IN_FLIGHT * before, IN_FLIGHT * len(records))
        self.in_flight = records if has_room else records[:before]

    def hold_splits(self, area: bytes) -> None:
        """Take the split sizes of the latest calls; without room for them, none."""
        if self.account.change(len(self.splits), len(area)):
            self.splits = area

    def add_sample(self, sample: Sample) -> None:
        """Add a sample of the process; without room for one more, it takes the place of the oldest. Those before a gap are dropped."""
        if self.samples and sample.now_ns - self.samples[-1].now_ns > _GAP_NS:
            self.account.change(SAMPLE * len(self.samples), 0)
            self.samples.clear()
        if len(self.samples) < MOST_SAMPLES and not self.account.take(SAMPLE):
            if not self.samples:
                return
            self.samples.popleft()
        self.samples.append(sample)

    def pending(self) -> Iterator[ev.Record]:
        """Yield the operations in flight: sends and receives only if a thread waits for them; on a GPU those that it has reached."""
        return (
            noted
            for noted in self.in_flight
            if noted.flags & ev.BLOCKED or not (noted.flags & ev.ON_DEVICE or self.op_name(noted.op) in ev.P2P)
        )
