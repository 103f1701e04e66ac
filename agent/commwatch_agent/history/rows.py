"""Rows of the history as values: rings, rollups, runs of raw records."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from commwatch.wire.events import MAX_PLAUSIBLE, RECORD, RECORD_SIZE, STEP_MARK, Record
from commwatch.wire.identity import process_began_ns
from commwatch.wire.numbers import HALF, NUMBERS
from commwatch.wire.ring import number_of
from commwatch_agent.history.chunks import Statement
from commwatch_agent.history.soundness import SOUND, row_checksum
from commwatch_agent.model import sketch
from commwatch_agent.model.cells import CELL_SUMS, SLOT_NS, Cell, CellKey
from commwatch_agent.model.endings import Ending
from commwatch_agent.model.runs import Run, common_id

#: Rollups older than an hour are merged to five minutes.
COARSE_NS = 300_000_000_000
COARSEN_AFTER_NS = 3600_000_000_000
#: What a size class has in addition if its operations came before the rank's first step.
_STARTUP = 128
#: SQL condition of rollups that are not of a ring's startup; of a ring without steps, all are not.
IN_STEPS = f"(size_log2 + 1 < {_STARTUP} OR NOT EXISTS (SELECT 1 FROM step WHERE step.ring = rollup.ring))"
#: Most records that are read again for steps that are not stored yet; and where the op is in a record.
_MOST_RECALLED, _OP_AT = 32_768, 4
#: Fields of an identity that two processes do not share; the first process of each container may have the same pid.
_PROCESS = "host", "boot_id", "pid_namespace", "pid", "started_ticks"
#: How much the clock may be set between the begins of a run's ranks.
_CLOCK_SET_NS = 60_000_000_000


class IncidentRow(NamedTuple):
    """One incident as it is stored; times in ns of Unix time."""

    id: str
    #: Run directory of the agent that it is of.
    agent: str
    #: Name and key of its run; both are empty for an incident of the node.
    job: str
    run: str
    #: ``pending``, ``open`` or ``ended``.
    state: str
    began_ns: int
    #: When its condition last held.
    last_ns: int
    #: All of it, as JSON.
    data: str


class RingRow(NamedTuple):
    """A ring in the history. ``started_ns`` and ``seen_ns`` are wall time."""

    id: int
    #: Path of the ring file; unique.
    uid: str
    #: Name of its run, as it is shown.
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
    #: ``running``, ``ended`` (the rank recorded its end) or ``gone`` (its process vanished).
    state: str
    steps_unavailable: str | None
    #: How it ended; ``None``: not ended, or not known.
    ending: Ending | None = None
    #: Key of its run (``runs.KnownRun``); empty: not known.
    run: str = ""

    @property
    def process(self) -> tuple[object, ...]:
        """Return a key shared by all rings of one process: the probe makes a ring each time it is installed."""
        return self.job, self.rank, self.restart, *map(self.identity.get, _PROCESS)

    @property
    def process_began_ns(self) -> int:
        """When its process began; wall time."""
        return self.started_ns + process_began_ns(self.identity) - int(self.identity.get("started_ns", 0))

    @property
    def running(self) -> bool:
        """Whether no end is stored and the ring file exists (after a reboot it does not)."""
        return self.state == "running" and Path(self.uid).exists()


class Rollup(NamedTuple):
    """One stored cell."""

    slot_ns: int
    #: Time that it covers from ``slot_ns`` on.
    length_ns: int
    ring: int
    key: CellKey
    cell: Cell


def newest_runs(found: Iterable[RingRow]) -> list[RingRow]:
    """Return the rings of the run of each name that came last; ``found`` and the result are in the order of ``rings``."""
    every = list(found)
    newest = {ring.job: ring.run for ring in every}
    return [ring for ring in every if ring.run == newest[ring.job]]


def as_run(found: Sequence[RingRow], shared: Mapping[tuple[int, int], str]) -> Run:
    """Return the run of some rings.

    Args:
        found: all of the run, oldest first.
        shared: the ids that ranks have found in the job's store, by ring, as ``History.names`` returns them.
    """
    latest, ranks = found[-1], {ring.rank for ring in found}
    sizes = latest.world_size, latest.identity.get("local_world_size")
    common = common_id(latest.run, [shared.get((ring.id, 0), "") for ring in found], *sizes, ranks)
    return Run(latest.job, common, latest.restart)


def latest_run(found: Iterable[RingRow]) -> dict[int, RingRow]:
    """Return by id the rings of the latest life of a run: of the latest process of each rank.

    Ranks of earlier lives are left out: they have another restart count or world size, or ended before the latest process began. That may
    have been a minute later by the clock, which can be set meanwhile.

    Args:
        found: rings of the run, oldest first.
    """
    oldest_first = list(found)
    if not oldest_first:
        return {}
    latest = oldest_first[-1]
    last = {ring.rank: ring for ring in oldest_first}
    processes = {
        ring.process
        for ring in last.values()
        if (ring.restart, ring.world_size) == (latest.restart, latest.world_size)
        and ring.seen_ns >= latest.process_began_ns - _CLOCK_SET_NS
    }
    return {ring.id: ring for ring in oldest_first if ring.process in processes}


def latest_of_ranks(found: Iterable[RingRow]) -> dict[tuple[str, int], RingRow]:
    """Return the latest ring of each rank by job and rank, without ranks that ended before the process of a running one began.

    Those are of an earlier run of that name.

    Args:
        found: oldest first.
    """
    latest = {(ring.job, ring.rank): ring for ring in found}
    running = {at for at, ring in latest.items() if ring.running}
    began: dict[str, int] = {}
    for at in running:
        began[at[0]] = max(began.get(at[0], 0), latest[at].process_began_ns)
    return {at: ring for at, ring in latest.items() if at in running or ring.seen_ns >= began.get(ring.job, 0)}


def rings(db: sqlite3.Connection, where: str, values: tuple[Any, ...]) -> list[RingRow]:
    """Return rings by an SQL condition, oldest first: boots in the order in which they came, and the rings of a boot by its own clock."""
    columns = ", ".join(RingRow._fields)
    rows = db.execute(f"SELECT {columns} FROM ring WHERE ({where}) AND {SOUND['ring']} ORDER BY id", values)
    found = [
        ring._replace(identity=json.loads(row[8]), ending=ring.ending and Ending(*json.loads(str(ring.ending))))
        for row in rows
        for ring in (RingRow(*row),)
    ]
    boots: dict[str, int] = {}
    for ring in found:
        boots.setdefault(str(ring.identity.get("boot_id")), ring.id)
    return sorted(
        found, key=lambda ring: (boots[str(ring.identity.get("boot_id"))], ring.identity["started_ns"], ring.rank)
    )


def first_step_ns(db: sqlite3.Connection, ring: int) -> int | None:
    """Return when the first stored step of a ring began, in Unix time (ns); ``None``: it has none."""
    row = db.execute(
        f"SELECT start_ns FROM step WHERE ring = ? AND seq >= ? AND {SOUND['step']} ORDER BY seq LIMIT 1",
        (ring, HALF if _goes_on_at_0(db, ring) else 0),
    )
    return next((int(begin) for (begin,) in row), None)


def step_source(db: sqlite3.Connection, ring: int) -> str | None:
    """Return where the stored steps of a ring come from (``core.views``); ``None``: it has none, or it is not known."""
    row = db.execute(f"SELECT name FROM name WHERE ring = ? AND kind = 'steps' AND {SOUND['name']}", (ring,))
    return next((str(source) for (source,) in row), None)


def _goes_on_at_0(db: sqlite3.Connection, ring: int) -> bool:
    """Return whether the numbers of a ring's stored steps go on at 0 after the greatest one."""
    ((first, last),) = db.execute(
        "SELECT (SELECT MIN(seq) FROM step WHERE ring = ?1), (SELECT MAX(seq) FROM step WHERE ring = ?1)", (ring,)
    )
    return first is not None and last - first >= HALF


