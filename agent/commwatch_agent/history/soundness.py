"""Checksums of the history's rows. A row that does not match its checksum is skipped, counted and logged.

SQLite has no checksums in its database file, so a byte changed on disk would be read as another number. At the next start, a
damaged file is renamed, and a new one is started.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import cast

from commwatch_agent.model.cells import CELL_SUMS
from commwatch_agent.model.endings import Ending

#: Upper bound of every time in ns and every count.
_MOST = 1 << 62
#: Leading columns of a ring, which never change and which its checksum covers; the others grow.
_RING_SEALED = 9
#: SQL condition by table that holds for undamaged rows.
SOUND = {
    "ring": "sound('ring', crc, CAST(uid AS BLOB), CAST(job AS BLOB), restart, rank, world_size, started_ns, wall_offset_ns,"
    " CAST(run AS BLOB), CAST(identity AS BLOB), next_n, rolled_n, lost, dropped, seen_ns, CAST(ending AS BLOB))",
    "run_exit": "sound('run_exit', crc, CAST(job AS BLOB), CAST(run AS BLOB), code, at_ns)",
    "grp": "sound('grp', crc, ring, small_id, CAST(group_id AS BLOB), CAST(label AS BLOB), CAST(name AS BLOB), CAST(description AS BLOB),"
    " CAST(ranks AS BLOB), size, aligned, CAST(backend AS BLOB))",
    "name": "sound('name', crc, ring, CAST(kind AS BLOB), code, CAST(name AS BLOB))",
    "chunk": "sound('chunk', crc, ring, first_n, until_n, from_ns, until_ns, size)",
    "extent": "sound('extent', extent.crc, extent.ring, extent.from_ns, extent.until_ns, ops, groups, longest_ns, seq_from, seq_until)",
    "rollup": f"sound('rollup', crc, slot_ns, coarse, ring, small_id, op, size_log2, {', '.join(CELL_SUMS)}, CAST(durations AS BLOB), bins)",
    "step": "sound('step', crc, ring, seq, start_ns, end_ns, comm_ns, exposed_ns, CAST(groups AS BLOB), p2p_wait_ns, long)",
    "incident": "sound('incident', crc, CAST(id AS BLOB), CAST(agent AS BLOB), CAST(job AS BLOB), CAST(run AS BLOB), CAST(state AS BLOB),"
    " began_ns, last_ns, CAST(data AS BLOB))",
    "node_sample": "sound('node_sample', crc, at_ns, CAST(counters AS BLOB))",
    "clock": "sound('clock', crc, CAST(boot_id AS BLOB), monotonic_ns, wall_ns, arrived_ns)",
}
#: Parts of SQLite's error messages for a damaged file.
_MALFORMED = ("malformed", "not a database")
#: Suffixes of a database, its write-ahead log and the log's index.
_FILES = ("", "-wal", "-shm")


def row_checksum(values: Iterable[object]) -> int:
    """Return the checksum of a row."""
    # Integers take the fast path: nearly all values are, and a summary may read a million.
    return zlib.crc32(repr([value if type(value) is int else _as_read(value) for value in values]).encode())


def _as_read(value: object) -> object:
    """Return a value as SQLite returns it: whole floats as integers; texts as bytes, as they are cast to BLOB."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return int(value) if isinstance(value, bool) else value


def judge_rows(db: sqlite3.Connection, damaged: Callable[[str, object], None]) -> None:
    """Add the SQL function ``sound(table, crc, column, ...)``: false for a damaged row, for which it calls ``damaged(table, row)``."""

    def sound(table: str, crc: object, *values: object) -> bool:
        fits = _fits(table, crc, values)
        if not fits:
            damaged(table, (table, crc, *values))
        return fits

    db.create_function("sound", -1, sound)
    # The text of a damaged row may be anything.
    db.text_factory = lambda text: text.decode(errors="replace")


def _fits(table: str, crc: object, values: tuple[object, ...]) -> bool:
    if table == "ring":
        *growing, ending = values[_RING_SEALED:]
        if not _are_counts(growing) or not _is_ending(ending):
            return False
        values = values[:_RING_SEALED]
    return crc == row_checksum(values)


def _are_counts(values: Iterable[object]) -> bool:
    return all(isinstance(value, int) and abs(value) < _MOST for value in values)


def _is_ending(text: object) -> bool:
    try:
        if not isinstance(text, bytes):
            return text is None
        ending = Ending(*json.loads(text))
        return _are_counts((ending.since_ns, ending.until_ns, ending.stop, ending.stop_ns))
    except (ValueError, TypeError, RecursionError):
        return False


def numbers(row: Sequence[object]) -> Sequence[int]:
    """Return a row of counts and times.

    Raises:
        sqlite3.DatabaseError: a value is not an integer in range, so the file is damaged.
    """
    if not _are_counts(row):
        raise sqlite3.DatabaseError("database disk image is malformed: a number is expected")
    return cast(Sequence[int], row)


def is_malformed(error: sqlite3.Error) -> bool:
    """Return whether the error means a damaged file, and not a full disk or a lock."""
    return any(sign in str(error) for sign in _MALFORMED)


def is_full(error: sqlite3.Error) -> bool:
    """Return whether the error means a full disk."""
    return "disk is full" in str(error)


def set_aside(path: Path, what: str = "damaged") -> Path:
    """Rename a history and its log files; return the new path.

    Args:
        what: it is, for the name, which has the time, too.

    Raises:
        OSError: it cannot be renamed.
    """
    at = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S}"
    aside = path.with_name(f"{path.name}.{what}-{at}")
    n = 1
    while aside.exists():
        n += 1
        aside = path.with_name(f"{path.name}.{what}-{at}-{n}")
    # The database first, because its log alone is no history.
    for suffix in _FILES:
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.rename(aside.with_name(aside.name + suffix))
    mark(path).unlink(missing_ok=True)
    return aside


def mark(path: Path) -> Path:
    """Return the marker file of a history found damaged; the agent's next start sets that history aside."""
    return path.with_name(f"{path.name}.damaged")
