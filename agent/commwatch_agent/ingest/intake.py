"""Intake of records: finds the rings of the run directory, drains them, stores their cursors."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path

from commwatch.wire import crossing, ring
from commwatch.wire.identity import boot_id, validate_identity
from commwatch.wire.modes import COUNTERS
from commwatch.wire.ring_reader import BadRing, Drained, RingReader
from commwatch_agent.history.job_exit import Exits
from commwatch_agent.history.rows import has_begun
from commwatch_agent.history.soundness import is_malformed
from commwatch_agent.history.store import Writer
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.ingest.rings import runs
from commwatch_agent.ingest.rings.clock import offset_of
from commwatch_agent.ingest.rings.finding import PASSING, Finder
from commwatch_agent.ingest.rings.process_ends import ProcessEnds
from commwatch_agent.ingest.rings.source import Look, Source, ending
from commwatch_agent.ingest.rings.turns import Turns
from commwatch_agent.ingest.why_late import waited_for_core
from commwatch_agent.model.cells import MOST_TOGETHER
from commwatch_agent.model.views import ITERATIONS
from commwatch_collectors.node.process import is_exiting

log = logging.getLogger("commwatch")
#: Most rings whose batches are counted together: the lock is held meanwhile.
_TOGETHER = 32
#: Least turns for a lap of a ring.
_LEAST_TURNS = 8
#: A ring is full with one such part of its slots.
_FULL = 8
#: Most rings that are read at a time; later ones wait until others have ended.
MOST_RINGS = 2048
#: Seconds of a tick for new rings, and for records: then what has been read is written to the history.
_OPENING_S, _READING_S = 0.5, 1.0
#: Steps of a rank that are handed to the history before the end of a tick.
_MOST_STEPS = 512
#: The file of a rank that has ended is kept at most so long for what is concluded from that.
_CONCLUDED_NS = 5_000_000_000
#: So many of a ring's latest records, in the history, show the places of its rank's work, as many as ``Rhythm`` keeps.
PLACES = 2048
#: Most pieces of a ring's names that are read in one turn.
_PIECES = 4


def room_for_rings(files: int) -> int:
    """Return how many rings to read at a time, from the limit of open files; the others are reserved for clients of the agent."""
    return min(MOST_RINGS, max(files // 4, files - 512))


class Intake:
    """Moves records from the rings to aggregate and store. One thread calls ``tick``.

    Args:
        directory: holds the ``*.ring`` files.
        lock: guards the aggregate; held only for moments.
        handover: held while cells move to the history, which may take long on a slow disk: a reader that holds it finds each cell
            either in the totals in memory or in the history. Default: ``lock``.
        most_rings: read at a time; each keeps a file open.
        now_s: clock of the time that the owners of rings share; default: the CPU time of this thread, which other work does not change.
        looks: records are read at every ``looks``-th tick, many at a time because that costs less; the state of the trainers at each one.
            Full rings, and those of trainers that have ended, are read at once.
        renames: returns new names of runs by the old ones, once each.
        alive: called for each batch, so also during a long tick.
        ends: knows when trainers end; another thread calls its ``tick``. ``None``: their ends are seen at a tick of this one.
        concluded: returns whether what is wrong has been looked at since a monotonic time in ns, and is in the history: the file of a rank that
            has ended is kept until then, so that a launcher that waits for it finds what was concluded.
    """

    def __init__(
        self,
        directory: Path,
        aggregate: JobTable,
        store: Writer,
        lock: threading.RLock,
        *,
        handover: threading.RLock | None = None,
        most_rings: int = MOST_RINGS,
        looks: int = 1,
        renames: Callable[[], Mapping[str, str]] = dict,
        alive: Callable[[], object] = lambda: None,
        ends: ProcessEnds | None = None,
        concluded: Callable[[int], bool] = lambda since_ns: True,
        now_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self._handover, self._alive, self._concluded = handover or lock, alive, concluded
        self._ends = ends
        self._looks, self._ticks, self._renames = looks, 0, renames
        self._aggregate, self._store, self._lock = aggregate, store, lock
        self._boot_id = boot_id()
        self._exits = Exits(directory.parent)
        self._sources: dict[str, Source] = {}
        self._directory, self._finder = directory, Finder(directory, most_rings)
        self._opening, self._reading = Turns(_OPENING_S, now_s), Turns(_READING_S, now_s)
        self.lost = 0
        self.read = 0

    @property
    def bad_rings(self) -> int:
        """Number of ring files that could not be read, for ``/metrics``."""
        return self._finder.bad

    @property
    def waiting(self) -> str | None:
        """Why some ring files are not read yet; ``None``: all are."""
        return self._finder.waiting

    def tick(self, now_ns: int, wall_ns: int) -> int:
        """Find new rings, drain all, commit to the history; return the number of records read."""
        self._store.arrive(now_ns, wall_ns)
        self._rename()
        self._discover(now_ns, wall_ns)
        self._ticks += 1
        before = self.read
        for ended in self._exits.take(self._owners_of):
            self._store.exit(ended)
        # Those without a reader have ended, and are in the history.
        open_ones = [source for source in self._sources.values() if source.reader is not None]
        self._read(open_ones, now_ns)
        with self._handover:
            with self._lock:
                for source in open_ones:
                    if source.final:
                        source.totals.finish()
                    elif source.is_recalled:
                        offset_ns = source.totals.offset_ns  # not the wall clock, which may be set
                        source.totals.tick(now_ns + offset_ns, source.read_ns + offset_ns)
                    self._store_changes(source, source.seen_ns(now_ns, wall_ns, self._boot_id))
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
        self._remove_finished(now_ns)
        return self.read - before

    def _rename(self) -> None:
        """Give runs the names that they have on other nodes."""
        for old, new in self._renames().items():
            run = next(
                (source.row.run for source in self._sources.values() if source.row.job == old and source.totals.alive),
                "",
            )
            try:
                if not run or not self._store.name_run(run, new):
                    continue
            except sqlite3.Error as error:
                self._store.trouble = f"{self._store.path}: {error}"
                continue
            for source in self._sources.values():
                if source.row.run == run:
                    source.row = source.row._replace(job=new)
            with self._handover, self._lock:
                self._aggregate.name_job(old, new)

    def _owners_of(self, job: str) -> set[int]:
        return {source.owner for source in self._sources.values() if source.origin.job == job}

    def has_rings(self) -> bool:
        """Return whether there is a ring whose trainer runs, or whose records are not all in the history; any thread may call this."""
        return any(source.reader is not None for source in list(self._sources.values()))

    # -- discovery ----------------------------------------------------------------------------

    def _discover(self, now_ns: int, wall_ns: int) -> None:
        sources = self._sources
        found = self._finder.find(
            sources.keys(), lambda: [source.owner for source in sources.values() if source.reader is not None]
        )
        stopped = False

        def open_one(entries: Sequence[os.DirEntry[str]]) -> Sequence[os.DirEntry[str]]:
            nonlocal stopped
            self._alive()
            stopped = stopped or not self._open(entries[0], now_ns, wall_ns)
            return ()

        self._opening.take(found, lambda entries: () if stopped else open_one(entries))

    def _open(self, entry: os.DirEntry[str], now_ns: int, wall_ns: int) -> bool:
        """Open a ring, or refuse a damaged one for good; return False if no ring can be opened now, to retry at the next tick."""
        with contextlib.ExitStack() as undo:
            try:
                reader = RingReader(self._directory / entry.name)
                undo.callback(reader.close)
                if wrong := validate_identity(reader.identity):
                    raise BadRing(f"{entry.name}: damaged identity ({wrong})")
                # Loads numpy, which takes time, before the rank is visible.
                importlib.import_module("commwatch_agent.ingest.batches")
                origin = runs.origin_in(reader, self._boot_id)
                row = self._store.ring(
                    str(reader.path.absolute()),
                    reader.identity,
                    wall_ns,
                    reader.uid,
                    lambda: runs.choose(origin, self._sources.values(), lambda: self._store.rings_named(origin.job)),
                    offset_ns=offset_of(reader.identity, reader.counters(), now_ns, wall_ns, self._boot_id),
                )
                reader.next_n = row.next_n
                with self._lock:
                    totals = self._aggregate.open(row.uid, reader.identity, reader.uid, name=row.job, run=row.run)
                    totals.offset_ns = row.wall_offset_ns
            except FileNotFoundError:
                self._finder.opened(entry)
                return True
            except sqlite3.Error as error:  # such as a full disk: the ring keeps its records meanwhile
                return self._note_trouble(entry.name, error)
            except (BadRing, OSError, KeyError, TypeError, ValueError) as error:
                if getattr(error, "errno", None) in PASSING:
                    self._finder.waiting = f"cannot read ring {entry.name} yet: {error}"
                    return False
                self._finder.refuse(entry, error)
                return True
            undo.pop_all()
        self._finder.opened(entry)
        totals.lost = row.lost
        self._sources[entry.name] = Source(reader, row, totals, origin)
        return True

    def _note_trouble(self, name: str, error: sqlite3.Error) -> bool:
        """Note that the history of a ring cannot be read; return whether that may be so only for this ring."""
        self._store.trouble = f"{self._store.path}: {error}"
        if not is_malformed(error):
            return False
        # Perhaps only the rows of this ring are damaged. The next commit of other rings clears ``trouble``.
        self._finder.waiting = f"cannot read ring {name} yet: {self._store.trouble}"
        return True

    def _recall(self, source: Source) -> bool:
        """Count the stored records that are in no sums yet; return False if the history cannot be read now."""
        row, totals = source.row, source.totals
        try:
            stored = self._store.raw_since(row)
            first = list(islice(stored, 1))
            unfinished, begun = self._store.since_last_step(row), self._store.first_step_ns(row.id)
            source.step_source = self._store.step_source(row.id)
            totals.begun = has_begun(begun, row, first)
            totals.marked = totals.begun and source.step_source != ITERATIONS
            latest = self._store.latest_rolled(row, PLACES)
            source.is_recalled = True
            if unfinished or first or latest:
                self._recount(totals, unfinished, latest, chain(first, stored))
        except sqlite3.Error as error:
            self._note_trouble(source.reader.path.name if source.reader else row.uid, error)
        return source.is_recalled

    def _recount(
        self, totals: RankTotals, unfinished: bytes, latest: bytes, stored: Iterable[tuple[bytes, int]]
    ) -> None:
        """Count stored records; take up the step that the ``unfinished`` ones before them began, and the rhythm of the ``latest``."""
        # Brings in numpy, as in ``_count``.
        from commwatch_agent.ingest.batches import ingest_records, recall_rhythm, recall_steps

        with self._lock:
            if unfinished:
                recall_steps(totals, unfinished)
            if latest:
                recall_rhythm(totals, latest)
        for records, until_n in stored:
            self._alive()
            with self._lock:
                ingest_records(totals, records, until_n)

    def _learn(self, source: Source, reader: RingReader) -> None:
        """Read the next names of a ring; ``reader.more_names`` is whether others follow them."""
        if not self._store.takes_names:
            reader.more_names = False
            return
        for _ in range(_PIECES):
            entries = reader.next_names(self._finder.rings)
            if entries:
                self._alive()
                with self._lock:
                    learned = source.totals.learn(entries)
                for small_id, group in learned.groups:
                    self._store.group(source.row.id, small_id, group)
                for kind, code, name in learned.codes:
                    self._store.name(source.row.id, kind, code, name)
            if not reader.more_names:
                break

    # -- records ------------------------------------------------------------------------------

    def _read(self, sources: Sequence[Source], now_ns: int) -> None:
        """Read the rings; the owners share the time, and the rings of an owner that came last in the tick before come first."""
        wanted: dict[int, list[Source]] = {}
        for source in sorted(sources, key=lambda source: source.turn):
            wanted.setdefault(source.owner, []).append(source)
        # At most a lap of a ring of default size: with a backlog, the agent must still write to the history. Of many rings these are
        # fewer records at a time than a join keeps pending, so that the collectives of a backlog are still joined.
        turns = max(_LEAST_TURNS, min(max(map(len, wanted.values()), default=0), _TOGETHER))
        self._reading.take(
            wanted,
            lambda together: self._take_turn(together, MOST_TOGETHER // turns, now_ns),
            passes=turns,
            together=_TOGETHER,
            is_enough=lambda: self._store.is_crowded,
        )

    def _take_turn(self, together: Sequence[Source], most: int, now_ns: int) -> list[Source]:
        """Drain at most ``most`` records of each ring; return the rings that have more."""
        looks = [look for source in together if (look := self._drain(source, most, now_ns)) is not None]
        self._count([look for look in looks if look.drained.records])
        for look in looks:
            self._note_state(look, now_ns)
            if look.source.totals.steps.fresh > _MOST_STEPS:
                self._store_steps(look.source)
        more = {look.source for look in looks if look.more}
        return [source for source in together if source in more or (source.reader and source.reader.more_names)]

    def _has_names(self, source: Source, reader: RingReader) -> bool:
        """Return whether the names before a ring's next records are known, and what the history has of it is counted."""
        if reader.more_names or not source.is_recalled or reader.may_have_names(_PIECES):
            self._learn(source, reader)
        return not reader.more_names and (source.is_recalled or self._recall(source))

    def _drain(self, source: Source, most: int, now_ns: int) -> Look | None:
        """Drain at most ``most`` records of a ring; ``None``: it is finished, or names that come before the records are to be read first."""
        self._alive()
        source.turn = self._ticks
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
            return Look(source, reader, Drained(b"", 0, 0), owner, alive, False)
        if not self._has_names(source, reader):
            return None
        drained = reader.drain(final=not alive, limit=most)
        source.lost += drained.lost
        self.lost += drained.lost
        self.read += drained.read
        # After a loss, too: the ring was full.
        more = drained.read >= most or drained.lost > 0
        source.next_n, source.final = reader.next_n, not (alive or more)
        source.read_ns = source.read_ns if more else now_ns
        return Look(source, reader, drained, owner, alive, more)

    def _count(self, looks: list[Look]) -> None:
        """Count the records of some rings, and store them."""
        if not looks:
            return
        # Brings in numpy, which an agent without trainers does not need.
        from commwatch_agent.ingest.batches import Batch, ingest

        for look in looks:
            self._learn(look.source, look.reader)
        with self._lock:
            ingest([Batch(look.source.totals, look.drained.records, look.source.next_n) for look in looks])
        for look in looks:
            self._store.append(look.source.row, look.drained.records, look.source.next_n)

    def _note_state(self, look: Look, now_ns: int) -> None:
        """Read what else a ring tells about its trainer."""
        source, reader, owner, alive = look.source, look.reader, look.owner, look.alive
        totals, in_flight = source.totals, reader.in_flight()
        if not all(map(totals.has_names_of, in_flight)):  # written since the latest record
            self._learn(source, reader)
        with self._lock:
            totals.lost = source.lost
            counters = reader.counters()
            if not alive and totals.alive and not counters[ring.CLOSED]:
                for record in in_flight:
                    totals.note_failure(record._replace(end_ns=max(record.launch_ns, counters[ring.HEARTBEAT])))
            totals.hold_in_flight(in_flight if alive else [])
            totals.outside = reader.outside()
            if counters[ring.SPLITS]:
                totals.hold_splits(reader.splits())
            totals.heartbeat_ns = counters[ring.HEARTBEAT]
            overflow = counters[ring.IN_FLIGHT_OVERFLOW]
            if overflow != totals.overflow:
                totals.overflow, totals.overflow_ns = overflow, now_ns
            totals.dropped, totals.probe_ns = counters[ring.DROPPED], counters[ring.PROBE_NS]
            totals.mode, totals.mode_since_ns = min(counters[ring.MODE], COUNTERS), counters[ring.MODE_SINCE_NS]
            totals.closed_properly = counters[ring.CLOSED] > 0
            totals.has_left = alive and totals.closed_properly and counters[ring.DESTROYED] > 0
            if totals.alive and (totals.closed_properly or not alive):
                totals.gone_ns = now_ns
            totals.alive = alive and not totals.closed_properly
            # A killed process loses its connections before its lock, so that other ranks raise meanwhile.
            source.alive_ns = now_ns if alive and not (owner and is_exiting(owner)) else source.alive_ns
            if alive and owner and self._ends is not None:
                source.pid = owner
                self._ends.watch(owner)
            totals.ending = None
            if not totals.alive:
                self._learn(source, reader)  # the last names, such as its exception
                source.final = source.final and not reader.more_names
                # Another ring of its process may be removed before this one.
                if self._ends is not None and source.died_ns is None and not alive:
                    source.died_ns, source.status = self._ends.at(source.pid), self._ends.status(source.pid)
                totals.ending = ending(source, counters[ring.CLOSED], self._exits.stop_of(totals.identity))
            totals.pid = (owner or None) if totals.alive else None

    def _store_changes(self, source: Source, seen_ns: int) -> None:
        """Hand all changes since the last tick to the store; ``seen_ns`` as in ``RingRow``."""
        totals, row = source.totals, source.row
        fresh = totals.closed[source.stored_cells :]
        if fresh:
            self._store.rollups(row.id, fresh, source.next_n if totals.live_from is None else totals.live_from)
            source.stored_cells = len(totals.closed)
        self._store_steps(source)
        if totals.steps.exposed_source != source.exposed_source:
            source.exposed_source = totals.steps.exposed_source
            self._store.name(row.id, "exposed", 0, source.exposed_source or "")
        if totals.frameworks != source.stored_frameworks:
            source.stored_frameworks = totals.frameworks
            self._store.name(row.id, "frameworks", 0, ",".join(totals.frameworks or ()))
        if totals.run != source.stored_run:
            source.stored_run = totals.run
            self._store.name(row.id, "run", 0, totals.run)
        progress = (source.next_n, source.lost, totals.dropped)
        if progress != source.stored_progress:
            source.stored_progress = progress
            self._store.progress(row.id, *progress, seen_ns)

    def _store_steps(self, source: Source) -> None:
        with self._lock:
            of_rank = source.totals.steps
            steps, unavailable, step_source = of_rank.take(), of_rank.unavailable, of_rank.source
        if step_source not in (None, source.step_source):
            self._store.source_steps(source.row.id, step_source, source.step_source)
            source.step_source = step_source
        if steps or unavailable != source.unavailable:
            source.unavailable = unavailable
            self._store.steps(source.row, steps, unavailable)

    def _remove_finished(self, now_ns: int) -> None:
        """Remove the ring files of ended trainers whose records are all in the history, with what was concluded from their end."""
        kept = set(self._aggregate.rank_totals())
        finished: list[tuple[str, Source, RingReader]] = []
        for name, source in list(self._sources.items()):
            if source.reader is None:
                if source.totals not in kept:
                    del self._sources[name]
            elif source.final and self._store.trouble is None:
                ended_ns = self._store_end(source, now_ns)
                if self._concluded(ended_ns) or now_ns - ended_ns > _CONCLUDED_NS:
                    finished.append((name, source, source.reader))
        if finished and self._store.commit():
            for name, source, reader in finished:
                self._remove(name, source, reader)
                source.reader = None

    def _store_end(self, source: Source, now_ns: int) -> int:
        """Hand the end of a rank to the store, again if more has become known of it; return when that was done first."""
        ending, first_ns = source.totals.ending, now_ns if source.ended_ns is None else source.ended_ns
        if source.ended_ns is None or ending != source.stored_ending:
            source.ended_ns, source.stored_ending = first_ns, ending
            self._store.end(source.row.id, "ended" if source.totals.closed_properly else "gone", ending)
            if (waited := waited_for_core(source.totals.samples)) is not None:
                self._store.name(source.row.id, "core_wait", 0, f"{waited:.3f}")
            if source.totals.cores is not None:
                self._store.name(source.row.id, "cores", 0, json.dumps(asdict(source.totals.cores)))
        return first_ns

    def _remove(self, name: str, source: Source, reader: RingReader) -> None:
        self._finder.ignore(name, reader.inode, source.owner)
        if self._ends is not None:
            self._ends.forget(source.pid)
        reader.close()
        try:
            with crossing.folder(self._directory) as rings:
                rings.remove(name)
                rings.remove(reader.path.with_suffix(".names").name)
        except OSError as error:
            log.warning("cannot remove finished ring %s: %s", name, error)
