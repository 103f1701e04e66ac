"""One user's rings, names and pending collectives beside those of others: each gets its share, and no tick works without end."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from commwatch.wire import ring_reader
from commwatch_agent.ingest import intake as intake_module
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.collective_join import MOST_PENDING
from commwatch_agent.ingest.intake import Intake
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.ingest.rings import finding
from commwatch_agent.ingest.tables import weights
from commwatch_agent.model.cells import GroupInfo
from commwatch_agent.model.names_file import Names
from tests.helpers import MS, Trainer, Watch, group_entry, identity, operation, packed, write_ring

FINE = operation(start_ns=0, end_ns=9)
OTHER_UID = 4242


def add_names(ring: Path, lines: Iterator[dict[str, Any]]) -> None:
    with open(ring.with_suffix(".names"), "r+b") as file:
        written = file.read().partition(b"\0")[0]
        file.seek(len(written))
        file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))


# -- names ----------------------------------------------------------------------------------------


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of values in each text of a trainer that is parsed."""
    counted: list[int] = []
    parse = ring_reader._parse_json

    def counting(text: bytes, most_values: int) -> Any:
        counted.append(len(text))
        return parse(text, most_values)

    monkeypatch.setattr(ring_reader, "_parse_json", counting)
    return counted


def test_names_of_one_ring_in_many_ticks(tmp_path: Path, parsed: list[int]) -> None:
    """Of a names file with 45,000 lines a tick reads a bounded part, calls ``alive`` often meanwhile, and comes to its end in the end."""
    watch = Watch(tmp_path)
    between: list[int] = []
    watch.intake = Intake(
        watch.rings,
        watch.aggregate,
        watch.store,
        threading.RLock(),
        alive=lambda: between.append(len(parsed)),
    )
    long = write_ring(watch.rings, [FINE] * 3, job="long")
    with Trainer(watch.rings / "good.ring", identity("good")) as good:
        good.call("name", [(group_entry(),)])
        good.write([FINE] * 5)
        watch.tick()
        add_names(long.path, ({"op": n, "name": f"op {n}"} for n in range(45_000)))
        most, before = 0, -1
        while len(parsed) > before:
            before = len(parsed)
            good.write([FINE] * 5)
            watch.tick()
            most = max(most, len(parsed) - before)
            assert watch.rows("job_id")["good",].count == good.written
        assert most <= 20_000
        assert len(parsed) > 45_000
        assert max(later - now for now, later in pairwise(between)) <= 2_100


def test_records_wait_for_their_names(tmp_path: Path) -> None:
    """Records are not counted before the names that were written before them, however many these are."""
    watch = Watch(tmp_path)
    ring = write_ring(watch.rings, [], [], job="many")
    add_names(ring.path, (group_entry(n, label="padding") for n in range(25_000)))
    add_names(ring.path, iter([group_entry(7, label="mine")]))
    for _ in range(5):
        ring.write(*operation(start_ns=0, end_ns=9, group=7))
    for n in range(1, 30):
        watch.tick(n * MS)
    assert {group: row.count for (_, group), row in watch.rows("job_id", "group").items()} == {"mine": 5}
    assert watch.intake.lost == 0


def test_codes_that_no_record_has() -> None:
    """Names of codes that do not fit a record are not kept, and what is learned again costs nothing."""
    names = Names()
    entries = [{kind: n, "name": f"n{n}"} for kind in ("op", "dtype") for n in range(100_000)]
    entries += [group_entry(n) for n in (0xFFFE, 0xFFFF, 1 << 20)]
    learned = names.learn(entries)
    assert len(names.ops) <= 256
    assert len(names.dtypes) == 256
    assert not names.groups
    assert {kind for kind, *_ in learned.codes} == {"op", "dtype"}
    assert names.learn(entries) == ([], [])
    assert names.learn([{"op": 40, "name": "another"}]).codes == [("op", 40, "another")]


def test_names_of_a_first_operation(tmp_path: Path) -> None:
    """The names of what is in flight are read, also if the agent saw the ring before they were written, and no operation has ended."""
    watch = Watch(tmp_path)
    trainer = write_ring(watch.rings, [])
    watch.tick()
    trainer.name({"dtype": 1, "name": "bfloat16"})
    trainer.name(group_entry(3, label="late"))
    trainer.begin(*operation(start_ns=0, end_ns=0, dtype=1, group=3))
    watch.tick(MS)
    (view,) = watch.agent.ranks("job")
    assert [(each.dtype, each.group) for each in view.in_flight] == [("bfloat16", "late")]
    trainer.release()


