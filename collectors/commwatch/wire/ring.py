"""The ring buffer file, and its writers: one per rank, written by the trainer, read by the agent; it outlives both processes.

Layout (little endian)::

    0      magic, version, sizes                       written once
    64     counters: cursor, heartbeat, dropped, ...   8-byte stores
    192    what the rank waits for outside operations  one record, see ``OUTSIDE``; zeros from older writers
    512    identity as JSON                            written once, before the file gets its name
    4096   the operations in flight: 64 records with end_ns 0; stamp 0 = free
    8192   ``slots`` records; record n lies in slot n % slots and is stamped n + 1 at both ends
    after  the split sizes of the latest calls of all_to_all, see ``splits``; not in version 1 and 2

Names are in a ``.names`` file beside it: lines of JSON, then reserved zeros. A larger file replaces a full one.

A writer takes a number, writes the record, then stores the cursor; there are no locks. A reader copies the records,
reads the cursor again and drops what may have been overwritten meanwhile, so that ``read + lost == written`` holds
exactly. Several threads write at once, so the newest records may briefly have gaps, and the cursor may be a little
behind; the reader handles both.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import struct
import threading
from collections import deque
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from commwatch.wire import splits
from commwatch.wire.events import BLOCKED, RECORD, RECORD_SIZE
from commwatch.wire.handlers import raised_by_handler
from commwatch.wire.mapping import MappedFile, is_locked

MAGIC = b"CWRING\r\n"
VERSION = 3
HEADER = struct.Struct("<8sIIIIII")
COUNTERS_AT, IDENTITY_AT, IN_FLIGHT_AT, RECORDS_AT = 64, 512, 4096, 8192
IN_FLIGHT_SLOTS = (RECORDS_AT - IN_FLIGHT_AT) // RECORD_SIZE
DEFAULT_SLOTS = 16_384
#: Writers that may be between taking a number and finishing their record.
MARGIN = 64
STAMP_MASK = 0xFFFFFFFF
#: Offsets of ``start_ns`` and ``flags`` in a record, in bytes.
START_AT, FLAGS_AT = 40, 56
#: Most bytes of names; and bytes reserved for them at first.
MOST_NAMES_BYTES, _FIRST_NAMES = 16 << 20, 16 << 10

# Indices of the 8-byte counters.
CURSOR, HEARTBEAT, DROPPED, PROBE_NS, IN_FLIGHT_OVERFLOW, CLOSED, OPS_STARTED, MODE, MODE_SINCE_NS = range(9)
#: When the default group was destroyed; 0: it was not, or there is a new one. Then ``CLOSED`` is set, too, but the process may live on.
DESTROYED = 9
#: Calls whose split sizes were noted.
SPLITS = 10
COUNTERS = 16

#: What a rank waits for outside operations: begin in ns (0: nothing), number of calls begun that make the default group, and that make another
#: one, code of the call, and what it is about as UTF-8: ranks (``ranks_text``; empty: all, ``?``: not known), or the key of a store.
OUTSIDE_AT, OUTSIDE = 192, struct.Struct("<QIIHH300s")
#: Names of those calls by code. A code that a reader does not know is passed over.
OUTSIDE_CALLS = (
    "",
    "init_process_group",
    "new_group",
    "destroy_process_group",
    "store_based_barrier",
    "store.wait",
)
NOTHING, INIT, NEW_GROUP, DESTROY, STORE_BARRIER, STORE_WAIT = range(len(OUTSIDE_CALLS))
MOST_OUTSIDE_TEXT = 300


class Outside(NamedTuple):
    """What a rank waits for outside operations, as its ring has it."""

    #: On the monotonic clock; 0: it waits for nothing.
    since_ns: int
    #: Calls begun that make the default group, and that make another one.
    inits: int
    groups: int
    #: One of ``OUTSIDE_CALLS``; empty: nothing, or an unknown one.
    call: str
    about: str


def file_bytes(slots: int) -> int:
    """Return the size of a ring file with so many records."""
    return RECORDS_AT + slots * RECORD_SIZE + splits.AREA_BYTES


def number_of(stamp: int, until_n: int) -> int:
    """Return the record number of a 32-bit stamp, in a run of records that ends before number ``until_n``."""
    return until_n - 1 - ((until_n - stamp) & STAMP_MASK)


class RingFile:
    """The ring file in the trainer. Creating it and ``name`` may raise ``OSError``, nothing else does.

    Args:
        path: final name; the file appears there complete and locked, or not at all.
        identity: of the writer (job, rank, ...), JSON-serialisable.
        slots: number of records kept.
        mode: permission bits of the file.
    """

    def __init__(self, path: Path, identity: dict[str, Any], slots: int = DEFAULT_SLOTS, mode: int = 0o600) -> None:
        hidden = path.with_name(f".{path.name}.new")
        self.path, self.slots, self._mode = path, slots, mode
        self._names_path = path.with_suffix(".names").absolute()
        self._naming = threading.RLock()
        try:
            self._mapping = MappedFile(hidden, file_bytes(slots), mode)
            blob = json.dumps(identity if is_locked(hidden) else {**identity, "locked": False}).encode()
            if len(blob) > IN_FLIGHT_AT - IDENTITY_AT:
                raise OSError(f"identity of {len(blob)} bytes does not fit the ring header")
            self._map = self._mapping.memory
            HEADER.pack_into(self._map, 0, MAGIC, VERSION, RECORDS_AT, RECORD_SIZE, slots, IN_FLIGHT_SLOTS, len(blob))
            self._map[IDENTITY_AT : IDENTITY_AT + len(blob)] = blob
            self._names = self._new_names(_FIRST_NAMES)
            hidden.rename(path)
        except BaseException:  # no room, no rights; or a signal handler of the trainer's has raised
            for left in (hidden, self._names_path):
                with contextlib.suppress(OSError):
                    left.unlink()
            raise
        self.counters = memoryview(self._map)[COUNTERS_AT : COUNTERS_AT + 8 * COUNTERS].cast("Q")

    @property
    def address(self) -> int:
        """Address of the mapping."""
        return self._mapping.address

    def name(self, entry: dict[str, Any]) -> None:
        """Append one line to the names file; raise ``OSError`` if there is no space, or if the file is gone."""
        line = json.dumps(entry).encode() + b"\n"
        with self._naming:
            try:
                self._names.memory.write(line)
            except ValueError:  # it does not fit, and nothing of it has been written
                self._names = self._more_names(len(line))
                self._names.memory.write(line)

    def _new_names(self, size: int, before: bytes = b"") -> MappedFile:
        """Create a names file that begins with ``before``; it replaces the old one atomically."""
        hidden = self._names_path.with_name(f".{self._names_path.name}.new")
        hidden.unlink(missing_ok=True)
        names = MappedFile(hidden, size, self._mode)
        names.memory.write(before)
        try:
            hidden.rename(self._names_path)
        except OSError:
            hidden.unlink(missing_ok=True)
            raise
        return names

    def _more_names(self, more: int) -> MappedFile:
        """Create a names file with ``more`` more bytes; raise ``OSError`` if the path no longer holds our file."""
        written = self._names.memory[: self._names.memory.tell()]
        if len(written) + more > MOST_NAMES_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._names_path))
        if not self._names.is_at(self._names_path):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self._names_path))
        return self._new_names(min(max(2 * len(written), len(written) + more), MOST_NAMES_BYTES), written)

    def outside(self, since_ns: int, inits: int, groups: int, code: int, text: str) -> None:
        """Note what the rank waits for outside operations, as in ``OUTSIDE``; a longer text is cut."""
        OUTSIDE.pack_into(self._map, OUTSIDE_AT, since_ns, inits, groups, code, 0, text.encode(errors="replace"))

    def close(self, now_ns: int) -> None:
        """Record that the trainer has ended properly. The mapping stays, because operations may still complete."""
        self.counters[CLOSED] = now_ns

    def release(self) -> None:
        """Release the files and their locks; later writes are discarded."""
        self._mapping.let_go()
        self._names.let_go()

    def discard(self) -> None:
        """Release and delete the files, for a trainer that will not write to them."""
        self.release()
        for path in (self.path, self._names_path):
            with contextlib.suppress(OSError):
                path.unlink()


class RingWriter(RingFile):
    """The writer of the Python hook; the native hook has its own writer in C++."""

    def __init__(self, path: Path, identity: dict[str, Any], slots: int = DEFAULT_SLOTS, mode: int = 0o600) -> None:
        super().__init__(path, identity, slots, mode)
        self._free = deque(range(IN_FLIGHT_SLOTS))
        self.write = self._make_write(slots)
        self.begin = self._make_begin()
        self._next_call = count(1).__next__

    def _make_write(self, slots: int) -> Callable[..., None]:
        """Build ``write(op, ..., aux)``: the fields of ``Record`` without the stamps."""
        numbers, buffer, counters, pack_into = count(), self._map, self.counters, RECORD.pack_into

        def write(*fields: int) -> None:
            # Not a call: a signal handler may raise when it returns, and the number would be lost.
            for n in numbers:  # noqa: B007
                break
            stamp = (n + 1) & STAMP_MASK
            pack_into(buffer, RECORDS_AT + n % slots * RECORD_SIZE, stamp, *fields, stamp)
            counters[CURSOR] = n + 1

        return write

    def _make_begin(self) -> Callable[..., int]:
        """Build ``begin(op, ..., aux) -> slot``: note an operation as in flight; -1 = table full."""
        number, buffer, free, pack_into = count(1).__next__, self._map, self._free, RECORD.pack_into
        counters = self.counters

        def begin(*fields: int) -> int:
            n = number()
            counters[OPS_STARTED] = n
            try:
                slot = free.pop()
            except IndexError as error:
                if raised_by_handler(error):
                    raise
                counters[IN_FLIGHT_OVERFLOW] += 1
                return -1
            stamp = n & STAMP_MASK or 1
            pack_into(buffer, IN_FLIGHT_AT + slot * RECORD_SIZE, stamp, *fields, stamp)
            return slot

        return begin

    def note_splits(self, group: int, seq: int, noted: splits.Splits) -> None:
        """Note the split sizes of an all_to_all, of at most ``splits.MOST_MEMBERS`` ranks."""
        number = self._next_call()
        splits.note(self._map, RECORDS_AT + self.slots * RECORD_SIZE, number, (group, seq), noted)
        self.counters[SPLITS] = number

    @property
    def in_flight_now(self) -> int:
        """Operations in the in-flight table."""
        return IN_FLIGHT_SLOTS - len(self._free)

    def taken(self) -> dict[int, int]:
        """Return the stamps in the in-flight table, by slot in use."""
        free = set(self._free)
        places = ((slot, IN_FLIGHT_AT + slot * RECORD_SIZE) for slot in range(IN_FLIGHT_SLOTS) if slot not in free)
        return {slot: int.from_bytes(self._map[at : at + 4], "little") for slot, at in places}

    def blocked(self, slot: int, since_ns: int) -> None:
        """Mark the operation in ``slot`` as waited for since ``since_ns``; 0 clears the mark."""
        if slot >= 0:
            at = IN_FLIGHT_AT + slot * RECORD_SIZE
            struct.pack_into("<Q", self._map, at + START_AT, since_ns)
            flags = self._map[at + FLAGS_AT]
            self._map[at + FLAGS_AT] = flags | BLOCKED if since_ns else flags & ~BLOCKED

    def end(self, slot: int) -> None:
        """Free the in-flight ``slot``."""
        if slot >= 0:
            at = IN_FLIGHT_AT + slot * RECORD_SIZE
            self._map[at : at + 4] = b"\0\0\0\0"
            self._free.append(slot)