def has_begun(first_step_ns: int | None, ring: RingRow, unrolled: Sequence[tuple[bytes, int]]) -> bool:
    """Return whether the records of a ring that are in no rollup yet begin after the first step mark, or in the first iteration.

    Args:
        first_step_ns: as from ``first_step_ns``.
        unrolled: these records, as from ``raw_since``; the first run is enough.
    """
    if first_step_ns is None or not unrolled:
        return first_step_ns is not None
    records, _ = unrolled[0]
    first = Record._make(RECORD.unpack_from(records))
    return first.end_ns + ring.wall_offset_ns > first_step_ns


def rollups(db: sqlite3.Connection, where: str, values: tuple[Any, ...]) -> Iterator[Rollup]:
    """Yield rollups by an SQL condition."""
    columns = ", ".join(CELL_SUMS)
    for slot, coarse, ring, group, op, size, durations, bins, *sums in db.execute(
        f"SELECT slot_ns, coarse, ring, small_id, op, size_log2 + 1, durations, bins, {columns} FROM rollup WHERE {where} AND {SOUND['rollup']}",
        values,
    ):
        cell = Cell()
        cell.durations, cell.bins = json.loads(durations), sketch.Packed(bins)
        for field, value in zip(CELL_SUMS, sums, strict=True):
            setattr(cell, field, value)
        key = CellKey(group, op, size % _STARTUP - 1, size >= _STARTUP)
        yield Rollup(slot, COARSE_NS if coarse else SLOT_NS, ring, key, cell)


