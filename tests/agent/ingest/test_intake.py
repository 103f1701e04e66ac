"""From ring files to history and summaries: nothing lost uncounted, nothing twice, whenever the agent dies."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch.wire import ring
from commwatch.wire.ring import RingWriter
from commwatch.wire.splits import Splits
from commwatch_agent.ingest.steps import EXPLICIT
from commwatch_agent.model.cells import SLOT_NS
from commwatch_agent.report.report import build
from tests.helpers import (
    EPOCH_NS,
    MS,
    HereTrainer,
    Trainer,
    Watch,
    examples,
    group_entry,
    identity,
    mark,
    operation,
    rewind_ring,
    write_ring,
)

ALWAYS = (0, 1 << 62)


def trainer(directory: Path, rank: int = 0, slots: int = 1024) -> Trainer:
    made = Trainer(directory / "rings" / f"job.r0.{rank}.ring", identity(rank=rank), slots)
    made.call("name", [(group_entry(),)])
    return made


def reduces(first: int, until: int) -> list[tuple[int, ...]]:
    return [operation(start_ns=0, end_ns=1000, seq=n) for n in range(first, until)]


# -- reading --------------------------------------------------------------------------------------


def test_no_directory(tmp_path: Path) -> None:
    """Before the first trainer the directory does not exist: there is nothing to do, and no error."""
    assert Watch(tmp_path).tick() == 0


@pytest.mark.parametrize("bursts", [[1000], [256, 256], [10, 900, 10], [250] * 5, [1, 3000, 1, 1, 200]])
def test_lost_records_are_counted(tmp_path: Path, bursts: list[int]) -> None:
    """Records that a ring of 256 overwrites before the agent reads it are lost and counted: read + lost = written."""
    watch = Watch(tmp_path)
    with trainer(tmp_path, slots=256) as rank:
        for burst in bursts:
            rank.write(reduces(rank.written, rank.written + burst))
            watch.tick()
        watch.tick()
        assert watch.intake.read + watch.intake.lost == rank.written
        assert watch.intake.lost >= sum(max(0, burst - 256) for burst in bursts)
        assert watch.count() == watch.stored() == watch.intake.read
        (job,) = watch.agent.jobs()
        (view,) = watch.agent.ranks(None)
        assert (job.lost, view.lost, view.records) == (watch.intake.lost, watch.intake.lost, watch.intake.read)
        assert next(watch.aggregate.rank_totals()).lost == watch.intake.lost


@pytest.mark.parametrize("alive", [True, False])
def test_no_look_without_end(tmp_path: Path, alive: bool) -> None:
    """One pass reads at most one lap of a ring and stores it: records that arrive faster than they are read collect in the ring, not in memory.

    Those of a trainer that has gone are taken by the looks that follow, and only then its ring is removed.
    """
    watch, lap = Watch(tmp_path), 16_384
    with trainer(tmp_path, slots=2 * lap) as rank:
        rank.write(reduces(0, lap + 1000))
        if not alive:
            rank.kill()
        assert (watch.tick(), watch.stored(), rank.path.exists()) == (lap, lap, True)
        assert (watch.tick(), watch.stored(), rank.path.exists()) == (1000, lap + 1000, alive)
        assert (watch.count(), watch.intake.lost) == (lap + 1000, 0)


@pytest.mark.parametrize("looks", [1, 2])
def test_agent_that_starts_late(tmp_path: Path, looks: int) -> None:
    """Records that were there before the agent count in the time when they were made, not in that of its first looks."""
    watch = Watch(tmp_path, looks=looks)
    with Trainer(watch.rings / "job.r0.0.ring") as trainer:
        trainer.call("name", [(group_entry(),)])
        trainer.write([operation(start_ns=n * MS, end_ns=n * MS + 5, seq=n) for n in range(20)])
        for second in (600, 601, 612):
            watch.tick(second * 1000 * MS)
        (since, _), (row,) = watch.agent.summary(0, 1 << 62, ["rank"], {"job_id": "job"})
        assert (since, row.count) == (EPOCH_NS / 1e9, 20)


@pytest.mark.parametrize("looks", [1, 2])
def test_agent_that_was_stopped(tmp_path: Path, looks: int) -> None:
    """Operations that ended while the agent did not run count in the slots in which they ended, not in that of its next read."""
    watch = Watch(tmp_path, looks=looks)
    with Trainer(watch.rings / "job.r0.0.ring") as trainer:
        trainer.call("name", [(group_entry(),)])
        trainer.write([operation(start_ns=0, end_ns=5, seq=0)])
        watch.tick(MS)
        watch.tick(2 * MS)
        ends = [9_000 * MS, 9_999 * MS, 10_001 * MS, 19_000 * MS, 21_000 * MS]
        trainer.write([operation(start_ns=end - MS, end_ns=end, seq=1 + n) for n, end in enumerate(ends)])
        for milliseconds in (22_000, 22_100, 35_000):
            watch.tick(milliseconds * MS)
        slots = [
            watch.agent.summary(since, since + SLOT_NS, ["rank"], {})[1]
            for since in range(EPOCH_NS, EPOCH_NS + 3 * SLOT_NS, SLOT_NS)
        ]
        assert [[row.count for row in rows] for rows in slots] == [[3], [2], [1]]


def test_looks_between(tmp_path: Path) -> None:
    """Between two reads of the records the state of the trainers is seen; a full ring, and that of an ended trainer, is read at once."""
    watch = Watch(tmp_path, looks=2)
    with trainer(tmp_path, 0, slots=1024) as first, trainer(tmp_path, 1, slots=1024) as second:
        assert [watch.tick(), watch.tick()] == [0, 0]  # the rings are not new to the agent any more
        first.write(reduces(0, 100))
        first.call("begin", [operation(start_ns=0, end_ns=0, launch_ns=5)])
        assert watch.tick() == 0
        assert [flight.op for flight in watch.agent.ranks(None)[0].in_flight] == ["all_reduce"]
        assert watch.tick() == 100
        first.write(reduces(100, 300))
        second.write(reduces(0, 10))
        assert watch.tick() == 200
        assert watch.tick() == 10
        second.write(reduces(10, 30))
        second.call("close", [(9,)])
        assert watch.tick() == 20
        first.write(reduces(300, 310))
        assert watch.tick() == 10
        first.write(reduces(310, 315))
        first.kill()
        assert watch.tick() == 5


def test_alive_and_gone(tmp_path: Path) -> None:
    """A rank is running while its process lives, gone if the process vanished, and ended if it closed its ring."""
    watch = Watch(tmp_path)
    with trainer(tmp_path, 0) as first, trainer(tmp_path, 1) as second:
        first.call("begin", [operation(start_ns=0, end_ns=0, launch_ns=5)])
        watch.tick()
        assert [view.state for view in watch.agent.ranks(None)] == ["running", "running"]
        assert [flight.op for flight in watch.agent.ranks(None)[0].in_flight] == ["all_reduce"]
        second.call("close", [(9,)])
        first.kill()
        second.kill()
        watch.tick()
        assert [view.state for view in watch.agent.ranks(None)] == ["gone", "ended"]
        assert [view.in_flight for view in watch.agent.ranks(None)] == [[], []]


def test_split_sizes_of_a_killed_rank(tmp_path: Path) -> None:
    """The split sizes of the all_to_all in which a rank dies are known afterwards."""
    watch = Watch(tmp_path)
    with trainer(tmp_path) as rank:
        rank.call("note_splits", [(0, 7, Splits((8, 9), (10, 11)))])
        rank.call("begin", [operation("all_to_all", start_ns=0, end_ns=0, seq=7)])
        watch.tick()
        rank.kill()
    watch.tick(SLOT_NS)
    (view,) = watch.agent.ranks(None)
    assert [(each.seq, each.sends, each.expects) for each in view.failed] == [(7, [8, 9], [10, 11])]


def test_ring_of_an_earlier_boot(tmp_path: Path) -> None:
    """A ring from before a reboot belongs to the past, whichever process may hold a lock on it now."""
    with Trainer(tmp_path / "rings" / "a.ring", identity(boot_id="another")) as old:
        old.call("name", [(group_entry(),)])
        old.write(reduces(0, 5))
        watch = Watch(tmp_path)
        watch.tick()
        assert watch.count() == 5
        assert [view.state for view in watch.agent.ranks(None)] == ["gone"]


@pytest.mark.parametrize("late", [False, True])
def test_backlog_keeps_its_waits(tmp_path: Path, late: bool) -> None:
    """An agent that starts late, or was delayed, computes who waited for whom from all records, not only from the last ones."""
    watch, number = Watch(tmp_path), 5000
    with trainer(tmp_path, 0, slots=8192) as first, trainer(tmp_path, 1, slots=8192) as second:
        if not late:
            watch.tick()
        first.write(operation(start_ns=n * MS, end_ns=n * MS + 900, seq=n) for n in range(number))
        second.write(operation(start_ns=n * MS + 600, end_ns=n * MS + 900, seq=n) for n in range(number))
        watch.tick()
        waits = {key: row.wait_s for key, row in watch.rows("rank").items()}
        assert waits == {(0,): pytest.approx(number * 600e-9), (1,): pytest.approx(0)}


# -- the agent dies and comes back ----------------------------------------------------------------

#: What happens: a rank writes so many records, time passes and the agent looks, or it dies and starts anew.
lives = st.lists(
    st.tuples(st.just("write"), st.integers(0, 1), st.integers(1, 40))
    | st.tuples(st.just("tick"), st.integers(0, 12), st.just(0))
    | st.tuples(st.just("die"), st.just(0), st.just(0)),
    max_size=14,
)


@examples(25)
@given(lives)
def test_restarts(life: list[tuple[str, int, int]]) -> None:
    """However often the agent dies, summaries hold every record once: counts, bytes and seconds, by rank and op."""
    with TemporaryDirectory() as name, HereTrainer(Path(name), 0) as first, HereTrainer(Path(name), 1) as second:
        watch, clock, expected = Watch(Path(name)), 1, dict[tuple[str | int | None, ...], tuple[int, int, int]]()
        for action, a, b in [*life, ("tick", 0, 0), ("die", 0, 0), ("tick", 0, 0)]:
            if action == "tick":
                clock += a * 1000 * MS
                watch.tick(clock)
            elif action == "die":
                watch = Watch(Path(name))
            else:
                rank = (first, second)[a]
                ops = [("all_reduce", "broadcast", "send")[n % 3] for n in range(rank.written, rank.written + b)]
                # Collectives of both ranks overlap, so they are joined; sends follow one another.
                starts = [clock + n if op == "send" else 0 for n, op in enumerate(ops)]
                ends = [clock + n + 1 for n in range(b)]
                rank.write(
                    operation(op, start_ns=start, end_ns=end, seq=rank.written + n, size=100 + n, peer=1 - a)
                    for n, (op, start, end) in enumerate(zip(ops, starts, ends, strict=True))
                )
                for n, (op, start, end) in enumerate(zip(ops, starts, ends, strict=True)):
                    count, size, busy = expected.get((a, op), (0, 0, 0))
                    expected[a, op] = count + 1, size + 100 + n, busy + end - start
                clock += b
        found = {key: (row.count, row.bytes, round(row.seconds * 1e9)) for key, row in watch.rows("rank", "op").items()}
        assert found == expected
        assert watch.stored() == first.written + second.written


@pytest.mark.parametrize(("optimizer", "first"), [(EXPLICIT, 1), (0, 4)], ids=["explicit", "optimizer"])
def test_restart_within_a_step(tmp_path: Path, optimizer: int, first: int) -> None:
    """Wherever in its steps the agent dies, the history has all of them, with their communication, also those that cross the end of ten seconds."""
    second, steps = 1000 * MS, 20
    records, moments = [mark(0, 0, optimizer=optimizer)], [0]
    for n in range(steps):  # 1.5 s, of which 0.6 s are communication, some of it in flight at the mark before
        begin = n * 1500 * MS
        for seq, (since, until) in enumerate(((-100, 200), (500, 900)), 2 * n):
            ends = begin + until * MS
            records.append(operation(start_ns=max(0, begin + since * MS), end_ns=ends, seq=seq))
            moments.append(ends)
        records.append(mark(n + 1, begin + 1500 * MS, optimizer=optimizer, in_flight=1))
        moments.append(begin + 1500 * MS)
    expected = [(n + 1, 1.5, 0.6 if n == steps - 1 else 0.7) for n in range(steps)]
    for death in range(first, len(records), 6):
        directory = tmp_path / str(death)
        with HereTrainer(directory) as rank:
            watch = Watch(directory)
            for at, (record, now_ns) in enumerate(zip(records, moments, strict=True)):
                rank.write([record])
                watch.tick(now_ns + second)
                if at == death:
                    watch = Watch(directory)
        watch.tick(moments[-1] + second)
        found = watch.agent.steps(*ALWAYS, "job", 0, 100)
        assert [(one.seq, one.duration_s, one.comm_s) for one in reversed(found)] == expected, death


def test_restart_before_anything_was_written(tmp_path: Path) -> None:
    """What an agent had read and not committed when it died is read again by the next one."""
    with trainer(tmp_path) as rank:
        watch = Watch(tmp_path)
        watch.tick()
        watch.fill_disk()
        rank.write(reduces(0, 800))
        watch.tick()
        assert watch.intake.read == 800
        again = Watch(tmp_path)
        again.tick()
        assert again.count() == again.stored() == 800


def test_restart_beyond_32_bits(tmp_path: Path) -> None:
    """The same for a ring that has seen more than 2**32 records (a month at full speed): stamps have 32 bits only."""
    start, slots = (1 << 32) - 40, 256
    with trainer(tmp_path, slots=slots) as rank:
        watch = Watch(tmp_path)
        watch.tick()
        (row,) = watch.ring_rows()
        for until, at_ns in ((start + 20, 1), (start + 60, SLOT_NS), (start + 90, 2 * SLOT_NS)):
            rewind_ring(rank.path, row.next_n or start, until, slots, end_ns=at_ns)
            if not row.next_n:
                watch.store.progress(row.id, start, 0, 0, 0)
                watch.store.commit()
                watch = Watch(tmp_path)
            watch.tick(at_ns)
            (row,) = watch.ring_rows()
        assert watch.count() == 90
        for _ in range(2):
            watch = Watch(tmp_path)
            watch.tick(2 * SLOT_NS)
            assert watch.count() == 90
        assert watch.intake.lost == 0


# -- the trainer dies -----------------------------------------------------------------------------


def test_finished_ring_is_removed(tmp_path: Path) -> None:
    """The files of a trainer that is gone go once its records are in the history, and not before."""
    rings = tmp_path / "rings"
    write_ring(rings, reduces(0, 500))
    watch = Watch(tmp_path)
    watch.tick()
    assert list(rings.iterdir()) == []
    assert watch.count() == watch.stored() == 500
    assert Watch(tmp_path).count() == 500


def test_finished_ring_stays_while_the_disk_is_full(tmp_path: Path) -> None:
    """As long as the history cannot be written, a dead trainer's ring stays, and it is stored when there is room."""
    watch, rings = Watch(tmp_path), tmp_path / "rings"
    with trainer(tmp_path) as rank:
        watch.tick()
        watch.fill_disk()
        chance = random.Random(1)
        rank.write([operation(start_ns=0, end_ns=9, seq=n, tag=chance.getrandbits(31)) for n in range(900)])
    for _ in range(3):
        watch.tick()
        assert {path.suffix for path in rings.iterdir()} == {".ring", ".names"}
    watch.free_disk()
    watch.tick()
    assert list(rings.iterdir()) == []
    assert watch.count() == watch.stored() == 900


