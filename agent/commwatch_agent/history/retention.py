"""Retention of the history in slices: what is old goes a little at a time, so that rings are drained meanwhile.

Each slice is a short transaction that leaves a history as good as before it.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence

from commwatch_agent.core.cells import Cell, CellKey
from commwatch_agent.history.opening import Transaction
from commwatch_agent.history.rows import COARSE_NS, COARSEN_AFTER_NS, rings, rollup_row, rollups
from commwatch_agent.history.soundness import numbers

#: Rows of a slice, which takes some milliseconds.
_ROWS, _CHUNKS = 500, 50
#: Jobs whose exit codes are kept.
MOST_EXITS = 10_000
#: Part of their time by which roll-ups and steps are shortened, at least so many ns, as long as they take too much space.
_CUT, _LEAST_CUT_NS = 20, 60 * 10**9
#: Index of the chunks by ring, with their sizes.
_OF_RING = "chunk_of_ring"
#: Key of the rows of a table, and the time that counts.
_AGED = (("rollup", "rowid", "slot_ns"), ("step", "ring, seq", "end_ns"), ("node_sample", "at_ns", "at_ns"))


def slices(db: sqlite3.Connection, now_ns: int, raw_bytes: int, summary_bytes: int, keep_ns: int) -> Iterator[None]:
    """Apply the retention, and merge old rollups; yield after each slice.

    Args:
        raw_bytes: most bytes of raw records.
        summary_bytes: most bytes of all else. One call deletes a part of what is too much, the oldest.
        keep_ns: for how long anything is kept.

    Raises:
        sqlite3.Error: a slice failed, and has changed nothing.
    """
    before_ns = now_ns - keep_ns
    yield from _trim_raw(db, raw_bytes, before_ns)
    yield from _coarsen(db, now_ns - COARSEN_AFTER_NS)
    summary_ns = max(before_ns, _cut_ns(db, now_ns, summary_bytes))
    for table, key, column in _AGED:
        yield from _delete_old(db, table, key, f"{column} < {summary_ns:d}")
    with Transaction(db):
        _forget_rings(db, before_ns)
    yield


def _cut_ns(db: sqlite3.Connection, now_ns: int, summary_bytes: int) -> int:
    """Return the Unix time in ns before which roll-ups and steps are too much; 0: there is room."""
    pages, free, size = (
        db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    if (pages - free) * size - _raw_bytes(db) <= summary_bytes:
        return 0
    oldest = (db.execute(f"SELECT MIN({column}) FROM {table}").fetchone() for table, _, column in _AGED)
    oldest_ns = min((at_ns for row in oldest if row[0] is not None for at_ns in numbers(row)), default=now_ns)
    return oldest_ns + max((now_ns - oldest_ns) // _CUT, _LEAST_CUT_NS)


def _raw_bytes(db: sqlite3.Connection) -> float:
    """Return the size of the raw records."""
    size: float = db.execute("SELECT TOTAL(size) FROM chunk").fetchone()[0]
    return size


def _delete_old(db: sqlite3.Connection, table: str, key: str, old: str) -> Iterator[None]:
    statement = f"DELETE FROM {table} WHERE ({key}) IN (SELECT {key} FROM {table} WHERE {old} LIMIT {_ROWS})"
    left = True
    while left:
        with Transaction(db):
            left = db.execute(statement).rowcount > 0
        yield


def _trim_raw(db: sqlite3.Connection, raw_bytes: int, before_ns: int) -> Iterator[None]:
    """Delete the chunks that ended before ``before_ns``, and those beyond ``raw_bytes``: the oldest of the owners that have the most."""
    left = True
    while left:
        with Transaction(db):
            left = _delete_before(db, before_ns)
        yield
    excess = _raw_bytes(db) - raw_bytes  # what comes meanwhile is for the next call
    while excess > 0:
        with Transaction(db):
            deleted = _trim_largest(db, raw_bytes)
        excess = excess - deleted if deleted else 0
        yield


def _delete_before(db: sqlite3.Connection, before_ns: int) -> bool:
    """Delete the oldest chunks that ended before ``before_ns``; return whether there may be more."""
    oldest = db.execute(f"SELECT id, size, until_ns FROM chunk ORDER BY until_ns LIMIT {_CHUNKS}").fetchall()
    gone = [chunk for chunk, _, until_ns in map(numbers, oldest) if until_ns < before_ns]
    _delete_chunks(db, gone)
    return len(gone) == _CHUNKS


def _trim_largest(db: sqlite3.Connection, raw_bytes: int) -> int:
    """Delete chunks of the owner that has the most, if that is more than its fair share; return how many bytes.

    Its oldest chunks are those that this history got first, whatever times are in the records. In a transaction, because other agents
    delete them too.
    """
    sizes: dict[int | None, int] = {}
    owners = dict(db.execute("SELECT ring, uid FROM owner"))
    for ring, size in map(
        numbers, db.execute(f"SELECT ring, SUM(size) FROM chunk INDEXED BY {_OF_RING} GROUP BY ring")
    ):
        sizes[owners.get(ring)] = sizes.get(owners.get(ring), 0) + size
    if sum(sizes.values()) <= raw_bytes:
        return 0
    owner = max(sizes, key=sizes.__getitem__)
    excess = sizes[owner] - fair_share(sizes.values(), raw_bytes)
    its = f"SELECT chunk.id, size FROM chunk INDEXED BY {_OF_RING} LEFT JOIN owner ON owner.ring = chunk.ring WHERE owner.uid IS ?"
    gone, deleted = [], 0
    for chunk, size in map(numbers, db.execute(f"{its} ORDER BY chunk.id LIMIT {_CHUNKS}", (owner,))):
        if deleted >= excess:
            break
        gone.append(chunk)
        deleted += size
    _delete_chunks(db, gone)
    return deleted


def fair_share(sizes: Iterable[float], most: float) -> float:
    """Return how much each owner may keep, so that all of them together have ``most``: what one does not need, the others may have.

    >>> fair_share([10, 50, 100], 90)
    40.0
    """
    waiting = sorted(sizes)
    for place, size in enumerate(waiting):
        share = most / (len(waiting) - place)
        if size > share:
            return share
        most -= size
    return max(waiting, default=0.0)


def _delete_chunks(db: sqlite3.Connection, gone: Sequence[int]) -> None:
    for table, column in (("span", "chunk"), ("extent", "chunk"), ("chunk", "id")):
        db.execute(f"DELETE FROM {table} WHERE {column} IN (SELECT value FROM json_each(?))", (json.dumps(gone),))


def _coarsen(db: sqlite3.Connection, before_ns: int) -> Iterator[None]:
    """Merge the rollups of slots before ``before_ns``, those of one ring and coarse slot in a slice."""
    before_ns -= before_ns % COARSE_NS
    left = True
    while left:
        with Transaction(db):
            left = _merge_oldest(db, before_ns)
        yield


def _merge_oldest(db: sqlite3.Connection, before_ns: int) -> bool:
    """Merge the oldest fine rollups; return whether there were any. In a transaction, because other agents merge them too."""
    oldest = "SELECT slot_ns, ring FROM rollup WHERE coarse = 0 AND slot_ns < ? ORDER BY slot_ns LIMIT 1"
    fine = "coarse = 0 AND slot_ns >= ? AND slot_ns < ? AND ring = ?"
    found = db.execute(oldest, (before_ns,)).fetchone()
    if found is None:
        return False
    first_ns, ring = numbers(found)
    begin_ns = first_ns - first_ns % COARSE_NS
    these = begin_ns, begin_ns + COARSE_NS, ring
    merged: dict[CellKey, Cell] = {}
    for row in rollups(db, fine, these):
        merged.setdefault(row.key, Cell()).add(row.cell)
    if db.execute(f"DELETE FROM rollup WHERE {fine}", these).rowcount < 1:
        raise sqlite3.DatabaseError("database disk image is malformed: an index has a row that its table lacks")
    for key, cell in merged.items():
        db.execute(*rollup_row(begin_ns, 1, ring, key, cell))
    return True


def _forget_rings(db: sqlite3.Connection, before_ns: int) -> None:
    """Delete ended rings last seen before ``before_ns``, and exit codes from before then."""
    for ring in rings(db, "seen_ns < ?", (before_ns,)):
        if not ring.running:
            for table, column in (("grp", "ring"), ("name", "ring"), ("owner", "ring"), ("ring", "id")):
                db.execute(f"DELETE FROM {table} WHERE {column} = ?", (ring.id,))
    db.execute("DELETE FROM job_exit WHERE at_ns < ?", (before_ns,))
    # Anyone who may write to the run directory can leave exit codes of any number of jobs there.
    latest = "SELECT job FROM job_exit ORDER BY at_ns DESC LIMIT -1 OFFSET ?"
    db.execute(f"DELETE FROM job_exit WHERE job IN ({latest})", (MOST_EXITS,))
