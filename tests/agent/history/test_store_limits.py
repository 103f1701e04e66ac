"""The history's bounds: what is kept and for how long, who else may write, files that are not ours, full disks."""

from __future__ import annotations

import random
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from commwatch.wire import events as ev
from commwatch_agent.history.chunks import CHUNK_RECORDS
from commwatch_agent.history.history import History
from commwatch_agent.history.opening import StoreError
from commwatch_agent.history.rows import RingRow
from commwatch_agent.history.schema import SCHEMA_VERSION
from commwatch_agent.history.store import Writer
from commwatch_agent.model.cells import Cell, CellKey, GroupInfo, StepRecord
from tests.helpers import identity, numbered, operation, packed, small_tmpfs, split_records, stored_records

NOW = 1_700_000_000_000_000_000
ALWAYS = (0, 1 << 62)
SECOND, HOUR = 10**9, 3600 * 10**9


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "history.sqlite"


# -- retention ------------------------------------------------------------------------------------


def filled(path: Path, chunks: int) -> tuple[Writer, RingRow]:
    """A ring with so many full chunks of records that do not compress; one comes each second."""
    store, noise = Writer(path), random.Random(0)
    row = store.ring("a", identity(), NOW)
    for n in range(chunks):
        store.arrive(n * SECOND, NOW + n * SECOND)
        records = (
            operation(
                start_ns=noise.getrandbits(30),
                end_ns=n * SECOND,
                launch_ns=noise.getrandbits(60),
                size=noise.getrandbits(60),
            )
            for _ in range(CHUNK_RECORDS)
        )
        store.append(row, packed(*records, first=n * CHUNK_RECORDS), (n + 1) * CHUNK_RECORDS)
        store.steps(row, [StepRecord(n, n * SECOND - 1, n * SECOND, 0, None)], None)
        store.rollups(row.id, [(NOW + n * SECOND, CellKey(0, 1, 1), Cell())], 0)
        assert store.commit()
    return store, row


def test_raw_records_are_bounded_by_size(path: Path) -> None:
    """Raw records are kept up to so many bytes on disk, the newest; roll-ups and steps stay."""
    store, row = filled(path, 8)
    everything = stored_records(path, row.id)
    one = store._db.execute("SELECT MAX(size) FROM chunk").fetchone()[0]
    list(store.tidy(NOW + 8 * SECOND, raw_bytes=3 * one, summary_bytes=1 << 40, keep_ns=HOUR))
    assert stored_records(path, row.id) == everything[5 * CHUNK_RECORDS :]
    with History(path) as history:
        assert (len(history.steps(*ALWAYS, [row.id])), len(list(history.rollups(*ALWAYS, [row.id])))) == (8, 8)
        assert len(list(history.chunks_with("g", 0))) == 0
    assert store._db.execute("SELECT COUNT(*) FROM span WHERE chunk NOT IN (SELECT id FROM chunk)").fetchone() == (0,)


def test_tidying_amid_a_chunk(path: Path) -> None:
    """A chunk that is trimmed while it still grows loses nothing of what comes after."""
    store = Writer(path)
    row = store.ring("a", identity(), NOW)
    store.append(row, numbered(range(10)), 10)
    assert store.commit()
    list(store.tidy(NOW, raw_bytes=0, summary_bytes=1 << 40, keep_ns=HOUR))
    store.append(row, numbered(range(10, 20)), 20)
    assert store.commit()
    assert stored_records(path, row.id)[-10:] == split_records(numbered(range(10, 20)))


def test_kept_for_so_long(path: Path) -> None:
    """Roll-ups, steps and raw records older than the time kept go; younger ones stay."""
    store, row = filled(path, 8)
    everything = stored_records(path, row.id)
    list(store.tidy(NOW + 8 * SECOND, raw_bytes=1 << 40, summary_bytes=1 << 40, keep_ns=3 * SECOND))
    assert stored_records(path, row.id) == everything[5 * CHUNK_RECORDS :]
    with History(path) as history:
        assert [step.seq for step in history.steps(*ALWAYS, [row.id])] == [7, 6, 5]
        assert sorted(r.slot_ns for r in history.rollups(*ALWAYS, [row.id])) == [NOW + n * SECOND for n in (5, 6, 7)]