def test_waits_of_the_last_moments(tmp_path: Path) -> None:
    """Of a job that ended before the agent looked, every rank's waits are kept, not only the last one's to be read."""
    for rank, start in ((0, 0), (1, 40 * MS)):
        write_ring(tmp_path / "rings", [operation(start_ns=start, end_ns=50 * MS)], rank=rank)
    Watch(tmp_path).tick()
    waits = {key: row.wait_s for key, row in Watch(tmp_path).rows("rank").items()}
    assert waits == {(0,): pytest.approx(0.04), (1,): pytest.approx(0.0)}


def test_last_record_behind_the_cursor(tmp_path: Path) -> None:
    """A trainer killed between a record and its cursor has written that record: it is read, also from a full ring."""
    for written in (100, 256, 700):
        directory = tmp_path / str(written)
        writer = write_ring(directory / "rings", reduces(0, written), slots=256)
        writer.counters[ring.CURSOR] = written - 1
        watch = Watch(directory)
        watch.tick()
        assert watch.intake.read + watch.intake.lost == written
        assert next(watch.aggregate.rank_totals()).last_seq == {0: written - 1}


def test_a_reason_for_no_steps_passes(tmp_path: Path) -> None:
    """Once the user marks steps, the reason for having had none is taken back."""
    watch = Watch(tmp_path)
    with trainer(tmp_path) as rank:
        draw = random.Random(1)
        rank.write(mark(n, 100 + 50 * n, optimizer=draw.randrange(3)) for n in range(100))
        watch.tick()
        assert watch.agent.jobs()[0].steps_unavailable
        rank.write(mark(100 + n, 6000 + 50 * n, optimizer=-1) for n in range(3))
        watch.tick()
        assert len(watch.agent.steps(*ALWAYS, None, None, 100)) == 2
        assert watch.agent.jobs()[0].steps_unavailable is None


