"""History on disk: the only SQL. One SQLite file per host, raw records in packed chunks, roll-ups with a sketch.

Raw records are kept by size, roll-ups and steps by time. What is stored of a ring and how far it has been read change
in one transaction, so that after any crash the agent goes on exactly where the history ends. Roll-ups follow later
(when their 10 s are over): ``rolled_n`` says up to which record, the rest is counted again from the raw records.
"""

from __future__ import annotations

import json
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from commwatch import sketch
from commwatch.books import CELL_SUMS, SLOT_NS, Cell, CellKey, GroupInfo, StepRecord
from commwatch.chunks import CHUNK_RECORDS, OpenChunk, Statement
from commwatch.collectors.events import NONSENSE, RECORD_SIZE
from commwatch.collectors.ring import number_of

SCHEMA_VERSION = 3
#: Roll-ups older than an hour are merged to five minutes.
_COARSE_NS = 300_000_000_000
_COARSEN_AFTER_NS = 3600_000_000_000

_STEP = """CREATE TABLE step (ring INTEGER NOT NULL, seq INTEGER NOT NULL, start_ns INTEGER NOT NULL, end_ns INTEGER NOT NULL, comm_ns INTEGER,
    exposed_ns INTEGER, groups TEXT NOT NULL DEFAULT '[]', p2p_wait_ns INTEGER, long INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (ring, seq)) WITHOUT ROWID"""
_SCHEMA = f"""
CREATE TABLE ring (
    id INTEGER PRIMARY KEY, uid TEXT NOT NULL UNIQUE, job TEXT NOT NULL, restart INTEGER NOT NULL, rank INTEGER NOT NULL,
    world_size INTEGER NOT NULL, started_ns INTEGER NOT NULL, wall_offset_ns INTEGER NOT NULL, identity TEXT NOT NULL,
    next_n INTEGER NOT NULL DEFAULT 0, rolled_n INTEGER NOT NULL DEFAULT 0, lost INTEGER NOT NULL DEFAULT 0,
    dropped INTEGER NOT NULL DEFAULT 0, seen_ns INTEGER NOT NULL, state TEXT NOT NULL DEFAULT 'running', steps_unavailable TEXT);
CREATE INDEX ring_job ON ring (job);
CREATE TABLE grp (ring INTEGER NOT NULL, small_id INTEGER NOT NULL, group_id TEXT NOT NULL, label TEXT NOT NULL, name TEXT NOT NULL,
    description TEXT NOT NULL, ranks TEXT, size INTEGER NOT NULL, aligned INTEGER NOT NULL, backend TEXT, PRIMARY KEY (ring, small_id)) WITHOUT ROWID;
CREATE INDEX grp_id ON grp (group_id);
CREATE TABLE name (ring INTEGER NOT NULL, kind TEXT NOT NULL, code INTEGER NOT NULL, name TEXT NOT NULL, PRIMARY KEY (ring, kind, code)) WITHOUT ROWID;
CREATE TABLE chunk (id INTEGER PRIMARY KEY, ring INTEGER NOT NULL, first_n INTEGER NOT NULL, until_n INTEGER NOT NULL,
    from_ns INTEGER NOT NULL, until_ns INTEGER NOT NULL, size INTEGER NOT NULL, data BLOB NOT NULL, UNIQUE (ring, first_n));
CREATE INDEX chunk_until ON chunk (until_ns);
CREATE TABLE span (chunk INTEGER NOT NULL, small_id INTEGER NOT NULL, seq_from INTEGER NOT NULL, seq_until INTEGER NOT NULL,
    PRIMARY KEY (chunk, small_id)) WITHOUT ROWID;
CREATE TABLE rollup (slot_ns INTEGER NOT NULL, coarse INTEGER NOT NULL DEFAULT 0, ring INTEGER NOT NULL, small_id INTEGER NOT NULL, op INTEGER NOT NULL,
    size_log2 INTEGER NOT NULL, {", ".join(f"{f} NUMERIC NOT NULL" for f in CELL_SUMS)}, durations TEXT NOT NULL, bins BLOB NOT NULL);
CREATE INDEX rollup_slot ON rollup (slot_ns);
{_STEP};
CREATE INDEX step_end ON step (end_ns);
"""
#: What brings a history of an earlier version to the next.
_UPGRADES = {
    1: (
        "ALTER TABLE grp ADD COLUMN backend TEXT",
        "ALTER TABLE step ADD COLUMN groups TEXT NOT NULL DEFAULT '[]'",
        "ALTER TABLE step ADD COLUMN p2p_wait_ns INTEGER",
        "ALTER TABLE step ADD COLUMN long INTEGER NOT NULL DEFAULT 0",
    ),
    2: (
        "ALTER TABLE step RENAME TO old_step",
        _STEP,
        "INSERT INTO step SELECT ring, seq, start_ns, end_ns, comm_ns, exposed_ns, groups, p2p_wait_ns, long FROM old_step",
        "DROP TABLE old_step",
        "CREATE INDEX step_end ON step (end_ns)",
    ),
}