def rollup_row(slot_ns: int, coarse: int, ring: int, key: CellKey, cell: Cell, *, arrived_ns: int) -> Statement:
    """Return the statement that stores a cell; ``arrived_ns``: when its latest part came, by the clock of arrivals."""
    values = (
        slot_ns,
        coarse,
        ring,
        key.group,
        key.op,
        key.size_log2 + _STARTUP * key.startup,
        *(_storable(getattr(cell, f)) for f in CELL_SUMS),
        json.dumps(cell.durations),
        sketch.encode(cell.bins),
    )
    return f"INSERT INTO rollup VALUES ({', '.join('?' * len(values))}, ?, ?)", (
        *values,
        row_checksum(values),
        arrived_ns,
    )


def _storable(total: float) -> float:
    """Return a sum that SQLite can store: its integers have 64 bits, but the sizes in a ring may be anything."""
    return total if total < MAX_PLAUSIBLE else float(total)


def raw_since(
    db: sqlite3.Connection, ring: RingRow, unpacked: Callable[[int, bytes], bytes | None]
) -> Iterator[tuple[bytes, int]]:
    """Yield runs of a ring's stored records that are in no rollup yet, oldest first, each with the number after its last."""
    wanted = f"SELECT id, until_n FROM chunk WHERE ring = ? AND until_n > ? AND {SOUND['chunk']} ORDER BY first_n"
    for chunk, until_n in db.execute(wanted, (ring.id, ring.rolled_n)).fetchall():
        for (data,) in db.execute("SELECT data FROM chunk WHERE id = ?", (chunk,)).fetchall():
            records = unpacked(chunk, data)
            if records is not None:
                yield records[_rolled_bytes(records, until_n, ring) :], until_n


def since_last_step(db: sqlite3.Connection, ring: RingRow, unpacked: Callable[[int, bytes], bytes | None]) -> bytes:
    """Return the records of a ring that are in rollups, from the mark of its latest stored step on: later steps are not stored yet.

    Without a stored step these are its latest records, if a mark is among them. About ``_MOST_RECALLED`` at most.
    """
    ((last,),) = db.execute(
        f"SELECT MAX(seq) FROM step WHERE ring = ? AND seq < ? AND {SOUND['step']}",
        (ring.id, HALF if _goes_on_at_0(db, ring.id) else NUMBERS),
    )
    found: list[bytes] = []
    marked = False
    with closing(_latest_chunks(db, ring, unpacked)) as chunks:
        for records, rolled in chunks:
            if sum(map(len, found)) >= _MOST_RECALLED * RECORD_SIZE:
                break
            ops = records[_OP_AT::RECORD_SIZE]
            at = -1 if last is None else _mark_at(records, ops, last)
            marked |= STEP_MARK in ops
            found.append(records[max(0, at) * RECORD_SIZE : rolled])
            if at >= 0:
                break
    return b"".join(reversed(found)) if marked else b""


def latest_rolled(
    db: sqlite3.Connection, ring: RingRow, unpacked: Callable[[int, bytes], bytes | None], number: int
) -> bytes:
    """Return the latest ``number`` records of a ring that are in rollups."""
    found, size = list[bytes](), 0
    with closing(_latest_chunks(db, ring, unpacked)) as chunks:
        for records, rolled in chunks:
            if size >= number * RECORD_SIZE:
                break
            found.append(records[:rolled])
            size += rolled
    return b"".join(reversed(found))[-number * RECORD_SIZE :]


def _latest_chunks(
    db: sqlite3.Connection, ring: RingRow, unpacked: Callable[[int, bytes], bytes | None]
) -> Generator[tuple[bytes, int], None, None]:
    """Yield the stored records of a ring, the latest chunk first, each with the length of those in rollups; up to one that is damaged."""
    wanted = f"SELECT id, data, until_n FROM chunk WHERE ring = ? AND {SOUND['chunk']} ORDER BY first_n DESC"
    with closing(db.execute(wanted, (ring.id,))) as chunks:
        for chunk, data, until_n in chunks:
            records = unpacked(chunk, data)
            if records is None:
                return
            yield records, _rolled_bytes(records, until_n, ring)


def _mark_at(records: bytes, ops: bytes, seq: int) -> int:
    """Return the place of the step mark with a number; -1: there is none."""
    at = ops.rfind(STEP_MARK)
    while at >= 0 and Record._make(RECORD.unpack_from(records, at * RECORD_SIZE)).seq != seq:
        at = ops.rfind(STEP_MARK, 0, at)
    return at


def _rolled_bytes(records: bytes, until_n: int, ring: RingRow) -> int:
    """Return the length of those of the records that are in rollups."""
    if until_n <= ring.rolled_n:
        return len(records)
    stamps = memoryview(records).cast("I")[:: RECORD_SIZE // 4].tolist()
    first = next((i for i, stamp in enumerate(stamps) if number_of(stamp, until_n) >= ring.rolled_n), len(stamps))
    return first * RECORD_SIZE