# -- several rings of one rank --------------------------------------------------------------------


def test_probe_goes_out_and_in_again(tmp_path: Path) -> None:
    """Each time the probe is put in it makes a ring: the rank's records, losses, steps and time in the report are those of all of them."""
    watch, seconds = Watch(tmp_path), 1000 * MS
    for life, began in enumerate((10, 50)):
        for rank in (0, 1):
            marks = [mark(n, (began + n) * seconds, optimizer=-1) for n in range(6)]
            ops = [
                operation(start_ns=(began + n) * seconds + MS, end_ns=(began + n) * seconds + 3 * MS) for n in range(5)
            ]
            records = [record for pair in zip(marks, ops, strict=False) for record in pair] + marks[-1:]
            about = identity(rank=rank, started_ns=began * seconds)
            path = tmp_path / "rings" / f"job.r0.{rank}.{life}.ring"
            path.parent.mkdir(exist_ok=True)
            writer = RingWriter(path, about, 1024)
            writer.name(group_entry())
            for fields in records:
                writer.write(*fields)
            writer.close((began + 6) * seconds)
            writer.release()
        watch.tick((began + 7) * seconds)
        watch.tick((began + 8) * seconds)
    for _ in range(2):
        assert [view.records for view in watch.agent.ranks(None)] == [22, 22]
        report = build(watch.agent, "job", watch.agent.path, "again")
        assert report is not None
        assert [row.count for row in report.operations] == [20]
        assert (report.records, report.steps, report.lost) == (44, 10, 0)
        assert [line.steps for line in report.ranks] == [10, 10]
        watch.agent = Watch(tmp_path).agent  # what is left is the history's