class StoreError(Exception):
    """The history cannot be opened; the message names the file and the remedy."""


class RingRow(NamedTuple):
    """A ring as the history knows it. Times ending in ``_ns`` are wall time."""

    id: int
    #: Path of the ring file; no two have the same.
    uid: str
    job: str
    restart: int
    rank: int
    world_size: int
    started_ns: int
    wall_offset_ns: int
    identity: dict[str, Any]
    next_n: int
    rolled_n: int
    lost: int
    dropped: int
    seen_ns: int
    #: ``running``, ``ended`` (said so itself) or ``gone`` (its process vanished).
    state: str
    steps_unavailable: str | None

    @property
    def running(self) -> bool:
        """Not known to have ended, and its ring is still there (it is not after a reboot)."""
        return self.state == "running" and Path(self.uid).exists()


class Rollup(NamedTuple):
    """One stored cell."""

    slot_ns: int
    #: How much time it covers from there.
    length_ns: int
    ring: int
    key: CellKey
    cell: Cell


def connect(path: Path, write: bool) -> sqlite3.Connection:
    """Open the history; for writing it is made if need be.

    Raises:
        StoreError: not there, not readable, not ours, or of another version.
    """
    try:
        if write:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            db = sqlite3.connect(path, timeout=10, isolation_level=None, check_same_thread=False)
        else:
            if not path.exists():
                raise StoreError(f"{path}: no history here; give the directory with --state")
            db = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode=ro",
                uri=True,
                timeout=10,
                isolation_level=None,
                check_same_thread=False,
            )
        if write:
            db.execute("PRAGMA synchronous = NORMAL")
        _check_version(db, path, write)
        if write:
            _use_wal(db)
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"{path}: {error}; move it away, or choose another place with --state") from None
    return db


def _check_version(db: sqlite3.Connection, path: Path, write: bool) -> None:
    version = _version(db)
    if version < SCHEMA_VERSION and write:
        db.execute("BEGIN IMMEDIATE")  # another agent of this user may be making it right now
        _bring_up_to_date(db)
        version = _version(db)
        db.execute("COMMIT")
    if version != SCHEMA_VERSION:
        db.close()
        remedy = "start an agent on it to bring it up to date" if version in _UPGRADES else "move it away"
        if version > SCHEMA_VERSION:
            remedy = "use the newer commwatch that wrote it, move it away"
        raise StoreError(
            f"{path}: history of version {version}, this commwatch reads {SCHEMA_VERSION}; {remedy}, or choose another place with --state"
        )


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _bring_up_to_date(db: sqlite3.Connection) -> None:
    """Make the tables of an empty file, change those of an earlier version; leave what is not ours alone."""
    version = _version(db)
    if version == 0 and not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        statements: Iterable[str] = _SCHEMA.split(";")
    elif version in _UPGRADES:
        statements = (s for at in range(version, SCHEMA_VERSION) for s in _UPGRADES[at])
    else:
        return
    for statement in statements:
        db.execute(statement)
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _use_wal(db: sqlite3.Connection) -> None:
    """Switch to the write-ahead log; SQLite does not wait for others by itself when it does that."""
    for attempt in range(100):
        try:
            db.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError:
            if attempt == 99:
                raise
            time.sleep(0.05)
        else:
            return