def test_the_rest_is_bounded_by_size(path: Path) -> None:
    """Roll-ups and steps are kept up to so many bytes on disk: the oldest go, a part in each round, and raw records stay."""
    store, steps = Writer(path), 20_000
    row = store.ring("a", identity(), NOW)
    store.append(row, numbered(range(10)), 10)
    for n in range(steps):
        store.arrive(n * SECOND, NOW + n * SECOND)
        store.steps(row, [StepRecord(n, n * SECOND - 1, n * SECOND, 0, None)], None)
    assert store.commit()
    (pages,), (page,) = (store._db.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size"))
    now, size, limit = NOW + steps * SECOND, pages * page, pages * page // 2

    def kept(summary_bytes: int) -> list[int]:
        list(store.tidy(now, raw_bytes=1 << 40, summary_bytes=summary_bytes, keep_ns=24 * HOUR))
        return [seq for (seq,) in store._db.execute("SELECT seq FROM step ORDER BY seq DESC")]

    assert len(kept(size)) == steps
    assert kept(limit) == list(range(steps - 1, steps // 20 - 1, -1))
    rounds = [len(kept(limit)) for _ in range(40)]
    assert rounds == sorted(rounds, reverse=True)
    assert rounds[-1] == rounds[-2]
    assert steps * limit * 0.8 < rounds[-1] * size < steps * limit
    assert len(stored_records(path, row.id)) == 10


def test_rings_go_with_their_records(path: Path, tmp_path: Path) -> None:
    """A ring that ended, or whose file vanished in a reboot, goes after that time with its names; a living one stays."""
    store, there = Writer(path), tmp_path / "there.ring"
    there.touch()
    for uid, state in (("ended", "ended"), (str(there), "running"), ("rebooted", "running"), ("recent", "gone")):
        ring = store.ring(uid, identity(), NOW)
        at_ns = HOUR if uid == "recent" else 0
        store.arrive(at_ns, NOW + at_ns)
        store.progress(ring.id, 5, 0, 0, NOW)
        store.group(ring.id, 0, GroupInfo("g", "g", "", "", (0,), 1, True))
        store.name(ring.id, "op", 32, "x")
        store.end(ring.id, state)
    assert store.commit()
    list(store.tidy(NOW + HOUR + 1, raw_bytes=1 << 40, summary_bytes=1 << 40, keep_ns=HOUR))
    with History(path) as history:
        assert {ring.uid for ring in history.rings()} == {str(there), "recent"}
        kept = {ring.id for ring in history.rings()}
        assert {ring for ring, _ in history.groups()} == {ring for ring, _ in history.names("op")} == kept


# -- two writers, files that are not ours, full disks ---------------------------------------------


def both(work: Callable[[str], None]) -> None:
    """Run ``work("a")`` and ``work("b")`` at once; raise what they raised."""
    start = threading.Barrier(2)

    def begin(name: str) -> None:
        start.wait()
        work(name)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(begin, name) for name in "ab"]:
            done.result()


def test_two_agents_make_it(tmp_path: Path) -> None:
    """Two agents of one user that start at the same moment, the first ever, both get their history."""
    for n in range(25):
        both(lambda name, n=n: Writer(tmp_path / f"{n}.sqlite").close())  # type: ignore[misc]


def test_two_writers(path: Path) -> None:
    """Two agents of one user write one history at the same time, and nothing of either is lost."""
    commits = 40
    Writer(path).close()

    def write(name: str) -> None:
        store = Writer(path)
        row = store.ring(name, identity(job=name), NOW)
        for n in range(commits):
            store.append(row, numbered([n]), n + 1)
            store.progress(row.id, n + 1, 0, 0, NOW + n)
            assert store.commit(), store.trouble
        store.close()

    both(write)
    with History(path) as history:
        rows = history.rings()
    assert sorted((row.uid, row.next_n) for row in rows) == [("a", commits), ("b", commits)]
    for row in rows:
        assert stored_records(path, row.id) == split_records(numbered(range(commits)))


def other_version(path: Path) -> None:
    Writer(path).close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    db.close()


def not_sqlite(path: Path) -> None:
    path.write_bytes(b"precious\n" * 1000)


def a_stranger(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE precious (thing TEXT)")
    db.close()


def cut_short(path: Path) -> None:
    Writer(path).close()
    path.write_bytes(path.read_bytes()[:5000])


@pytest.mark.parametrize("damage", [other_version, not_sqlite, a_stranger, cut_short])
@pytest.mark.parametrize("open_it", [Writer, History])
def test_not_our_file(tmp_path: Path, damage: Callable[[Path], None], open_it: Callable[[Path], Any]) -> None:
    """A file of another version, of something else, or damaged is refused by name, and left as it was."""
    path = tmp_path / "h.sqlite"
    damage(path)
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"h\.sqlite.*--state"):
        open_it(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("open_it", [Writer, History])
def test_downgrade(tmp_path: Path, open_it: Callable[[Path], Any]) -> None:
    """A history that a newer commwatch has written is refused with what to do: use that one, or another place."""
    other_version(tmp_path / "h.sqlite")
    wanted = rf"version {SCHEMA_VERSION + 1}, this commwatch reads {SCHEMA_VERSION}; use the newer commwatch .* move it away, or .*--state"
    with pytest.raises(StoreError, match=wanted):
        open_it(tmp_path / "h.sqlite")


def test_no_history(tmp_path: Path) -> None:
    """Reading where nothing was written, or writing below a file, is refused by name; reading makes no file."""
    with pytest.raises(StoreError, match=r"none\.sqlite"):
        History(tmp_path / "none.sqlite")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="file"):
        Writer(tmp_path / "file" / "h.sqlite")


class Disk:
    """A place for a history, that can be full."""

    def __init__(self, directory: Path, tmpfs: bool) -> None:
        self.path, self._ballast, self._tmpfs = directory / "h.sqlite", directory / "ballast", tmpfs

    def fill(self, store: Writer) -> None:
        """From now on next to nothing can be written."""
        if not self._tmpfs:
            store._db.execute("PRAGMA max_page_count = 1")  # no less than it has
            return
        with self._ballast.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                pass

    def free(self, store: Writer) -> None:
        if not self._tmpfs:
            store._db.execute("PRAGMA max_page_count = 1073741823")
        self._ballast.unlink(missing_ok=True)


@pytest.fixture(params=["file system", "database"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    """A real small file system where this process may mount one, and else (and also) SQLite's own limit."""
    if request.param == "database":
        yield Disk(tmp_path, False)
        return
    with small_tmpfs(tmp_path / "small", 4 << 20) as mounted:
        yield Disk(tmp_path / "small", mounted)


def test_full_disk(disk: Disk) -> None:
    """On a full disk a commit says False and why, naming the file; with room again everything pending is written."""
    store, noise = Writer(disk.path), random.Random(0)
    row = store.ring("a", identity(), NOW)
    store.append(row, numbered(range(100)), 100)
    store.progress(row.id, 100, 0, 0, NOW)
    assert store.commit()
    disk.fill(store)
    n, refused = 100, 0
    for _ in range(40):
        records = [
            packed(operation(start_ns=1, end_ns=noise.getrandbits(40), launch_ns=noise.getrandbits(60)), first=m)
            for m in range(n, n + 100)
        ]
        store.append(row, b"".join(records), n + 100)
        n += 100
        store.progress(row.id, n, 0, 0, NOW)
        if not store.commit():
            refused += 1
            assert str(disk.path) in (store.trouble or "")
            assert "full" in (store.trouble or ""), "the reason is told, not what came of it"
    assert refused > 0
    list(store.tidy(NOW, raw_bytes=1 << 40, summary_bytes=1 << 40, keep_ns=HOUR))
    with History(disk.path) as history:  # what was stored before can still be read
        assert history.rings()[0].next_n == sum(len(c.records) for c in history.chunks(*ALWAYS)) // ev.RECORD_SIZE
    disk.free(store)
    assert store.commit()
    assert (store.trouble, store.given_up) == (None, 0)
    found = stored_records(disk.path, row.id)
    assert [int.from_bytes(r[:4], "little") for r in found] == list(range(1, n + 1))
    store.close()


def test_the_reason_is_said(path: Path) -> None:
    """Where SQLite rolls back by itself, as it does on a full disk, `trouble` names the full disk."""
    store, disk, cell = Writer(path), Disk(path.parent, False), Cell()
    cell.bins = dict.fromkeys(range(2000), 1)
    row = store.ring("a", identity(), NOW)
    assert store.commit()
    disk.fill(store)
    store.rollups(row.id, [(NOW, CellKey(0, 1, n), cell) for n in range(20)], 20)
    assert not store.commit()
    assert store.trouble == f"{path}: database or disk is full"
    assert not store._db.in_transaction
    disk.free(store)
    assert store.commit()
    assert store.trouble is None


def test_a_trickle_outlasts_a_full_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit concerns how much is kept, not how often a write was tried: a few records per pass are never given up."""
    monkeypatch.setattr(Writer, "MOST_PENDING", 20)
    store, disk = Writer(path), Disk(path.parent, False)
    row = store.ring("a", identity(), NOW)
    assert store.commit()
    disk.fill(store)
    chance = random.Random(1)
    records = packed(*(operation(start_ns=0, end_ns=9, size=chance.getrandbits(60)) for _ in range(1000)))
    for n in range(200):
        store.append(row, records[5 * n * ev.RECORD_SIZE : (5 * n + 5) * ev.RECORD_SIZE], 5 * n + 5)
        store.progress(row.id, 5 * n + 5, 0, 0, NOW)
        store.commit()
    assert store.trouble
    disk.free(store)
    assert store.commit()
    assert (store.given_up, stored_records(path, row.id)) == (0, split_records(records))


def test_given_up_is_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records and sums a disk refuses for too long are given up and counted, so memory is bounded; names are kept."""
    monkeypatch.setattr(Writer, "MOST_PENDING", 20)
    store, disk, cell = Writer(path), Disk(path.parent, False), Cell()
    cell.bins = dict.fromkeys(range(1000), 1)
    row = store.ring("a", identity(), NOW)
    disk.fill(store)
    for n in range(60):
        store.rollups(row.id, [(n, CellKey(0, 1, 1), cell)], n)  # two statements
        store.name(row.id, "op", 32 + n, "x" * 50)
        assert not store.commit() or n < 5
    assert store.given_up > 0
    disk.free(store)
    assert store.commit()
    with History(path) as history:
        assert len(list(history.rollups(*ALWAYS, [row.id]))) == 60 - store.given_up / 2
        assert len(history.names("op")) == 60