def test_long_line_of_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is too long is skipped, also if its end comes later; the lines after it count."""
    monkeypatch.setattr(ring_reader, "_NAMES_AT_ONCE", 100)
    monkeypatch.setattr(ring_reader, "_MOST_LINE", 1000)
    ring = write_ring(tmp_path, [], [])
    names = ring.path.with_suffix(".names")
    reader = ring_reader.RingReader(ring.path)
    names.write_text('{"op": 1}\n{"op": "' + "x" * 5000)
    assert reader.names() == [{"op": 1}]
    with names.open("a") as file:
        file.write("x" * 5000)
    assert reader.names() == []
    with names.open("a") as file:
        file.write('"}\n{"op": 2}\n{"op": "' + "y" * 900 + '"}\n{"op": 3}\n')
    assert [str(entry["op"])[:2] for entry in reader.names()] == ["2", "yy", "3"]
    reader.close()


def test_members_of_groups_share_room() -> None:
    """Groups with ever more members, texts and parameters take no more memory than there is for all names."""
    aggregate = JobTable()
    rings = [aggregate.open(f"r{n}", identity("bad", n), "bad") for n in range(20)]
    for book in rings:
        for n in range(100):
            book.learn([group_entry(n, tuple(range(n, 2000 + n)))])
            book.learn([{"replicas": n, "in": 0, "key": "k", "tensors": [f"parameter {n}.{k}" for k in range(1000)]}])
    good = aggregate.open("good", identity("good"), "good")
    good.learn([group_entry(n, tuple(range(8)), label=f"group {n}") for n in range(64)])
    assert len(good.groups) == 64

    def members(info: GroupInfo) -> int:
        return len(info.ranks or ())

    kept = sum(members(info) for book in rings for info in book.groups.values())
    parameters = sum(len(each.names) for book in rings for each in book.replicas.values())
    assert 0 < 64 * (kept + parameters) <= weights.ALL_BYTES


# -- collectives that wait for a rank ---------------------------------------------------------------


def collectives(groups: int) -> list[bytes]:
    """Records of as many collectives of each group as may wait, in several reads."""
    return [
        packed(
            *(
                operation(start_ns=at, end_ns=at + MS, seq=at, group=group)
                for group in range(groups)
                for at in range(seq, seq + 64)
            )
        )
        for seq in range(0, MOST_PENDING, 64)
    ]


def missing(job: str, owner: str, aggregate: JobTable, groups: int, records: list[bytes]) -> None:
    """Two ranks of a job that take part in all collectives of their groups of three, in which the third one never does."""
    for rank in range(2):
        book = aggregate.open(f"{job}.{rank}", identity(job, rank, 3), owner)
        book.learn([group_entry(n, (0, 1, 2)) for n in range(groups)])
        for each in records:
            ingest_records(book, each)


def parts_of(aggregate: JobTable) -> dict[str, int]:
    return {
        job.id: sum(len(parts) for join in job.joins.values() for _, parts in join.waiting())
        for job in aggregate.jobs.values()
    }


def test_rank_that_never_joins() -> None:
    """Collectives that wait for a rank have one bound for a job, however many groups it has; the oldest are dropped and counted."""
    aggregate = JobTable()
    missing("bad", "bad", aggregate, 256, collectives(256))
    job = aggregate.jobs["bad"]
    kept = parts_of(aggregate)["bad"]
    assert 0 < weights.PART * kept <= weights.OF_JOB_BYTES
    assert job.dropped > 0
    assert sum(join.unjoined for join in job.joins.values()) > 200 * MOST_PENDING
    newest = max(seq for join in job.joins.values() for seq in join.numbers())
    assert newest == MOST_PENDING - 1


def test_jobs_whose_ranks_never_join() -> None:
    """Many such jobs of one user have one bound together, and the collectives of another user's job still wait for their rank."""
    aggregate, records = JobTable(), collectives(64)
    for n in range(6):
        missing(f"bad{n}", "bad", aggregate, 64, records)
    missing("good", "good", aggregate, 4, collectives(4))
    kept = parts_of(aggregate)
    assert kept["good"] == 2 * 4 * MOST_PENDING
    assert weights.PART * sum(kept.values()) <= weights.ALL_BYTES
    aggregate.retire(0)
    for job in aggregate.jobs.values():
        for totals in job.rank_totals.values():
            totals.alive = False
    aggregate.retire(0)
    aggregate.retire(1 << 60)
    assert aggregate.memory.free == aggregate.memory.size


# -- owners ---------------------------------------------------------------------------------------