class Writer:
    """The one writer of an agent. Statements gather and are written by ``commit``, all or none of them."""

    #: Statements with records kept while the disk refuses them; beyond that they are lost, and counted.
    MOST_PENDING = 20_000

    def __init__(self, path: Path) -> None:
        self.path = path
        self._db = connect(path, write=True)
        # Rings fill within seconds: who else holds the history is waited for between looks, not in one.
        self._db.execute("PRAGMA busy_timeout = 1000")
        #: Names and states, which are few and always kept; records and sums, which are not.
        self._names: list[Statement] = []
        self._pending: list[Statement] = []
        self._progress: dict[int, Statement] = {}
        self._chunks: dict[int, OpenChunk] = {}
        self._dirty: set[int] = set()
        self._ended: set[int] = set()
        #: Why the last commit failed, and statements given up.
        self.trouble: str | None = None
        self.given_up = 0

    def ring(self, uid: str, identity: dict[str, Any], now_ns: int) -> RingRow:
        """The row of a ring, made at first sight."""
        offset = int(identity["wall_offset_ns"])
        values = (
            uid,
            str(identity["job"]),
            int(identity["restart"]),
            int(identity["rank"]),
            int(identity["world_size"]),
        )
        self._db.execute(
            "INSERT OR IGNORE INTO ring (uid, job, restart, rank, world_size, started_ns, wall_offset_ns, identity, seen_ns) VALUES (?,?,?,?,?,?,?,?,?)",
            (*values, int(identity["started_ns"]) + offset, offset, json.dumps(identity), now_ns),
        )
        return rings(self._db, "uid = ?", (uid,))[0]

    def append(self, ring: RingRow, records: bytes, until_n: int) -> None:
        """Add raw records."""
        for at in range(0, len(records), CHUNK_RECORDS * RECORD_SIZE):
            piece = records[at : at + CHUNK_RECORDS * RECORD_SIZE]
            chunk = self._chunks.setdefault(ring.id, OpenChunk(ring.id, ring.wall_offset_ns))
            chunk.append(piece, until_n - (len(records) - at - len(piece)) // RECORD_SIZE)
            self._dirty.add(ring.id)
            if len(chunk.records) >= CHUNK_RECORDS * RECORD_SIZE:
                self._write_chunk(ring.id)
                del self._chunks[ring.id]

    def _write_chunk(self, ring: int) -> None:
        self._pending.extend(self._chunks[ring].statements())
        self._dirty.discard(ring)

    def progress(self, ring: int, next_n: int, lost: int, dropped: int, now_ns: int) -> None:
        """How far a ring has been read."""
        statement = "UPDATE ring SET next_n = ?, lost = ?, dropped = ?, seen_ns = ? WHERE id = ?"
        self._progress[ring] = (statement, (next_n, lost, dropped, now_ns, ring))

    def end(self, ring: int, state: str) -> None:
        """The ring's trainer is no more, and nothing comes after what has come."""
        self._ended.add(ring)
        self._names.append(("UPDATE ring SET state = ? WHERE id = ?", (state, ring)))

    def group(self, ring: int, small_id: int, group: GroupInfo) -> None:
        """A group's name and members."""
        ranks = json.dumps(group.ranks) if group.ranks is not None else None
        row = (
            ring,
            small_id,
            group.group_id,
            group.label,
            group.name,
            group.description,
            ranks,
            group.size,
            group.aligned,
            group.backend,
        )
        self._names.append(("INSERT OR REPLACE INTO grp VALUES (?,?,?,?,?,?,?,?,?,?)", row))

    def name(self, ring: int, kind: str, code: int, name: str) -> None:
        """What a number of the ring means: ``kind`` is ``dtype`` or ``op``."""
        self._names.append(("INSERT OR REPLACE INTO name VALUES (?,?,?,?)", (ring, kind, code, name)))

    def rollups(self, ring: int, cells: Iterable[tuple[int, CellKey, Cell]], rolled_n: int) -> None:
        """Closed cells, which hold the records of the ring up to ``rolled_n``."""
        for slot_ns, key, cell in cells:
            self._pending.append(_rollup_row(slot_ns, 0, ring, key, cell))
        self._pending.append(("UPDATE ring SET rolled_n = ? WHERE id = ?", (rolled_n, ring)))

    def steps(self, ring: RingRow, steps: Iterable[StepRecord], unavailable: str | None) -> None:
        """Finished steps, or why there are none."""
        for step in steps:
            start, end = step.start_ns + ring.wall_offset_ns, step.end_ns + ring.wall_offset_ns
            what = (step.comm_ns, step.exposed_ns, json.dumps(step.groups), step.p2p_wait_ns, step.long)
            self._pending.append(
                ("INSERT OR REPLACE INTO step VALUES (?,?,?,?,?,?,?,?,?)", (ring.id, step.seq, start, end, *what))
            )
        self._pending.append(("UPDATE ring SET steps_unavailable = ? WHERE id = ?", (unavailable, ring.id)))

    def commit(self) -> bool:
        """Write all that has gathered; False, with ``trouble`` set, where the disk refuses."""
        # Chunks that still grow are written as they stand, each time anew: a full disk keeps one state of them, not all.
        growing = [statement for ring in self._dirty for statement in self._chunks[ring].statements()]
        statements = [*self._names, *self._pending, *growing, *self._progress.values()]
        if not statements:
            return True
        try:
            with _transaction(self._db):
                for statement, values in statements:
                    self._db.execute(statement, values)
        except sqlite3.Error as error:
            self.trouble = f"{self.path}: {error}"
            if len(self._pending) > self.MOST_PENDING:
                self.given_up += len(self._pending)
                self._pending.clear()
            return False
        self.trouble = None
        self._names.clear()
        self._pending.clear()
        self._progress.clear()
        self._dirty.clear()
        for ring in self._ended:
            self._chunks.pop(ring, None)
        self._ended.clear()
        return True

    def tidy(self, now_ns: int, raw_bytes: int, keep_ns: int) -> None:
        """Keep ``raw_bytes`` of raw records and ``keep_ns`` of roll-ups and steps; merge old roll-ups."""
        try:
            with _transaction(self._db):
                self._trim_raw(raw_bytes)
                self._coarsen(now_ns - _COARSEN_AFTER_NS)
                for table, column in (("rollup", "slot_ns"), ("step", "end_ns"), ("chunk", "until_ns")):
                    self._db.execute(f"DELETE FROM {table} WHERE {column} < ?", (now_ns - keep_ns,))
                self._forget_rings(now_ns - keep_ns)
                self._db.execute("DELETE FROM span WHERE chunk NOT IN (SELECT id FROM chunk)")
        except sqlite3.Error as error:
            self.trouble = f"{self.path}: {error}"

    def _forget_rings(self, before_ns: int) -> None:
        """Forget the rings that were last heard of before then and are no more."""
        for ring in rings(self._db, "seen_ns < ?", (before_ns,)):
            if not ring.running:
                for table, column in (("grp", "ring"), ("name", "ring"), ("ring", "id")):
                    self._db.execute(f"DELETE FROM {table} WHERE {column} = ?", (ring.id,))

    def _trim_raw(self, raw_bytes: int) -> None:
        total = self._db.execute("SELECT COALESCE(SUM(size), 0) FROM chunk").fetchone()[0]
        for chunk, size in self._db.execute("SELECT id, size FROM chunk ORDER BY until_ns").fetchall():
            if total <= raw_bytes:
                break
            self._db.execute("DELETE FROM chunk WHERE id = ?", (chunk,))
            total -= size

    def _coarsen(self, before_ns: int) -> None:
        before_ns -= before_ns % _COARSE_NS
        merged: dict[tuple[int, int, CellKey], Cell] = {}
        for row in rollups(self._db, "coarse = 0 AND slot_ns < ?", (before_ns,)):
            merged.setdefault((row.slot_ns - row.slot_ns % _COARSE_NS, row.ring, row.key), Cell()).add(row.cell)
        self._db.execute("DELETE FROM rollup WHERE coarse = 0 AND slot_ns < ?", (before_ns,))
        for (slot_ns, ring, key), cell in merged.items():
            self._db.execute(*_rollup_row(slot_ns, 1, ring, key, cell))

    def raw_since(self, ring: RingRow) -> Iterator[tuple[bytes, int]]:
        """Stored records that no roll-up holds yet, oldest first, and the number that follows each run."""
        return raw_since(self._db, ring)

    def close(self) -> None:
        """Write what is left and let go."""
        self.commit()
        self._db.close()


class _transaction:  # noqa: N801 - reads as a statement
    """``with _transaction(db):`` all or nothing."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, *_: object) -> None:
        self._db.execute("COMMIT" if kind is None else "ROLLBACK")


def rings(db: sqlite3.Connection, where: str, values: tuple[Any, ...]) -> list[RingRow]:
    """Rings by an SQL condition, oldest first."""
    columns = ", ".join(RingRow._fields)
    rows = db.execute(f"SELECT {columns} FROM ring WHERE {where} ORDER BY started_ns, rank", values)
    return [RingRow(*row)._replace(identity=json.loads(row[8])) for row in rows]


def rollups(db: sqlite3.Connection, where: str, values: tuple[Any, ...]) -> Iterator[Rollup]:
    """Roll-ups by an SQL condition."""
    columns = ", ".join(CELL_SUMS)
    for slot, coarse, ring, group, op, size, durations, bins, *sums in db.execute(
        f"SELECT slot_ns, coarse, ring, small_id, op, size_log2, durations, bins, {columns} FROM rollup WHERE {where}",
        values,
    ).fetchall():
        cell = Cell()
        cell.durations, cell.bins = json.loads(durations), sketch.decode(bins)
        for field, value in zip(CELL_SUMS, sums, strict=True):
            setattr(cell, field, value)
        yield Rollup(slot, _COARSE_NS if coarse else SLOT_NS, ring, CellKey(group, op, size), cell)


def _rollup_row(slot_ns: int, coarse: int, ring: int, key: CellKey, cell: Cell) -> Statement:
    values = (
        slot_ns,
        coarse,
        ring,
        *key,
        *(_storable(getattr(cell, f)) for f in CELL_SUMS),
        json.dumps(cell.durations),
        sketch.encode(cell.bins),
    )
    return f"INSERT INTO rollup VALUES ({', '.join('?' * len(values))})", values


def _storable(total: float) -> float:
    """A sum as SQLite can hold it: its integers have 64 bits, and the sizes in a ring may be anything."""
    return total if total < NONSENSE else float(total)


def raw_since(db: sqlite3.Connection, ring: RingRow) -> Iterator[tuple[bytes, int]]:
    """Stored records of a ring that no roll-up holds yet, oldest first, each run with the number that follows it."""
    wanted = "SELECT data, until_n FROM chunk WHERE ring = ? AND until_n > ? ORDER BY first_n"
    for data, until_n in db.execute(wanted, (ring.id, ring.rolled_n)).fetchall():
        records = zlib.decompress(data)
        stamps = memoryview(records).cast("I")[:: RECORD_SIZE // 4].tolist()
        first = next((i for i, stamp in enumerate(stamps) if number_of(stamp, until_n) >= ring.rolled_n), len(stamps))
        yield records[first * RECORD_SIZE :], until_n
