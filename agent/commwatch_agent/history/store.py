"""The history on disk: one SQLite file per host, raw records in compressed chunks, rollups with a sketch.

Raw records are kept by size, rollups and steps by time. The records of a ring and its cursor are written in one transaction,
so that after a crash the agent continues exactly where the history ends. Rollups follow when their 10 s are over; records from
number ``rolled_n`` on are in none yet, and are counted again from the raw records.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from commwatch.wire.events import RECORD_SIZE
from commwatch.wire.identity import boot_id
from commwatch_agent.history import arrival
from commwatch_agent.history.chunks import CHUNK_RECORDS, Damaged, OpenChunk, Statement, statements
from commwatch_agent.history.job_exit import Exit
from commwatch_agent.history.opening import DamagedHistory, OldHistory, StoreError, Transaction, connect
from commwatch_agent.history.retention import slices
from commwatch_agent.history.rows import (
    IncidentRow,
    RingRow,
    first_step_ns,
    latest_rolled,
    raw_since,
    rings,
    rollup_row,
    since_last_step,
    step_source,
)
from commwatch_agent.history.sharing import remove_empty, share, unshared
from commwatch_agent.history.soundness import is_malformed, mark, row_checksum, set_aside
from commwatch_agent.model.cells import Cell, CellKey, GroupInfo, StepRecord
from commwatch_agent.model.endings import Ending
from commwatch_agent.model.node_counters import CounterSample

log = logging.getLogger("commwatch")
#: Cache of SQLite, a quarter of its default: what is written now is nearly all that is read.
_CACHE_KIB = 512
#: Bytes of the write-ahead log after a checkpoint of all of it; usual are 4 MB.
_MOST_LOG_BYTES = 16 << 20
#: Most full chunks that wait for the next commit uncompressed; many at a time are searched for their ranges in less time.
_MOST_FULL = 32
#: Most time by which clocks differ that agree.
_SOON_NS = 10_000_000_000
_GONE = "the file was removed or replaced; put it back, or start the agent again"


def begin(path: Path, damaged: Damaged) -> Writer:
    """Return the writer of an agent that starts. Renames a history that is damaged or of an earlier version, starts a new one, and logs both names.

    A history that another agent still uses, although it was found damaged, keeps its name until an agent starts on it alone.

    Raises:
        StoreError: as ``connect``; or the history cannot be renamed, or is of an earlier version that still runs.
    """
    if mark(path).exists():
        with unshared(path) as alone:
            if not alone:
                log.warning(
                    "%s: an agent found it damaged; other agents use it, so it keeps its name until they end", path
                )
            elif mark(path).exists():
                _replace(path, "an agent found it damaged")
    try:
        return Writer(path, damaged)
    except DamagedHistory as error:
        _replace(path, _first_part(path, error))
    except OldHistory as error:
        with unshared(path) as alone:
            if not alone:
                raise StoreError(
                    f"{path}: an agent of an earlier version uses it; end that, or choose another place with --state"
                ) from None
            _replace(path, _first_part(path, error), "old")
    return Writer(path, damaged)


def _first_part(path: Path, error: StoreError) -> str:
    return str(error).removeprefix(f"{path}: ").partition(";")[0]


def _replace(path: Path, why: str, what: str = "damaged") -> None:
    try:
        aside = set_aside(path, what)
    except OSError as error:
        raise StoreError(f"{path}: {why}, and it cannot be renamed: {error.strerror}; move it away") from None
    log.error(
        "%s: %s: renamed to %s, and a new history started; records that are still in the rings are read again",
        path,
        why,
        aside,
    )


def _bytes_in(statement: Statement | None) -> int:
    """Return the length of the texts and records that a statement stores."""
    return 0 if statement is None else sum([len(value) for value in statement[1] if isinstance(value, (str, bytes))])


class Writer:
    """The only writer of an agent. It collects statements; ``commit`` writes all of them or none.

    Args:
        damaged: counts and logs damaged rows and chunks.
    """

    #: Most statements with records kept while writes fail, and most bytes of records in them; beyond it they are dropped and counted.
    MOST_PENDING, MOST_PENDING_BYTES = 20_000, 32 << 20
    #: Most names and states, and most bytes of them, for which there is room while writes fail: others wait in the files of the trainers.
    MOST_NAMES, MOST_NAMES_BYTES = 1 << 16, 16 << 20
    #: Most bytes in chunks that still take records.
    MOST_OPEN_BYTES = 24 << 20

    def __init__(self, path: Path, damaged: Damaged | None = None) -> None:
        self.path = path
        self._damaged = Damaged() if damaged is None else damaged
        self._shared = share(path)
        try:
            self._db = connect(path, True, self._damaged)
        except StoreError:
            self._let_go()
            remove_empty(path)
            raise
        # Rings fill within seconds, so one tick must not wait long for a lock on the history.
        self._db.execute("PRAGMA busy_timeout = 1000")
        self._db.execute(f"PRAGMA cache_size = {-_CACHE_KIB}")
        # A reader may have made the log grow; once it is empty again, it takes no more than this.
        self._db.execute(f"PRAGMA journal_size_limit = {_MOST_LOG_BYTES}")
        self._file = path.stat()
        self._boot_id, self._moment = boot_id(), arrival.stored(self._db)
        #: Names and states by what they are of, which are always kept; records and sums, which may be dropped.
        self._names: dict[tuple[object, ...], Statement] = {}
        self._pending: list[Statement] = []
        #: Bytes in names, of records in ``_pending``, and of records in ``_chunks``.
        self._names_bytes = self._pending_bytes = self._open_bytes = 0
        self._progress: dict[int, Statement] = {}
        self._chunks: dict[int, OpenChunk] = {}
        #: Chunks that take no more records, until the next commit.
        self._full: list[OpenChunk] = []
        self._dirty: set[int] = set()
        self._ended: set[int] = set()
        #: Why the last commit failed; and the number of dropped statements.
        self.trouble: str | None = None
        self.given_up = 0

    def arrive(self, monotonic_ns: int, wall_ns: int) -> None:
        """Note the time: what is stored from now on has come now."""
        self._moment = arrival.following(self._moment, self._boot_id, monotonic_ns, wall_ns)

    @property
    def arrived_ns(self) -> int:
        """The latest time that was noted, by the clock of arrivals; 0: none was."""
        return 0 if self._moment is None else self._moment.arrived_ns

    def ring(
        self,
        uid: str,
        identity: dict[str, Any],
        now_ns: int,
        owner: int | None = None,
        run_of: Callable[[], tuple[str, str]] | None = None,
        *,
        offset_ns: int | None = None,
    ) -> RingRow:
        """Return the row of a ring; insert it if it is new. Raises ``sqlite3.Error``.

        Args:
            now_ns: wall time; the clock of arrivals begins with it if there was no ``arrive``.
            owner: user who owns the ring; ``None``: not known.
            run_of: returns name and key of the run of a new ring; no other agent adds a ring meanwhile. Default: the job's name, no key.
            offset_ns: wall time minus the trainer's clock; by default as in the identity.
        """
        if self._moment is None:
            self.arrive(0, now_ns)
        offset = int(identity["wall_offset_ns"]) if offset_ns is None else offset_ns
        counts = int(identity["restart"]), int(identity["rank"]), int(identity["world_size"])
        began_ns = min(int(identity["started_ns"]) + offset, now_ns + _SOON_NS)  # no run begins in the future
        wanted = "+uid = ?", (uid,)  # + avoids the index, which may be damaged
        found = rings(self._db, *wanted)
        if not found:
            with Transaction(self._db):
                name, run = (str(identity["job"]), "") if run_of is None else run_of()
                checked_values = (uid, name, *counts, began_ns, offset, run, json.dumps(identity))
                # Replaces a damaged row, with a new id, so that data under the old id does not count for this ring.
                self._db.execute(
                    "INSERT OR REPLACE INTO ring (id, uid, job, restart, rank, world_size, started_ns, wall_offset_ns, run, identity,"
                    " seen_ns, crc, arrived_ns) SELECT COALESCE(MAX(id), 0) + 1, ?,?,?,?,?,?,?,?,?,?,?,? FROM ring",
                    (*checked_values, now_ns, row_checksum(checked_values), self.arrived_ns),
                )
            found = rings(self._db, *wanted)
        if len(found) != 1:
            raise sqlite3.DatabaseError(f"rows of {uid} are malformed")
        if owner is not None:
            self._note(("owner", found[0].id), ("INSERT OR REPLACE INTO owner VALUES (?, ?)", (found[0].id, owner)))
        return found[0]

    def rings_named(self, job: str) -> list[tuple[RingRow, int | None]]:
        """Return the rings of runs with a job's name, or with that and a number, each with the user who owns it."""
        found = rings(self._db, "job = ? OR substr(job, 1, length(?) + 1) = ? || '#'", (job, job, job))
        owners = dict(self._db.execute("SELECT ring, uid FROM owner"))
        return [(ring, owners.get(ring.id)) for ring in found]

    def name_run(self, run: str, name: str) -> bool:
        """Give a run another name with the next commit; return False if another agent has a run of that name. Raises ``sqlite3.Error``."""
        if any(ring.running for ring in rings(self._db, "job = ?", (name,))):
            return False
        for ring in rings(self._db, "run = ?", (run,)):
            counts = ring.restart, ring.rank, ring.world_size
            checked_values = (
                ring.uid,
                name,
                *counts,
                ring.started_ns,
                ring.wall_offset_ns,
                run,
                json.dumps(ring.identity),
            )
            self._note(
                ("named", ring.id),
                ("UPDATE ring SET job = ?, crc = ? WHERE id = ?", (name, row_checksum(checked_values), ring.id)),
            )
        return True

    def append(self, ring: RingRow, records: bytes, until_n: int) -> None:
        """Add raw records; the last one has number ``until_n - 1``."""
        for at in range(0, len(records), CHUNK_RECORDS * RECORD_SIZE):
            piece = records[at : at + CHUNK_RECORDS * RECORD_SIZE]
            chunk = self._chunks.setdefault(ring.id, OpenChunk(ring.id, ring.wall_offset_ns))
            chunk.append(piece, until_n - (len(records) - at - len(piece)) // RECORD_SIZE)
            self._dirty.add(ring.id)
            self._open_bytes += len(piece)
            if chunk.is_full or self._open_bytes > self.MOST_OPEN_BYTES:
                self._full.append(chunk)
                self._dirty.discard(ring.id)
                self._forget_chunk(ring.id)
                if len(self._full) >= _MOST_FULL:
                    self._queue([])

    def _forget_chunk(self, ring: int) -> None:
        chunk = self._chunks.pop(ring, None)
        self._open_bytes -= 0 if chunk is None else len(chunk.records)

    @property
    def takes_names(self) -> bool:
        """Whether there is room for more names: they are many while writes fail."""
        return len(self._names) < self.MOST_NAMES and self._names_bytes < self.MOST_NAMES_BYTES

    @property
    def is_crowded(self) -> bool:
        """Whether so much waits to be written that a commit should come first; not while writes fail."""
        waits = max(len(self._pending) / self.MOST_PENDING, self._pending_bytes / self.MOST_PENDING_BYTES)
        return self.trouble is None and (waits > 1 / 2 or not self.takes_names)

    def _note(self, key: tuple[object, ...], statement: Statement) -> None:
        """Keep a name or a state until it is written; it replaces an earlier one of the same thing."""
        self._names_bytes += _bytes_in(statement) - _bytes_in(self._names.get(key))
        self._names[key] = statement

    def progress(self, ring: int, next_n: int, lost: int, dropped: int, now_ns: int) -> None:
        """Store a ring's cursor and its lost and dropped records."""
        statement = "UPDATE ring SET next_n = ?, lost = ?, dropped = ?, seen_ns = ?, arrived_ns = ? WHERE id = ?"
        self._progress[ring] = (statement, (next_n, lost, dropped, now_ns, self.arrived_ns, ring))

    def end(self, ring: int, state: str, ending: Ending | None = None) -> None:
        """Store that a ring's trainer has ended; no records may follow."""
        self._ended.add(ring)
        ending_json = None if ending is None else json.dumps(ending)
        self._note(("end", ring), ("UPDATE ring SET state = ?, ending = ? WHERE id = ?", (state, ending_json, ring)))

    def exit(self, ended: Exit) -> None:
        """Store the exit code of a run's launcher."""
        row = ended.job, ended.run, ended.code, int(ended.at * 1e9)
        values = (*row, row_checksum(row), self.arrived_ns)
        self._note(("exit", *row[:2]), ("INSERT OR REPLACE INTO run_exit VALUES (?,?,?,?,?,?)", values))

    def incident(self, stored: IncidentRow) -> None:
        """Store an incident in its latest state."""
        values = (*stored, row_checksum(stored), self.arrived_ns)
        statement = "INSERT OR REPLACE INTO incident VALUES (?,?,?,?,?,?,?,?,?,?)"
        self._note(("incident", stored.id, stored.agent), (statement, values))

    def group(self, ring: int, small_id: int, group: GroupInfo) -> None:
        """Store a group's names and members."""
        ranks = json.dumps(group.ranks) if group.ranks is not None else None
        names = (group.group_id, group.label, group.name, group.description)
        row = (ring, small_id, *names, ranks, group.size, group.aligned, group.backend)
        statement = "INSERT OR REPLACE INTO grp VALUES (?,?,?,?,?,?,?,?,?,?,?)"
        self._note(("group", ring, small_id), (statement, (*row, row_checksum(row))))

    def name(self, ring: int, kind: str, code: int, name: str) -> None:
        """Store the name of a code in the ring; ``kind`` is as in ``History.names``."""
        row = (ring, kind, code, name)
        self._note((kind, ring, code), ("INSERT OR REPLACE INTO name VALUES (?,?,?,?,?)", (*row, row_checksum(row))))

    def rollups(self, ring: int, cells: Iterable[tuple[int, CellKey, Cell]], rolled_n: int) -> None:
        """Store closed cells, as (slot, key, cell); they contain the ring's records before number ``rolled_n``."""
        for slot_ns, key, cell in cells:
            self._pending.append(rollup_row(slot_ns, 0, ring, key, cell, arrived_ns=self.arrived_ns))
        self._pending.append(("UPDATE ring SET rolled_n = ? WHERE id = ?", (rolled_n, ring)))

    def steps(self, ring: RingRow, steps: Iterable[StepRecord], unavailable: str | None) -> None:
        """Store finished steps, or why there are none."""
        for step in steps:
            start, end = step.start_ns + ring.wall_offset_ns, step.end_ns + ring.wall_offset_ns
            what = (step.comm_ns, step.exposed_ns, json.dumps(step.groups), step.p2p_wait_ns, step.long)
            row = (ring.id, step.seq, start, end, *what)
            self._pending.append(
                (
                    "INSERT OR REPLACE INTO step VALUES (?,?,?,?,?,?,?,?,?,?,?)",
                    (*row, row_checksum(row), self.arrived_ns),
                )
            )
        self._pending.append(("UPDATE ring SET steps_unavailable = ? WHERE id = ?", (unavailable, ring.id)))

    def step_source(self, ring: int) -> str | None:
        """Return where the steps of a ring come from, as ``rows.step_source``."""
        return step_source(self._db, ring)

    def source_steps(self, ring: int, source: str, before: str | None) -> None:
        """Store where the steps of a ring come from; those that came from elsewhere ``before`` are deleted."""
        if before is not None:
            self._pending.append(("DELETE FROM step WHERE ring = ?", (ring,)))
        self.name(ring, "steps", 0, source)

    def node_sample(self, sample: CounterSample) -> None:
        """Store measurements of the node."""
        row = sample.at_ns, json.dumps(sample.counters)
        values = (*row, row_checksum(row), self.arrived_ns)
        self._pending.append(("INSERT OR REPLACE INTO node_sample VALUES (?,?,?,?)", values))

    def commit(self) -> bool:
        """Write all collected statements; return False and set ``trouble`` if a write fails or the file is gone."""
        # Pieces of growing chunks are not queued, so that a full disk keeps one version of each in memory.
        growing = self._queue([self._chunks[ring] for ring in self._dirty])
        waiting = [*self._names.values(), *self._pending, *growing, *self._progress.values()]
        try:
            if not self._is_there():  # SQLite would go on writing to the deleted file
                raise sqlite3.OperationalError(_GONE)
            if not waiting:
                self.trouble = None if self.trouble == f"{self.path}: {_GONE}" else self.trouble
                return True
            waiting += () if self._moment is None else (arrival.store(self._moment),)
            with Transaction(self._db):
                for statement, alike in groupby(waiting, key=itemgetter(0)):
                    self._db.executemany(statement, [values for _, values in alike])
        except sqlite3.Error as error:
            self._refused(error)
            if len(self._pending) > self.MOST_PENDING or self._pending_bytes > self.MOST_PENDING_BYTES:
                self.given_up += len(self._pending)
                self._pending.clear()
                self._pending_bytes = 0
            return False
        self.trouble = None
        self._names.clear()
        self._pending.clear()
        self._names_bytes = self._pending_bytes = 0
        self._progress.clear()
        for ring in self._dirty:
            if self._chunks[ring].stored():
                self._forget_chunk(ring)
        self._dirty.clear()
        for ring in self._ended:
            self._forget_chunk(ring)
        self._ended.clear()
        return True

    def _queue(self, growing: Sequence[OpenChunk]) -> Iterator[Statement]:
        """Queue the statements of full chunks; return those of ``growing`` ones."""
        rows = statements([*self._full, *growing], self.arrived_ns)
        queued = list(chain.from_iterable(rows[: len(self._full)]))
        self._pending += queued
        self._pending_bytes += sum(map(_bytes_in, queued))
        rows = rows[len(self._full) :]
        self._full.clear()
        return chain.from_iterable(rows)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(self.path.stat(), self._file)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # SQLite reports disk errors itself
            return True

    def tidy(self, now_ns: int, raw_bytes: int, summary_bytes: int, keep_ns: int) -> Iterator[None]:
        """Apply the retention, with the arguments of ``retention.slices``; yield after each slice of some milliseconds."""
        try:
            yield from slices(self._db, now_ns, raw_bytes, summary_bytes, keep_ns)
        except sqlite3.Error as error:
            self._refused(error)

    def _refused(self, error: sqlite3.Error) -> None:
        self.trouble = f"{self.path}: {error}"
        if is_malformed(error):
            self.trouble += "; start the agent again: it sets the file aside and begins a new history"
            with contextlib.suppress(OSError):
                mark(self.path).touch(mode=0o600)

    def raw_since(self, ring: RingRow) -> Iterator[tuple[bytes, int]]:
        """Yield runs of stored records that are in no rollup yet, oldest first, each with the number after its last."""
        return raw_since(self._db, ring, partial(self._damaged.unpacked, self.path))

    def since_last_step(self, ring: RingRow) -> bytes:
        """Return the records in rollups of the steps that are not stored yet."""
        return since_last_step(self._db, ring, partial(self._damaged.unpacked, self.path))

    def latest_rolled(self, ring: RingRow, number: int) -> bytes:
        """Return the latest ``number`` records of a ring that are in rollups."""
        return latest_rolled(self._db, ring, partial(self._damaged.unpacked, self.path), number)

    def first_step_ns(self, ring: int) -> int | None:
        """Return when the first stored step of a ring began, in Unix time (ns); ``None``: it has none."""
        return first_step_ns(self._db, ring)

    def close(self) -> None:
        """Commit, and close the history."""
        self.commit()
        self._db.close()
        self._let_go()

    def _let_go(self) -> None:
        if self._shared is not None:
            os.close(self._shared)
            self._shared = None
