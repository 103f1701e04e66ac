"""Where records arrive: finds the rings of the run directory, drains them, remembers how far."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from pathlib import Path

from commwatch.aggregate import Aggregate, RankBook
from commwatch.collectors import ring
from commwatch.collectors.identity import boot_id
from commwatch.store import RingRow, Writer

log = logging.getLogger("commwatch")
#: Most records taken from one ring in one go, so that one busy rank does not starve the others.
_BATCH = 8192


class _Source:
    """One ring in sight."""

    def __init__(self, reader: ring.RingReader, row: RingRow, book: RankBook) -> None:
        self.reader, self.row, self.book = reader, row, book
        self.lost = row.lost
        self.told: tuple[int, int, int] | None = None
        #: Everything the trainer ever wrote has been taken.
        self.final = False
        self.unavailable = row.steps_unavailable


class Intake:
    """Moves records from rings to aggregate and store. One thread calls ``tick``.

    Args:
        directory: holds the ``*.ring`` files.
        lock: guards the aggregate against its readers.
    """

    def __init__(self, directory: Path, aggregate: Aggregate, store: Writer, lock: threading.RLock) -> None:
        self._directory = directory
        self._aggregate, self._store, self._lock = aggregate, store, lock
        self._boot_id = boot_id()
        self._sources: dict[str, _Source] = {}
        self._refused: set[tuple[str, int]] = set()
        #: Ring files that could not be read, for ``/metrics``.
        self.bad_rings = 0
        self.lost = 0
        self.read = 0

    def tick(self, now_ns: int, wall_ns: int) -> int:
        """Look for rings, drain all, write down what came; returns the number of records."""
        self._discover(wall_ns)
        taken = sum(self._drain(source, now_ns, wall_ns) for source in list(self._sources.values()))
        with self._lock:
            self._aggregate.retire(wall_ns)
        # Under one lock: a reader finds each cell either here or in the history, never in both or in neither.
        with self._lock:
            self._note(wall_ns)
            committed = self._store.commit()
        if committed:
            self._remove_finished()
        return taken

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
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name not in self._sources and (entry.name, entry.inode()) not in self._refused:
                self._open(entry, wall_ns)

    def _open(self, entry: os.DirEntry[str], wall_ns: int) -> None:
        reader = None
        try:
            reader = ring.RingReader(Path(entry.path))
            row = self._store.ring(str(reader.path.absolute()), reader.identity, wall_ns)
            reader.next_n = row.next_n
            with self._lock:
                book = self._aggregate.open(row.uid, reader.identity)
        except FileNotFoundError:
            return
        except sqlite3.Error as error:  # the disk is full: the ring keeps its records until it is not
            self._store.trouble = f"{self._store.path}: {error}"
            return
        except (ring.BadRing, OSError, KeyError, TypeError, ValueError) as error:
            self._refused.add((entry.name, entry.inode()))
            self.bad_rings += 1
            log.warning("cannot read ring %s: %s", entry.name, error)
            if reader is not None:
                reader.close()
            return
        source = self._sources[entry.name] = _Source(reader, row, book)
        book.lost = row.lost
        self._learn(source)
        for records in self._store.raw_since(row):
            with self._lock:
                book.ingest(records)

    def _learn(self, source: _Source) -> None:
        entries = source.reader.names()
        if not entries:
            return
        book, row = source.book, source.row
        groups, names = (
            dict(book.groups),
            {("dtype", k): v for k, v in book.dtypes.items()} | {("op", k): v for k, v in book.ops.items()},
        )
        with self._lock:
            book.learn(entries)
        for small_id, group in book.groups.items():
            if groups.get(small_id) != group:
                self._store.group(row.id, small_id, group)
        for kind, known in (("dtype", book.dtypes), ("op", book.ops)):
            for code, name in known.items():
                if names.get((kind, code)) != name:
                    self._store.name(row.id, kind, code, name)

    # -- records ------------------------------------------------------------------------------

    def _drain(self, source: _Source, now_ns: int, wall_ns: int) -> int:
        reader, book = source.reader, source.book
        alive = reader.alive() and reader.identity.get("boot_id") == self._boot_id
        taken = 0
        while True:
            drained = reader.drain(final=not alive, limit=_BATCH)
            source.lost += drained.lost
            self.lost += drained.lost
            if drained.records:
                self._learn(source)
                with self._lock:
                    book.ingest(drained.records)
                self._store.append(source.row, drained.records, reader.next_n)
                taken += drained.read
            if drained.read + drained.lost < _BATCH:
                break
        self.read += taken
        source.final = not alive
        with self._lock:
            book.lost = source.lost
            book.in_flight = reader.in_flight() if alive else []
            book.heartbeat_ns = reader.counter(ring.HEARTBEAT)
            book.dropped, book.probe_ns = reader.counter(ring.DROPPED), reader.counter(ring.PROBE_NS)
            book.closed_properly = reader.counter(ring.CLOSED) > 0
            book.alive = alive and not book.closed_properly
            if alive:
                book.roll(wall_ns)
            else:
                book.finish()
        return taken

    def _note(self, wall_ns: int) -> None:
        """Hand what has changed since the last tick to the store."""
        for source in self._sources.values():
            book, row = source.book, source.row
            closed, steps, unavailable, live_from = (
                book.take_closed(),
                book.take_steps(),
                book.steps_unavailable,
                book.live_from,
            )
            if closed:
                self._store.rollups(row.id, closed, source.reader.next_n if live_from is None else live_from)
            if steps or unavailable != source.unavailable:
                source.unavailable = unavailable
                self._store.steps(row, steps, unavailable)
            told = (source.reader.next_n, source.lost, book.dropped)
            if told != source.told:
                source.told = told
                self._store.progress(row.id, *told, wall_ns)

    def _remove_finished(self) -> None:
        """Ring files whose trainer is gone and whose records are all in the history have done their work."""
        for name, source in list(self._sources.items()):
            if not source.final:
                continue
            self._store.end(source.row.id, "ended" if source.book.closed_properly else "gone")
            if not self._store.commit():
                continue
            self._refused.add((name, source.reader.inode))
            source.reader.close()
            del self._sources[name]
            for path in (source.reader.path, source.reader.path.with_suffix(".names")):
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    log.warning("cannot remove finished ring: %s", error)
