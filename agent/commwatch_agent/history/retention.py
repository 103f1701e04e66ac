"""Retention of the history in slices: what is old goes a little at a time, so that rings are drained meanwhile.

Each slice is a short transaction that leaves a history as good as before it. Age and order are those of the arrival (``arrived_ns``),
never of the times in the records: those are by the clock of a trainer.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from commwatch_agent.history.fair_shares import Owner, excesses
from commwatch_agent.history.opening import Transaction
from commwatch_agent.history.rows import COARSE_NS, COARSEN_AFTER_NS, rings, rollup_row, rollups
from commwatch_agent.history.soundness import numbers
from commwatch_agent.model.cells import Cell, CellKey

#: Rows of a slice, which takes some milliseconds; groups of rows that are counted in a slice.
_ROWS, _CHUNKS, _GROUPS = 500, 50, 1_000
#: Runs whose exit codes are kept, and incidents that are kept.
MOST_EXITS = MOST_INCIDENTS = 10_000
#: Part of their time by which the summaries of a job are shortened, at least so many ns, as long as it has too many.
_CUT, _LEAST_CUT_NS = 20, 60 * 10**9
#: Rows of a ring whose size is looked at.
_MEASURED = 8
#: Index of the chunks by ring, with their sizes.
_OF_RING = "chunk_of_ring"
#: Owner of what belongs to no ring: measurements of the node, and what a damaged row of a ring has left.
_NO_JOB = Owner(None, None)


class _Summaries(NamedTuple):
    """A table of summaries: the key of its rows, the ring of a row, and about how many bytes a row takes."""

    table: str
    key: str
    ring: str
    size: str


_SUMMARIES = (
    _Summaries("rollup", "rowid", "ring", "400 + LENGTH(durations) + LENGTH(bins)"),
    _Summaries("step", "ring, seq", "ring", "100 + LENGTH(groups)"),
    _Summaries("node_sample", "at_ns", "0", "30 + LENGTH(counters)"),
)


def slices(db: sqlite3.Connection, now_ns: int, raw_bytes: int, summary_bytes: int, keep_ns: int) -> Iterator[None]:
    """Apply the retention, and merge old rollups; yield after each slice.

    Args:
        now_ns: by the clock of arrivals.
        raw_bytes: most bytes of raw records.
        summary_bytes: most bytes of all else. One call deletes a part of what is too much, the oldest of the jobs that have too much.
        keep_ns: for how long anything is kept.

    Raises:
        sqlite3.Error: a slice failed, and has changed nothing.
    """
    before_ns = now_ns - keep_ns
    yield from _trim_raw(db, raw_bytes, before_ns)
    yield from _coarsen(db, now_ns - COARSEN_AFTER_NS)
    for each in _SUMMARIES:
        yield from _delete_old(db, each, before_ns)
    yield from _trim_summaries(db, now_ns, summary_bytes)
    with Transaction(db):
        _forget_rings(db, before_ns)
    yield


def _raw_bytes(db: sqlite3.Connection) -> float:
    """Return the size of the raw records."""
    size: float = db.execute("SELECT TOTAL(size) FROM chunk").fetchone()[0]
    return size


def _owners(db: sqlite3.Connection) -> dict[int, Owner]:
    """Return the user and the job of each ring."""
    rows = db.execute("SELECT ring.id, owner.uid, job FROM ring LEFT JOIN owner ON owner.ring = ring.id")
    return {ring: Owner(uid, job) for ring, uid, job in rows}


# -- summaries ----------------------------------------------------------------------------------


def _delete_old(db: sqlite3.Connection, of: _Summaries, before_ns: int) -> Iterator[None]:
    """Delete the rows that came before ``before_ns``."""
    old = f"SELECT {of.key} FROM {of.table} WHERE arrived_ns < {before_ns:d} LIMIT {_ROWS}"
    left = True
    while left:
        with Transaction(db):
            left = db.execute(f"DELETE FROM {of.table} WHERE ({of.key}) IN ({old})").rowcount > 0
        yield


def _trim_summaries(db: sqlite3.Connection, now_ns: int, summary_bytes: int) -> Iterator[None]:
    """If the summaries take too many bytes, delete the oldest of the jobs that have more than their share."""
    pages, free, size = (
        db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    taken = (pages - free) * size - _raw_bytes(db)
    if taken <= summary_bytes:
        return
    owners, sizes, oldest = _owners(db), dict[Owner, float](), dict[Owner, int]()
    for of in _SUMMARIES:
        yield from _measure(db, of, owners, sizes, oldest)
    # The sizes are about right; indexes, names and half-empty pages are counted with them.
    too_much = excesses(sizes, sum(sizes.values()) * summary_bytes / taken)
    cuts = {owner: oldest[owner] + max((now_ns - oldest[owner]) // _CUT, _LEAST_CUT_NS) for owner in too_much}
    for of in _SUMMARIES:
        yield from _cut(db, of, owners, cuts)


def _measure(
    db: sqlite3.Connection,
    of: _Summaries,
    owners: Mapping[int, Owner],
    sizes: dict[Owner, float],
    oldest: dict[Owner, int],
) -> Iterator[None]:
    """Add the sizes of the rows of each job, and the arrival of its oldest; yield after each slice."""
    rows: dict[int, int] = {}
    latest: dict[int, int] = {}
    at = -1, -1
    while found := _groups(db, of, at):
        for arrived_ns, ring, count in found:
            owner = owners.get(ring, _NO_JOB)
            oldest[owner] = min(oldest.get(owner, arrived_ns), arrived_ns)
            rows[ring], latest[ring] = rows.get(ring, 0) + count, arrived_ns
        at = found[-1][:2]
        yield
    some = f"SELECT {of.size} AS size FROM {of.table} WHERE arrived_ns = ? AND {of.ring} = ? LIMIT {_MEASURED}"
    for ring, count in rows.items():
        ((each,),) = db.execute(f"SELECT TOTAL(size) / MAX(1, COUNT(*)) FROM ({some})", (latest[ring], ring))
        owner = owners.get(ring, _NO_JOB)
        sizes[owner] = sizes.get(owner, 0.0) + count * each
        yield


def _groups(
    db: sqlite3.Connection, of: _Summaries, after: tuple[int, int], until_ns: int = 1 << 62
) -> list[tuple[int, int, int]]:
    """Return the next arrivals, each with a ring and the number of its rows that came then, in the order of the index."""
    found = db.execute(
        f"SELECT arrived_ns, {of.ring}, COUNT(*) FROM {of.table} INDEXED BY {of.table}_arrived"
        f" WHERE arrived_ns >= ?1 AND (arrived_ns, {of.ring}) > (?1, ?2) AND arrived_ns < ?3 GROUP BY 1, 2 ORDER BY 1, 2 LIMIT ?4",
        (*after, until_ns, _GROUPS),
    )
    return [(arrived_ns, ring, count) for arrived_ns, ring, count in map(numbers, found)]


def _cut(
    db: sqlite3.Connection, of: _Summaries, owners: Mapping[int, Owner], cuts: Mapping[Owner, int]
) -> Iterator[None]:
    """Delete the rows of jobs that came before their cut; yield after each slice."""
    until_ns, at = max(cuts.values(), default=0), (-1, -1)
    delete = f"DELETE FROM {of.table} WHERE arrived_ns = ? AND {of.ring} = ?"
    while found := _groups(db, of, at, until_ns):
        with Transaction(db):
            deleted = 0
            for arrived_ns, ring, _ in found:
                at = arrived_ns, ring
                if arrived_ns < cuts.get(owners.get(ring, _NO_JOB), 0):
                    deleted += db.execute(delete, at).rowcount
                if deleted >= _ROWS:
                    break
        yield


# -- raw records --------------------------------------------------------------------------------


def _trim_raw(db: sqlite3.Connection, raw_bytes: int, before_ns: int) -> Iterator[None]:
    """Delete the chunks that came before ``before_ns``, and those beyond ``raw_bytes``: the oldest of the jobs that have too much."""
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
    """Delete the oldest chunks that came before ``before_ns``; return whether there may be more."""
    oldest = db.execute(f"SELECT id, size, arrived_ns FROM chunk ORDER BY arrived_ns LIMIT {_CHUNKS}").fetchall()
    gone = [chunk for chunk, _, arrived_ns in map(numbers, oldest) if arrived_ns < before_ns]
    _delete_chunks(db, gone)
    return len(gone) == _CHUNKS


def _trim_largest(db: sqlite3.Connection, raw_bytes: int) -> int:
    """Delete chunks of the job that exceeds its share the most; return how many bytes.

    Its oldest chunks are those that this history got first. In a transaction, because other agents delete them too.
    """
    owners, sizes, of_owner = _owners(db), dict[Owner, float](), dict[Owner, list[int]]()
    for ring, size in map(
        numbers, db.execute(f"SELECT ring, SUM(size) FROM chunk INDEXED BY {_OF_RING} GROUP BY ring")
    ):
        owner = owners.get(ring, _NO_JOB)
        sizes[owner] = sizes.get(owner, 0) + size
        of_owner.setdefault(owner, []).append(ring)
    if sum(sizes.values()) <= raw_bytes:
        return 0
    too_much = excesses(sizes, raw_bytes)
    owner = max(too_much, key=too_much.__getitem__)
    its = f"SELECT chunk.id, size FROM chunk INDEXED BY {_OF_RING} WHERE ring IN (SELECT value FROM json_each(?))"
    gone, deleted = [], 0
    for chunk, size in map(
        numbers, db.execute(f"{its} ORDER BY chunk.id LIMIT {_CHUNKS}", (json.dumps(of_owner[owner]),))
    ):
        if deleted >= too_much[owner]:
            break
        gone.append(chunk)
        deleted += size
    _delete_chunks(db, gone)
    return deleted


def _delete_chunks(db: sqlite3.Connection, gone: Sequence[int]) -> None:
    for table, column in (("span", "chunk"), ("extent", "chunk"), ("chunk", "id")):
        db.execute(f"DELETE FROM {table} WHERE {column} IN (SELECT value FROM json_each(?))", (json.dumps(gone),))


# -- merging, rings -----------------------------------------------------------------------------


def _coarsen(db: sqlite3.Connection, before_ns: int) -> Iterator[None]:
    """Merge the rollups that came before ``before_ns``, those of one ring and coarse slot in a slice."""
    before_ns -= before_ns % COARSE_NS
    left = True
    while left:
        with Transaction(db):
            left = _merge_oldest(db, before_ns)
        yield


def _merge_oldest(db: sqlite3.Connection, before_ns: int) -> bool:
    """Merge the oldest fine rollups; return whether there were any. In a transaction, because other agents merge them too."""
    oldest = "SELECT slot_ns, ring FROM rollup WHERE coarse = 0 AND arrived_ns < ? ORDER BY arrived_ns LIMIT 1"
    fine = "coarse = 0 AND slot_ns >= ? AND slot_ns < ? AND ring = ?"
    found = db.execute(oldest, (before_ns,)).fetchone()
    if found is None:
        return False
    first_ns, ring = numbers(found)
    begin_ns = first_ns - first_ns % COARSE_NS
    these = begin_ns, begin_ns + COARSE_NS, ring
    # Later parts of the slot go with them: the clock of a trainer may bring it again and again.
    (arrived_ns,) = numbers(db.execute(f"SELECT IFNULL(MAX(arrived_ns), 0) FROM rollup WHERE {fine}", these).fetchone())
    merged: dict[CellKey, Cell] = {}
    for row in rollups(db, fine, these):
        merged.setdefault(row.key, Cell()).add(row.cell)
    if db.execute(f"DELETE FROM rollup WHERE {fine}", these).rowcount < 1:
        raise sqlite3.DatabaseError("database disk image is malformed: an index has a row that its table lacks")
    for key, cell in merged.items():
        db.execute(*rollup_row(begin_ns, 1, ring, key, cell, arrived_ns=arrived_ns))
    return True


def _forget_rings(db: sqlite3.Connection, before_ns: int) -> None:
    """Delete ended rings whose latest records came before ``before_ns``, and exit codes and incidents that did."""
    for ring in rings(db, "arrived_ns < ?", (before_ns,)):
        if not ring.running:
            for table, column in (("grp", "ring"), ("name", "ring"), ("owner", "ring"), ("ring", "id")):
                db.execute(f"DELETE FROM {table} WHERE {column} = ?", (ring.id,))
    for table in ("run_exit", "incident"):
        db.execute(f"DELETE FROM {table} WHERE arrived_ns < ?", (before_ns,))
    # Anyone who may write to the run directory can leave exit codes of any number of jobs there.
    latest = "SELECT job, run FROM run_exit ORDER BY arrived_ns DESC, at_ns DESC LIMIT -1 OFFSET ?"
    db.execute(f"DELETE FROM run_exit WHERE (job, run) IN ({latest})", (MOST_EXITS,))
    latest = "SELECT id, agent FROM incident ORDER BY arrived_ns DESC, last_ns DESC LIMIT -1 OFFSET ?"
    db.execute(f"DELETE FROM incident WHERE (id, agent) IN ({latest})", (MOST_INCIDENTS,))
