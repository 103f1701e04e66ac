"""What rings and disks can be wrong with, and that the agent goes on with the rest."""

from __future__ import annotations

import json
import logging
import os
import random
import sqlite3
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from commwatch.wire import events as ev
from commwatch.wire import ring
from commwatch_agent.history.chunks import CHUNK_RECORDS
from commwatch_agent.history.store import Writer
from commwatch_agent.model.cells import SLOT_NS
from tests.helpers import MS, Trainer, Watch, group_entry, identity, mark, needs, operation, small_tmpfs, write_ring

# -- files that are no rings ----------------------------------------------------------------------


def overwrite(path: Path, at: int, what: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(what)


def new_identity(path: Path, value: object) -> None:
    """Replace the identity by any JSON."""
    blob = json.dumps(value).encode()
    overwrite(path, ring.IDENTITY_AT, blob)
    overwrite(path, ring.HEADER.size - 4, struct.pack("<I", len(blob)))


def other_version(path: Path) -> None:
    overwrite(path, 8, struct.pack("<I", ring.VERSION + 1))


def garbage(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 1024)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut_in_the_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def cut_in_the_records(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: ring.RECORDS_AT + 100])


def no_slots(path: Path) -> None:
    overwrite(path, 20, struct.pack("<I", 0))


def other_record_size(path: Path) -> None:
    overwrite(path, 16, struct.pack("<I", 32))


def identity_is_no_json(path: Path) -> None:
    overwrite(path, ring.IDENTITY_AT, b"\xff{{")


def identity_is_a_list(path: Path) -> None:
    new_identity(path, [1, 2])


def identity_without_a_job(path: Path) -> None:
    new_identity(path, {"rank": 0})