class Clock:
    """A clock on which each ring that is looked at takes 10 ms."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def look(self) -> None:
        self.now_s += 0.01

    def __call__(self) -> float:
        return self.now_s


def watch_by(tmp_path: Path, clock: Clock, most_rings: int = 4096) -> Watch:
    watch = Watch(tmp_path)
    watch.intake = Intake(
        watch.rings,
        watch.aggregate,
        watch.store,
        threading.RLock(),
        most_rings=most_rings,
        alive=clock.look,
        now_s=clock,
    )
    return watch


def owned(path: Path, uid: int = OTHER_UID) -> None:
    """Give a ring and its names to another user."""
    for each in (path, path.with_suffix(".names")):
        os.chown(each, uid, -1)


def test_many_rings_of_one_user(tmp_path: Path) -> None:
    """A user's single ring is read in each tick, beside hundreds of another's for which the time of a tick is not enough."""
    clock = Clock()
    watch = watch_by(tmp_path, clock)
    crowd = [write_ring(watch.rings, [FINE] * 5, rank=rank, slots=256) for rank in range(250)]
    single = write_ring(watch.rings, [], job="single", slots=256)
    owned(single.path)
    while watch.intake._sources.keys() != {path.name for path in watch.rings.glob("*.ring")}:
        watch.tick()
    for tick in range(1, 6):
        for _ in range(7):
            single.write(*FINE)
        for writer in crowd:
            writer.write(*FINE)
        begin_s = clock.now_s
        watch.tick(tick)
        assert watch.rows("job_id")["single",].count == 7 * tick
        assert clock.now_s - begin_s < 2 * intake_module._READING_S
    turns = {source.turn for source in watch.intake._sources.values()}
    assert len(turns) > 1, "there was time for all"
    for tick in range(6, 30):
        watch.tick(tick)
    assert watch.rows("job_id")["job",].count == 250 * 10
    assert watch.intake.lost == 0


def test_new_rings_of_one_user(tmp_path: Path) -> None:
    """A new ring is opened at once, although another user has put hundreds of new ones beside it."""
    clock = Clock()
    watch = watch_by(tmp_path, clock)
    crowd = [write_ring(watch.rings, [FINE], rank=rank, slots=256) for rank in range(250)]
    single = write_ring(watch.rings, [FINE] * 3, job="zz", slots=256)
    owned(single.path)
    watch.tick()
    assert single.path.name in watch.intake._sources
    assert len(watch.intake._sources) < len(crowd)
    assert watch.rows("job_id")["zz",].count == 3


def test_room_for_rings_is_shared(tmp_path: Path) -> None:
    """Of the rings that can be open one user gets three quarters, so that another user's ring is read at once."""
    watch = watch_by(tmp_path, Clock(), most_rings=16)
    crowd = [write_ring(watch.rings, [FINE], rank=rank, slots=256) for rank in range(40)]
    for _ in range(4):
        watch.tick()
    assert (len(crowd), len(watch.intake._sources)) == (40, 12)
    assert watch.intake.waiting == "28 rings wait until others end: at most 16 are read at a time"
    single = write_ring(watch.rings, [FINE] * 3, job="zz", slots=256)
    owned(single.path)
    watch.tick()
    assert watch.rows("job_id")["zz",].count == 3


def test_directory_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at the run directory takes a bounded number of entries, and a user's files that are no rings are refused up to a number."""
    monkeypatch.setattr(finding, "_ENTRIES", 50)
    monkeypatch.setattr(finding, "MOST_REFUSED", 100)
    watch = watch_by(tmp_path, Clock())
    watch.rings.mkdir()
    for n in range(300):
        (watch.rings / f"bad{n}.ring").write_bytes(b"rubbish")
    good = write_ring(watch.rings, [FINE] * 3, job="good")
    owned(good.path)
    for _ in range(20):
        watch.tick()
    assert watch.rows("job_id")["good",].count == 3
    assert 100 <= watch.intake.bad_rings <= 150
    for n in range(300):
        (watch.rings / f"bad{n}.ring").unlink()
    again = write_ring(watch.rings, [FINE] * 4, job="again")
    for _ in range(20):
        watch.tick()
    assert watch.rows("job_id")["again",].count == 4
    assert again.path.name in watch.intake._sources


def test_ranks_that_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ranks that have ended a bounded number is kept while their job goes on; another user's remain."""
    monkeypatch.setattr("commwatch_agent.ingest.jobs.MOST_ENDED", 50)
    aggregate = JobTable()
    for owner, number in (("good", 5), ("bad", 400)):
        aggregate.open(f"{owner} lives", identity(owner), owner)
        for n in range(number):
            book = aggregate.open(f"{owner} {n}", identity(owner, n + 1), owner)
            ingest_records(book, packed(FINE))
            book.alive = False
            book.finish()
            aggregate.retire(0)
    assert len(aggregate.jobs["good"].rank_totals) == 6
    assert len(aggregate.jobs["bad"].rank_totals) == 46
    assert aggregate.forgotten == 355
    assert "bad 399" in aggregate.jobs["bad"].rank_totals


def test_addresses_of_other_agents() -> None:
    """The first addresses to ask include some of each user and of each of its jobs, whatever their number."""
    aggregate = JobTable()
    for n in range(30):
        peers = [f"http://bad{n}-{k}:1" for k in range(1000)]
        aggregate.open(f"bad {n}", identity("bad", n), "bad").learn([{"peers": peers}])
    for rank in range(4):  # all ranks of a job report the same
        good = aggregate.open(f"good {rank}", identity("good", rank), "good")
        good.learn([{"peers": [f"http://good{n}:1" for n in range(16)]}])
    other = aggregate.open("other", identity("other"), "bad")
    other.learn([{"peers": ["http://other:1"]}])
    first = aggregate.peers()[:256]
    assert {f"http://good{n}:1" for n in range(16)} <= set(first)
    assert "http://other:1" in first
    assert len(set(first)) == 256
