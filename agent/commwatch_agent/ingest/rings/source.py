"""One ring that the intake reads, and how its trainer has ended."""

from __future__ import annotations

from typing import NamedTuple

from commwatch.wire import events as ev
from commwatch.wire.ring_reader import Drained, RingReader
from commwatch_agent.history.job_exit import Stop
from commwatch_agent.history.rows import RingRow
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.model.endings import Ending
from commwatch_agent.model.runs import Origin

#: Time between two heartbeats of a trainer; most time from a failed operation to the end of the rank that it causes.
_SIGN_NS, _SHORTLY_NS = 1_000_000_000, 30_000_000_000


class Source:
    """One ring and its totals; they are kept after its end, because other ranks' records still add waits to them."""

    def __init__(self, reader: RingReader, row: RingRow, totals: RankTotals, origin: Origin) -> None:
        # The row's copy of the identity would take memory a second time.
        self.row, self.totals = row._replace(identity=reader.identity), totals
        #: What tells its run; the end of its process is filled in when another ring asks.
        self.origin = origin
        #: ``None`` once everything has been read and the file is gone.
        self.reader: RingReader | None = reader
        #: The user who owns the ring.
        self.owner = reader.uid
        self.next_n = row.next_n
        self.lost = row.lost
        #: Already in the store, or in its next commit: progress, number of closed cells, reason for no steps, source of exposed time, id of
        #: the run, frameworks.
        self.stored_progress: tuple[int, int, int] | None = None
        self.stored_cells = 0
        self.unavailable = row.steps_unavailable
        self.exposed_source: str | None = None
        #: Where the stored steps come from.
        self.step_source: str | None = None
        self.stored_run = ""
        self.stored_frameworks: tuple[str, ...] | None = None
        #: The trainer has ended, and all its records are drained.
        self.final = False
        #: Monotonic time when its end was first handed to the store, and that end; ``None``: it was not.
        self.ended_ns: int | None = None
        self.stored_ending: Ending | None = None
        #: Of its trainer, as this agent sees it; 0: not known. And when that process ended, as monotonic ns; ``None``: not known.
        self.pid = 0
        self.died_ns: int | None = None
        #: Its exit code, or ``-n`` for signal n; ``None``: not known.
        self.status: int | None = None
        #: Monotonic time when its trainer was last found alive; ``None``: not by this agent.
        self.alive_ns: int | None = None
        #: Monotonic time before the last drain that left nothing behind: operations that end later may still be in the ring.
        self.read_ns = 0
        #: Number of the tick in which it last had a turn.
        self.turn = 0
        #: Its names up to the records that were stored before this agent began have been read, and these records counted.
        self.is_recalled = False

    def seen_ns(self, now_ns: int, wall_ns: int, boot_id: str) -> int:
        """Return the wall time now as the ring counts it, so that it can be compared with its records; of another boot, the agent's."""
        return now_ns + self.totals.offset_ns if self.totals.identity.get("boot_id") == boot_id else wall_ns


class Look(NamedTuple):
    """What one drain of a ring gave, the pid of its trainer as ``RingReader.owner`` returns it, whether that lives; whether there is more."""

    source: Source
    reader: RingReader
    drained: Drained
    owner: int | None
    alive: bool
    more: bool


def ending(source: Source, closed_ns: int, stop: Stop | None = None) -> Ending:
    """Return the ending of a rank that no longer runs.

    Args:
        closed_ns: when the rank recorded its end, on its clock; 0: it did not.
        stop: the signal that asked its launcher to end the job; ``None``: none that is known.
    """
    found = _ending(source, closed_ns)
    return found if stop is None else found.stopped(stop.number, int(stop.at * 1e9))


def _ending(source: Source, closed_ns: int) -> Ending:
    totals = source.totals
    raised_ns = max((record.end_ns for record in totals.failures if record.flags & ev.FAILED), default=None)
    if closed_ns:
        at_ns = closed_ns + totals.offset_ns
        return Ending(
            at_ns,
            at_ns,
            True,
            totals.raised,
            _is_shortly(raised_ns, closed_ns),
            totals.raised_at,
            says=totals.raised_says,
            status=source.status,
        )
    # An agent that started later has only the last heartbeat, which comes once a second; before the first operation, the begin of the ring.
    late = source.alive_ns is None or totals.gone_ns is None
    heartbeat_ns = totals.heartbeat_ns or int(totals.identity["started_ns"])
    until_ns = source.died_ns or (heartbeat_ns + _SIGN_NS if late else totals.gone_ns or 0)
    since_ns = min(until_ns, max(heartbeat_ns, source.alive_ns or 0))
    return Ending(
        since_ns + totals.offset_ns,
        until_ns + totals.offset_ns,
        clean=False,
        in_operation=_is_shortly(raised_ns, until_ns),
        is_reported=source.died_ns is not None,
        status=source.status,
    )


def _is_shortly(raised_ns: int | None, ended_ns: int) -> bool:
    """Return whether an operation raised shortly before the end of its rank."""
    return raised_ns is not None and ended_ns - raised_ns < _SHORTLY_NS