def identity_with_a_bad_rank(path: Path) -> None:
    new_identity(path, {**identity(), "rank": "zero"})


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = [
    other_version, garbage, empty, cut_in_the_header, cut_in_the_records, no_slots, other_record_size, identity_is_no_json, identity_is_a_list,
    identity_without_a_job, identity_with_a_bad_rank, a_directory,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_refused_once(tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture) -> None:
    """A file that is no ring of ours is refused once, with one line that names it, and stays; the others are read."""
    bad = write_ring(tmp_path / "rings", [], job="bad").path
    damage(bad)
    watch = Watch(tmp_path)
    with Trainer(tmp_path / "rings" / "good.ring") as good, caplog.at_level(logging.WARNING, "commwatch"):
        good.write(operation(start_ns=0, end_ns=9, seq=n) for n in range(7))
        for _ in range(3):
            watch.tick()
        assert watch.count() == 7
    (line,) = [record.getMessage() for record in caplog.records]
    assert bad.name in line
    assert (watch.intake.bad_rings, bad.exists()) == (1, True)
    assert [job.job_id for job in watch.agent.jobs()] == list(watch.aggregate.jobs) == ["job"]


def test_version_says_the_remedy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A ring of another version says which one it has, which one is read, and what to do."""
    other_version(write_ring(tmp_path / "rings", []).path)
    with caplog.at_level(logging.WARNING, "commwatch"):
        Watch(tmp_path).tick()
    for part in (f"format {ring.VERSION + 1}", f"reads {ring.VERSION}", "use the same commwatch"):
        assert part in caplog.text


def test_names_that_are_no_text(tmp_path: Path) -> None:
    """A name with half a surrogate pair (bytes that are not UTF-8, in a variable or a description) is stored with a question mark for it."""
    watch = Watch(tmp_path)
    names = [group_entry(label="dp\ud800"), {"op": 32, "name": "c10d::\udcff"}]
    write_ring(watch.rings, [operation(start_ns=0, end_ns=MS)], names, host="node\udcff")
    assert watch.tick(MS) == 1
    assert [key[0] for key in watch.rows("group")] == ["dp?"]
    assert [row.identity["host"] for row in watch.ring_rows()] == ["node?"]


def test_a_good_ring_in_place_of_a_bad_one(tmp_path: Path) -> None:
    """A ring that takes the name of a refused file is read: the file was refused, not the name."""
    bad = write_ring(tmp_path / "rings", []).path
    garbage(bad)
    watch = Watch(tmp_path)
    watch.tick()
    bad.rename(tmp_path / "kept")  # so that the new file cannot get its inode
    write_ring(tmp_path / "rings", [operation(start_ns=0, end_ns=9)])
    watch.tick()
    assert (watch.intake.bad_rings, watch.count()) == (1, 1)


# -- a damaged history ----------------------------------------------------------------------------


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    return data[:100] + bytes([data[100] ^ 255]) + data[101:]


def no_whole_records(data: bytes) -> bytes:
    return data[:1] + zlib.compress(zlib.decompress(data[1:])[:-1])


def emptied(data: bytes) -> bytes:
    return b""


def ranks_of(watch: Watch, seq: int) -> list[int]:
    """The ranks whose part in a collective is known."""
    found = watch.agent.collective("default_pg-0", seq)
    return [operation.rank for operation in found[0]] if found else []


@pytest.mark.parametrize("damage", [cut, flipped, no_whole_records, emptied])
def test_damaged_chunk(tmp_path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture) -> None:
    """A damaged chunk of the history is skipped, counted, and logged once by name; an agent that starts on it reads all the rest and answers."""
    with (
        Trainer(tmp_path / "rings" / "a.ring", slots=2048) as one,
        Trainer(tmp_path / "rings" / "b.ring", identity(rank=1)) as other,
    ):
        before = Watch(tmp_path)
        for trainer in (one, other):
            trainer.call("name", [(group_entry(),)])
        one.write(operation(start_ns=n, end_ns=n + 9, seq=n) for n in range(CHUNK_RECORDS + 100))
        other.write(operation(start_ns=n, end_ns=n + 9, seq=n) for n in range(7))
        before.tick()
        before.store.close()  # and is gone, with none of it rolled up
        with closing(sqlite3.connect(tmp_path / "h.sqlite")) as db, db:
            ((chunk, data),) = db.execute("SELECT id, data FROM chunk WHERE until_n - first_n = ?", (CHUNK_RECORDS,))
            db.execute("UPDATE chunk SET data = ? WHERE id = ?", (damage(data), chunk))
        with caplog.at_level(logging.WARNING, "commwatch"):
            after = Watch(tmp_path)
            one.write([operation(start_ns=MS, end_ns=2 * MS, seq=9999)])
            for _ in range(2):
                after.tick()
            assert after.count() == 100 + 7 + 1
            assert len(after.agent.operations(0, 1 << 62, None, lambda operation: True, 5000)) == 100 + 7 + 1
            assert [ranks_of(after, seq) for seq in (5, 50, CHUNK_RECORDS + 50)] == [[1], [], [0]]
    assert len(after.damaged) == 1
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"{tmp_path / 'h.sqlite'}: chunk {chunk} " in line


BIG = (1 << 64) - 1


NONSENSE = {
    "ends in 500 years": operation(start_ns=0, end_ns=BIG),
    "send ends in 500 years": operation("send", start_ns=0, end_ns=BIG),
    "ends before it starts": operation(start_ns=BIG, end_ns=0),
    "launched in 500 years": operation(start_ns=0, end_ns=9, launch_ns=BIG),
    "exabytes": operation(start_ns=0, end_ns=9, size=BIG),
    "exabytes that SQLite could hold, once": operation(start_ns=0, end_ns=9, size=(1 << 62) - 1),
    "mark in 500 years": mark(0, BIG),
    "mark ends before it begins": mark(0, 5, began_ns=BIG),
    "odd numbers": operation(
        "recv", start_ns=0, end_ns=9, group=0xFFFF, peer=-9, tag=-1, seq=BIG >> 32, waited_us=BIG >> 32
    ),
    "odd codes": operation(start_ns=0, end_ns=9, timing=255, flags=0xF8 & ~ev.UNTIMED, dtype=255),
    "op 255": (255, *operation(start_ns=0, end_ns=9)[1:]),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_in_a_record(tmp_path: Path, what: str) -> None:
    """A record whole by its stamps but beyond all reason harms neither its neighbours nor other rings."""
    watch = Watch(tmp_path)
    with (
        Trainer(tmp_path / "rings" / "a.ring") as odd,
        Trainer(tmp_path / "rings" / "b.ring", identity(rank=1)) as good,
    ):
        for at in range(3):
            fine = [operation("broadcast", start_ns=at * SLOT_NS, end_ns=at * SLOT_NS + 9, size=64)]
            odd.write([*fine, NONSENSE[what], NONSENSE[what], *fine])
            good.write(fine * 5)
            watch.tick(at * SLOT_NS + 10)
            assert watch.store.trouble is None
        for agent in (watch, Watch(tmp_path)):  # as it goes on, and as the next one finds it
            agent.tick(3 * SLOT_NS)
            rows = agent.rows("rank", "op")
            assert (rows[0, "broadcast"].count, rows[1, "broadcast"].count) == (6, 15)
            assert rows[0, "broadcast"].seconds == pytest.approx(6 * 9e-9)
    assert watch.stored() == odd.written + good.written


# -- directories that cannot be written -----------------------------------------------------------


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Make ``rings`` unwritable: by a read-only mount for root, whom permissions do not stop; by permissions for others."""
    rings = tmp_path / "rings"
    with small_tmpfs(rings, 4 << 20) as mounted:

        def make() -> None:
            if mounted:
                subprocess.run(["mount", "-o", "remount,ro", str(rings)], check=True)
            else:
                rings.chmod(0o555)

        yield make
        if not mounted:
            rings.chmod(0o755)


def test_read_only_directory(tmp_path: Path, read_only: Callable[[], None], caplog: pytest.LogCaptureFixture) -> None:
    """Rings that cannot be removed are still read only once, by this agent and the next, and this is logged once."""
    with Trainer(tmp_path / "rings" / "a.ring") as rank:
        rank.write(operation(start_ns=0, end_ns=9, seq=n) for n in range(50))
    read_only()
    needs(not os.access(tmp_path / "rings", os.W_OK), "the right to mount, or not to be root")
    for said in (1, 2):
        watch = Watch(tmp_path)
        with caplog.at_level(logging.WARNING, "commwatch"):
            for _ in range(3):
                watch.tick()
        assert (watch.count(), watch.stored(), watch.intake.lost) == (50, 50, 0)
        with caplog.at_level(logging.WARNING, "commwatch"):
            for hour in range(1, 4):
                watch.tick(hour * 3600 * 1000 * MS)
        assert list(watch.aggregate.jobs) == [], "a job that was over came back"
        assert (watch.count(), watch.stored()) == (50, 50)
        lines = [record.getMessage() for record in caplog.records if ".ring" in record.getMessage()]
        assert len(lines) == said


# -- full disks -----------------------------------------------------------------------------------


def test_new_ring_while_the_disk_is_full(tmp_path: Path) -> None:
    """A trainer that starts while the history cannot be written is taken up when it can; the others go on meanwhile."""
    with Trainer(tmp_path / "rings" / "a.ring", identity(note="x" * 2000)) as first:
        watch = Watch(tmp_path)
        watch.tick()
        # So full that not even its row can be made: it does not fit beside the other in a page.
        watch.fill_disk()
        with Trainer(tmp_path / "rings" / "b.ring", identity(rank=1, note="x" * 3000)) as second:
            first.write([operation(start_ns=0, end_ns=9)] * 5)
            second.write([operation(start_ns=0, end_ns=9)] * 7)
            for _ in range(3):
                watch.tick()
            assert watch.intake.bad_rings == 0
            assert next(watch.aggregate.rank_totals()).read == 5
            watch.free_disk()
            watch.tick()
            assert {key: row.count for key, row in watch.rows("rank").items()} == {(0,): 5, (1,): 7}


def test_summary_while_the_disk_is_full(tmp_path: Path) -> None:
    """What has been counted stays in the summary while the disk refuses it, and is there once afterwards."""
    with Trainer(tmp_path / "rings" / "a.ring") as rank:
        watch, written, chance = Watch(tmp_path), 0, random.Random(1)
        watch.tick()
        watch.fill_disk()
        for slot in range(4):
            rank.write(
                operation(start_ns=0, end_ns=slot * SLOT_NS + n + 1, seq=n, tag=chance.getrandbits(31))
                for n in range(300)
            )
            written += 300
            watch.tick(slot * SLOT_NS + 1000)
            assert watch.count() == written
        assert watch.store.trouble
        watch.free_disk()
        watch.tick(4 * SLOT_NS)
        assert watch.count() == watch.stored() == written
        assert Watch(tmp_path).count() == written


def test_names_survive_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that came while the disk was full for too long are in the history once it has room again."""
    monkeypatch.setattr(Writer, "MOST_PENDING", 5)
    with Trainer(tmp_path / "rings" / "a.ring") as rank:
        watch = Watch(tmp_path)
        watch.tick()
        watch.fill_disk()
        # Too large for what room there may be.
        rank.call(
            "name", [(group_entry(name="x" * 5000),), ({"op": ev.FIRST_UNKNOWN_OP, "name": "c10d::" + "x" * 5000},)]
        )
        for n in range(40):
            rank.write(operation(start_ns=0, end_ns=n * SLOT_NS + m + 1, seq=m) for m in range(200))
            watch.tick(n * SLOT_NS)
        assert watch.store.given_up > 0
        watch.free_disk()
        rank.write([(ev.FIRST_UNKNOWN_OP, *operation(start_ns=0, end_ns=50 * SLOT_NS)[1:])])
        watch.tick(50 * SLOT_NS)
        watch.tick(60 * SLOT_NS)
        found = Watch(tmp_path).rows("group", "op")
    assert [(group, str(op)[:6]) for group, op in found if op != "all_reduce"] == [("default_pg", "c10d::")]
