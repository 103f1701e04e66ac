"""How long a rank usually is at each place of its work: counted by the place, not only by the operation, within bounds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from commwatch.wire import events as ev
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.ingest.tables.rhythm import MOST, MOST_LONG, Rhythm
from commwatch_agent.model.shares import Room
from commwatch_agent.model.views import Usual
from tests.helpers import MS, Trainer, Watch, group_entry, identity, mark, operation

S = 1_000_000_000
REDUCE, CAST, BARRIER = (ev.OP_CODE[name] for name in ("all_reduce", "broadcast", "barrier"))
#: Each step: three all_reduces, and a mark.
STEP = [(REDUCE, 0.01, 0.02)] * 3 + [(ev.STEP_MARK, 0.0, 0.0)]


class Played:
    """The records of a rank, given as (operation, seconds before it, seconds inside it)."""

    def __init__(self) -> None:
        self.totals = RankTotals(identity(), {}, account=Room(1 << 20).account())
        self.now_ns, self.seq = 1_000 * S, 0

    def add(self, *operations: tuple[int, float, float], size: int = 4096) -> Played:
        """Add operations, in one batch."""
        self.totals_take(b"".join(self._records(operations, size)))
        return self

    def totals_take(self, records: bytes) -> None:
        ingest_records(self.totals, records)

    def _records(self, operations: tuple[tuple[int, float, float], ...], size: int) -> Iterator[bytes]:
        for op, before_s, inside_s in operations:
            launch_ns = self.now_ns + round(before_s * S)
            self.now_ns, self.seq = launch_ns + round(inside_s * S), self.seq + 1
            fields = (op, 0, 1, -1, 0, size, launch_ns, self.seq, 0, launch_ns, self.now_ns, 0, ev.BY_CALL, 0)
            yield ev.RECORD.pack(self.seq, *fields, self.seq)

    @property
    def rhythm(self) -> Rhythm:
        """What is known of its places."""
        assert self.totals.rhythm is not None
        return self.totals.rhythm

    def inside(self, op: int, size: int = 4096) -> Usual:
        """What is known of an operation that begins now."""
        return self.rhythm.inside(1, op, size, self.now_ns)


def test_place_of_a_step() -> None:
    """An operation that has been quick in each step is known as that, at its place after the mark and after the one before."""
    played = Played().add(*STEP * 30)
    assert played.inside(REDUCE) == Usual(28, None)  # the context is two steps
    played.add(STEP[0])
    usual = played.inside(REDUCE)
    assert usual.times >= 28
    assert usual.longest_s is None


def test_new_place() -> None:
    """An operation is new where it has not been, also if it is usual elsewhere."""
    played = Played().add(*[*STEP, (BARRIER, 0.0, 0.01)] * 30)
    played.add(*STEP[:2])
    assert played.inside(BARRIER) == Usual(0, None)
    assert played.inside(REDUCE, size=1 << 20).times == 0


def test_long_waits_of_a_place() -> None:
    """The longest wait that ended well is that of the place: phases of a job do not mix."""
    played = Played()
    for wait_s in (20.0, 16.0):
        played.add(*STEP * 30, (CAST, 0.0, wait_s))
    played.add(*STEP * 30)
    assert played.inside(CAST) == Usual(2, 20.0)
    assert played.inside(REDUCE).longest_s is None


def test_long_waits_are_remembered() -> None:
    """A long wait is known for longer than the places between two of them are kept."""
    played = Played().add((CAST, 0.0, 20.0)).add(*STEP * MOST)
    played.add((CAST, 0.0, 16.0)).add(*STEP * MOST)
    assert played.inside(CAST).longest_s == pytest.approx(16.0)


def test_absences() -> None:
    """Times between operations are known by what came before them."""
    played = Played()
    for pause_s in (8.0, 24.0, 9.0, 10.0):
        played.add((REDUCE, pause_s, 0.1), (ev.STEP_MARK, 0.0, 0.0))
    assert played.rhythm.absent() == Usual(3, 24.0)
    played.add((REDUCE, 8.0, 0.1))
    assert played.rhythm.absent().longest_s is None


def test_operations_side_by_side() -> None:
    """An operation beside others that end meanwhile keeps its place: what had ended at its launch."""
    played = Played().add(*STEP * 30)
    began_ns = played.now_ns
    played.add(*[(CAST, 0.0, 0.01)] * 5)
    assert played.rhythm.inside(1, REDUCE, 4096, began_ns).times == 28


def test_bounds() -> None:
    """What is kept does not grow with the job, and is little without room."""
    played = Played()
    for _ in range(MOST_LONG):
        played.add(*[(REDUCE, 2.0, 2.0)] * 40)
    rhythm = played.rhythm
    assert len(rhythm._places) == len(rhythm._ends) == MOST
    assert len(rhythm._waits) == len(rhythm._absences) == MOST_LONG
    poor = Played()
    poor.totals = RankTotals(identity(), {}, account=Room(0).account())
    poor.add(*STEP * 200)
    assert len(poor.rhythm._places) < MOST // 4
    assert poor.inside(REDUCE).times >= 20


def test_waits_for_messages() -> None:
    """Of a message, the time in which a thread waited for it counts, not since it was posted."""
    played = Played()
    launch_ns = played.now_ns
    fields = (
        ev.OP_CODE["recv"],
        0,
        1,
        2,
        0,
        64,
        launch_ns,
        1,
        3_000_000,
        launch_ns,
        launch_ns + 60 * S,
        0,
        ev.BY_WAIT,
        0,
    )
    for stamp in range(1, 5):
        ingest_records(played.totals, ev.RECORD.pack(stamp, *fields, stamp))
    assert played.rhythm.inside(1, ev.OP_CODE["recv"], 64, launch_ns + 60 * S).longest_s == pytest.approx(3.0)


def test_restart_of_the_agent(tmp_path: Path) -> None:
    """An agent that starts anew knows the places of the latest records, from the history."""
    watch = Watch(tmp_path)
    with Trainer(tmp_path / "rings" / "job.r0.0.ring", identity(), 4096) as trainer:
        trainer.call("name", [(group_entry(),)])
        for n in range(60):
            begin = n * 500 * MS
            trainer.write([operation(start_ns=begin, end_ns=begin + 10 * MS, seq=n), mark(n, begin + 50 * MS)])
            watch.tick(begin + 60 * MS)
        known = _usual(watch)
        assert known.times >= 50
        again = Watch(tmp_path)
        again.tick(30_100 * MS)
        assert _usual(again) == known


def _usual(watch: Watch) -> Usual:
    """What is known of the operation that the rank would begin now."""
    (totals,) = watch.aggregate.jobs["job"].rank_totals.values()
    assert totals.rhythm is not None
    record = ev.Record._make(ev.RECORD.unpack(totals.tail[: ev.RECORD_SIZE])) if totals.tail else None
    group, size = (0, 4096) if record is None else (record.group, record.size_bytes)
    return totals.rhythm.inside(group, REDUCE, size, 1 << 62)
