"""Intake of records: finds the rings of the run directory, drains them, stores their cursors."""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from commwatch.collectors.node.process import is_exiting
from commwatch.collectors.probe.governor import COUNTERS
from commwatch.collectors.wire import ring
from commwatch.collectors.wire.identity import boot_id, validate_identity
from commwatch.collectors.wire.ring_reader import BadRing, Drained, RingReader
from commwatch.core.cells import MOST_TOGETHER
from commwatch.core.endings import Ending
from commwatch.core.units import counted
from commwatch.history.job_exit import Exits
from commwatch.history.rows import RingRow, has_begun
from commwatch.history.soundness import is_malformed
from commwatch.history.store import Writer
from commwatch.ingest.jobs import Aggregate
from commwatch.ingest.rank_totals import RankTotals

log = logging.getLogger("commwatch")
#: Most rings whose batches are counted together: the lock is held meanwhile.
_TOGETHER = 32
#: Least turns for a lap of a ring.
_LEAST_TURNS = 8
#: A ring is full with one such part of its slots.
_FULL = 8
#: Most rings that are read at a time; later ones wait until others have ended.
MOST_RINGS = 4096
#: Time between two heartbeats of a trainer; most time from a failed operation to the end of the rank that it causes.
_SIGN_NS, _SHORTLY_NS = 1_000_000_000, 30_000_000_000
#: Temporary errors when a ring is opened.
_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


def room_for_rings(files: int) -> int:
    """Return how many rings to read at a time, from the limit of open files; the others are reserved for clients of the agent."""
    return min(MOST_RINGS, max(files // 4, files - 512))


class _Source:
    """One ring and its totals; they are kept after its end, because other ranks' records still add waits to them."""

    def __init__(self, reader: RingReader, row: RingRow, totals: RankTotals) -> None:
        self.row, self.totals = row, totals
        #: ``None`` once everything has been read and the file is gone.
        self.reader: RingReader | None = reader
        self.next_n = row.next_n
        self.lost = row.lost
        #: Already in the store, or in its next commit: progress, number of closed cells, reason for no steps, source of exposed time.
        self.stored_progress: tuple[int, int, int] | None = None
        self.stored_cells = 0
        self.unavailable = row.steps_unavailable
        self.exposed_source: str | None = None
        #: The trainer has ended, and all its records are drained.
        self.final = False
        #: Monotonic time when its trainer was last found alive; ``None``: not by this agent.
        self.alive_ns: int | None = None
        #: Monotonic time before the last drain that left nothing behind: operations that end later may still be in the ring.
        self.read_ns = 0


class _Look(NamedTuple):
    """What one drain of a ring gave, the pid of its trainer as ``RingReader.owner`` returns it, whether that lives; whether there is more."""

    source: _Source
    reader: RingReader
    drained: Drained
    owner: int | None
    alive: bool
    more: bool


class Intake:
    """Moves records from the rings to aggregate and store. One thread calls ``tick``.

    Args:
        directory: holds the ``*.ring`` files.
        lock: guards the aggregate; held only for moments.
        handover: held while cells move to the history, which may take long on a slow disk: a reader that holds it finds each cell
            either in the totals in memory or in the history. Default: ``lock``.
        most_rings: read at a time; each keeps a file open.
        looks: records are read at every ``looks``-th tick, many at a time because that costs less; the state of the trainers at each one.
            Full rings, and those of trainers that have ended, are read at once.
        alive: called for each batch, so also during a long tick.
    """

    def __init__(
        self,
        directory: Path,
        aggregate: Aggregate,
        store: Writer,
        lock: threading.RLock,
        *,
        handover: threading.RLock | None = None,
        most_rings: int = MOST_RINGS,
        looks: int = 1,
        alive: Callable[[], object] = lambda: None,
    ) -> None:
        self._handover, self._alive = handover or lock, alive
        self._directory, self._most_rings, self._looks, self._ticks = directory, most_rings, looks, 0
        self._aggregate, self._store, self._lock = aggregate, store, lock
        self._boot_id = boot_id()
        self._exits = Exits(directory.parent)
        self._sources: dict[str, _Source] = {}
        self._refused: set[tuple[str, int]] = set()
        #: Number of ring files that could not be read, for ``/metrics``.
        self.bad_rings = 0
        #: Why some ring files are not read yet; ``None``: all are.
        self.waiting: str | None = None
        self.lost = 0
        self.read = 0

    def tick(self, now_ns: int, wall_ns: int) -> int:
        """Find new rings, drain all, commit to the history; return the number of records read."""
        self._discover(wall_ns)
        self._ticks += 1
        before, turn = self.read, list(self._sources.values())
        for ended in self._exits.take():
            self._store.exit(ended)
        # At most a lap of a ring of default size: with a backlog, the agent must still write to the history.
        turns = max(_LEAST_TURNS, min(len(turn), _TOGETHER))
        for _ in range(turns):
            turn = self._take_turn(turn, MOST_TOGETHER // turns, now_ns)
        # Those without a reader have ended, and are in the history.
        open_ones = [source for source in self._sources.values() if source.reader is not None]
        with self._handover:
            with self._lock:
                for source in open_ones:
                    if source.final:
                        source.totals.finish()
                    else:
                        offset_ns = source.totals.offset_ns  # not the wall clock, which may be set
                        source.totals.tick(now_ns + offset_ns, source.read_ns + offset_ns)
                    self._store_changes(source, wall_ns)
            given_up = self._store.given_up
            # Stored, or dropped by the store: in both cases the cells are no longer needed in memory.
            taken = self._store.commit() or self._store.given_up != given_up
            if self._store.trouble is None:
                self._exits.remove()
            with self._lock:
                for source in open_ones if taken else ():
                    source.totals.take_closed(source.stored_cells)
                    source.stored_cells = 0
                self._aggregate.retire(now_ns)
        self._remove_finished()
        return self.read - before

    def has_rings(self) -> bool:
        """Return whether there is a ring whose trainer runs, or whose records are not all in the history; any thread may call this."""
        return any(source.reader is not None for source in list(self._sources.values()))

    # -- discovery ----------------------------------------------------------------------------

    def _discover(self, wall_ns: int) -> None:
        try:
            entries = [
                entry
                for entry in os.scandir(self._directory)
                if entry.name.endswith(".ring") and not entry.name.startswith(".")
            ]
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            self.waiting = f"cannot look for rings: {error}"
            return
        # Forget refused files that no longer exist.
        self._refused &= {(entry.name, entry.inode()) for entry in entries}
        fresh = [
            entry
            for entry in sorted(entries, key=lambda entry: entry.name)
            if entry.name not in self._sources and (entry.name, entry.inode()) not in self._refused
        ]
        room = max(0, self._most_rings - sum(source.reader is not None for source in self._sources.values()))
        left = len(fresh) - room
        self.waiting = (
            f"{counted(left, 'ring')} wait{'s' * (left == 1)} until others end: at most {self._most_rings} are read at a time"
            if left > 0
            else None
        )
        for entry in fresh[:room]:
            if not self._open(entry, wall_ns):
                break

    def _open(self, entry: os.DirEntry[str], wall_ns: int) -> bool:
        """Open a ring, or refuse a damaged one for good; return False if no ring can be opened now, to retry at the next tick."""
        with contextlib.ExitStack() as undo:
            try:
                reader = RingReader(Path(entry.path))
                undo.callback(reader.close)
                if wrong := validate_identity(reader.identity):
                    raise BadRing(f"{entry.name}: damaged identity ({wrong})")
                # Loads numpy, which takes time, before the rank is visible.
                importlib.import_module("commwatch.ingest.batches")
                row = self._store.ring(str(reader.path.absolute()), reader.identity, wall_ns)
                counted = list(self._store.raw_since(row))
                unfinished = self._store.since_last_step(row)
                begun = has_begun(self._store.first_step_ns(row.id), row, counted)
                reader.next_n = row.next_n
                with self._lock:
                    totals = self._aggregate.open(row.uid, reader.identity)
                    totals.owner_uid = reader.owner_uid
            except FileNotFoundError:
                return True
            except sqlite3.Error as error:  # such as a full disk: the ring keeps its records meanwhile
                self._store.trouble = f"{self._store.path}: {error}"
                if not is_malformed(error):
                    return False
                # Perhaps only the rows of this ring are damaged. The next commit of other rings clears ``trouble``.
                self.waiting = f"cannot read ring {entry.name} yet: {self._store.trouble}"
                return True
            except (BadRing, OSError, KeyError, TypeError, ValueError) as error:
                if getattr(error, "errno", None) in _PASSING:
                    self.waiting = f"cannot read ring {entry.name} yet: {error}"
                    return False
                self._refused.add((entry.name, entry.inode()))
                self.bad_rings += 1
                log.warning("cannot read ring %s: %s", entry.name, error)
                return True
            undo.pop_all()
        source = self._sources[entry.name] = _Source(reader, row, totals)
        totals.lost, totals.marked = row.lost, begun
        self._learn(source, reader)
        if unfinished:
            with self._lock:
                totals.recall(unfinished)
        for records, until_n in counted:
            with self._lock:
                totals.ingest(records, until_n)
        return True

    def _learn(self, source: _Source, reader: RingReader) -> None:
        entries = reader.names()
        if not entries:
            return
        totals, row = source.totals, source.row
        names = {("dtype", k): v for k, v in totals.dtypes.items()} | {("op", k): v for k, v in totals.ops.items()}
        with self._lock:
            fresh = totals.learn(entries)
        for small_id, group in fresh:
            self._store.group(row.id, small_id, group)
        for kind, known in (("dtype", totals.dtypes), ("op", totals.ops)):
            for code, name in known.items():
                if names.get((kind, code)) != name:
                    self._store.name(row.id, kind, code, name)

    # -- records ------------------------------------------------------------------------------

    def _take_turn(self, sources: list[_Source], most: int, now_ns: int) -> list[_Source]:
        """Drain at most ``most`` records of each ring; return the rings that have more.

        Of many rings these are fewer than a join keeps pending, so that the collectives of a backlog are still joined.
        """
        more: list[_Source] = []
        for at in range(0, len(sources), _TOGETHER):
            together = sources[at : at + _TOGETHER]
            looks = [look for source in together if (look := self._drain(source, most, now_ns)) is not None]
            self._count([look for look in looks if look.drained.records])
            for look in looks:
                self._note_state(look, now_ns)
            more += [look.source for look in looks if look.more]
        return more

    def _drain(self, source: _Source, most: int, now_ns: int) -> _Look | None:
        """Drain at most ``most`` records of a ring; ``None``: it is finished."""
        self._alive()
        reader = source.reader
        if reader is None:
            return None
        owner = reader.owner()
        alive = owner is not None and reader.identity.get("boot_id") == self._boot_id
        counters = reader.counters()
        runs = alive and not counters[ring.CLOSED]
        # A ring that is new to this agent is read at once: its old records belong to the slots of their own time.
        if (
            runs
            and source.alive_ns is not None
            and self._ticks % self._looks
            and counters[ring.CURSOR] - reader.next_n < reader.slots // _FULL
        ):
            return _Look(source, reader, Drained(b"", 0, 0), owner, alive, False)
        drained = reader.drain(final=not alive, limit=most)
        source.lost += drained.lost
        self.lost += drained.lost
        self.read += drained.read
        # After a loss, too: the ring was full.
        more = drained.read >= most or drained.lost > 0
        source.next_n, source.final = reader.next_n, not (alive or more)
        source.read_ns = source.read_ns if more else now_ns
        return _Look(source, reader, drained, owner, alive, more)

    def _count(self, looks: list[_Look]) -> None:
        """Count the records of some rings, and store them."""
        if not looks:
            return
        from commwatch.ingest.batches import ingest  # brings in numpy, which an agent without trainers does not need
        from commwatch.ingest.columns import Batch

        for look in looks:
            self._learn(look.source, look.reader)
        with self._lock:
            ingest([Batch(look.source.totals, look.drained.records, look.source.next_n) for look in looks])
        for look in looks:
            self._store.append(look.source.row, look.drained.records, look.source.next_n)

    def _note_state(self, look: _Look, now_ns: int) -> None:
        """Read what else a ring tells about its trainer."""
        source, reader, owner, alive = look.source, look.reader, look.owner, look.alive
        totals = source.totals
        with self._lock:
            totals.lost = source.lost
            in_flight, counters = reader.in_flight(), reader.counters()
            if not alive and totals.alive and not counters[ring.CLOSED]:
                for record in in_flight:
                    totals.note_failure(record._replace(end_ns=max(record.launch_ns, counters[ring.HEARTBEAT])))
            totals.in_flight = in_flight if alive else []
            totals.heartbeat_ns = counters[ring.HEARTBEAT]
            overflow = counters[ring.IN_FLIGHT_OVERFLOW]
            if overflow != totals.overflow:
                totals.overflow, totals.overflow_ns = overflow, now_ns
            totals.dropped, totals.probe_ns = counters[ring.DROPPED], counters[ring.PROBE_NS]
            totals.mode, totals.mode_since_ns = min(counters[ring.MODE], COUNTERS), counters[ring.MODE_SINCE_NS]
            totals.closed_properly = counters[ring.CLOSED] > 0
            if totals.alive and (totals.closed_properly or not alive):
                totals.gone_ns = now_ns
            totals.alive = alive and not totals.closed_properly
            # A killed process loses its connections before its lock, so that other ranks raise meanwhile.
            source.alive_ns = now_ns if alive and not (owner and is_exiting(owner)) else source.alive_ns
            totals.ending = None
            if not totals.alive:
                self._learn(source, reader)  # the last names, such as its exception
                totals.ending = _ending(source, counters[ring.CLOSED])
            totals.pid = (owner or None) if totals.alive else None

    def _store_changes(self, source: _Source, wall_ns: int) -> None:
        """Hand all changes since the last tick to the store."""
        totals, row = source.totals, source.row
        fresh = totals.closed[source.stored_cells :]
        if fresh:
            self._store.rollups(row.id, fresh, source.next_n if totals.live_from is None else totals.live_from)
            source.stored_cells = len(totals.closed)
        steps, unavailable = totals.steps.take(), totals.steps.unavailable
        if steps or unavailable != source.unavailable:
            source.unavailable = unavailable
            self._store.steps(row, steps, unavailable)
        if totals.steps.exposed_source != source.exposed_source:
            source.exposed_source = totals.steps.exposed_source
            self._store.name(row.id, "exposed", 0, source.exposed_source or "")
        progress = (source.next_n, source.lost, totals.dropped)
        if progress != source.stored_progress:
            source.stored_progress = progress
            self._store.progress(row.id, *progress, wall_ns)

    def _remove_finished(self) -> None:
        """Remove the ring files of ended trainers whose records are all in the history."""
        kept = set(self._aggregate.rank_totals())
        for name, source in list(self._sources.items()):
            if source.reader is None:
                if source.totals not in kept:
                    del self._sources[name]
            elif source.final and self._store.trouble is None:
                state = "ended" if source.totals.closed_properly else "gone"
                self._store.end(source.row.id, state, source.totals.ending)
                if self._store.commit():
                    self._remove(name, source.reader)
                    source.reader = None

    def _remove(self, name: str, reader: RingReader) -> None:
        self._refused.add((name, reader.inode))
        reader.close()
        for path in (reader.path, reader.path.with_suffix(".names")):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("cannot remove finished ring: %s", error)


def _ending(source: _Source, closed_ns: int) -> Ending:
    """Return the ending of a rank that no longer runs.

    Args:
        closed_ns: when the rank recorded its end, on its clock; 0: it did not.
    """
    totals = source.totals
    if closed_ns:
        latest = totals.failures[-1] if totals.failures else None
        in_operation = latest is not None and closed_ns - latest.end_ns < _SHORTLY_NS
        return Ending(closed_ns + totals.offset_ns, closed_ns + totals.offset_ns, True, totals.raised, in_operation)
    # An agent that started later has only the last heartbeat, which comes once a second.
    late = source.alive_ns is None or totals.gone_ns is None
    until_ns = totals.heartbeat_ns + _SIGN_NS if late else totals.gone_ns or 0
    since_ns = min(until_ns, max(totals.heartbeat_ns, source.alive_ns or 0))
    return Ending(since_ns + totals.offset_ns, until_ns + totals.offset_ns, clean=False)
