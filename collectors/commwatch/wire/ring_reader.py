"""The reader of ring files, in the agent.

``Intake.tick`` calls ``RingReader.drain`` for each ring. The agent reads the file with ``pread`` and never maps it: an access to a
mapping beyond the end of a truncated file would end the process (SIGBUS). ``ring.py`` has the writers, the layout of the file, and
the meaning of its cursor and its stamps.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from array import array
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from commwatch.wire import bounded, crossing
from commwatch.wire.events import MAX_PLAUSIBLE, RECORD, RECORD_SIZE, Record
from commwatch.wire.identity import process_of
from commwatch.wire.mapping import lock_owner
from commwatch.wire.ring import (
    COUNTERS,
    COUNTERS_AT,
    CURSOR,
    HEADER,
    IDENTITY_AT,
    IN_FLIGHT_AT,
    MAGIC,
    MARGIN,
    MOST_NAMES_BYTES,
    OUTSIDE,
    OUTSIDE_AT,
    OUTSIDE_CALLS,
    RECORDS_AT,
    STAMP_MASK,
    VERSION,
    Outside,
)
from commwatch.wire.splits import AREA_BYTES

#: Version 2 added records of several operations (``events.COUNTED``), version 3 split sizes, which both earlier ones lack.
_READABLE, _WITHOUT_SPLITS = (1, 2, VERSION), (1, 2)
#: Limits on the names that are read: lines in all, bytes of one line, JSON values in it; longer lines are skipped.
MOST_NAMES, _MOST_LINE, _MOST_VALUES = 1 << 17, 1 << 20, 1 << 17
#: Lines and bytes of names that are read at a time; more bytes only of one longer line.
_LINES_AT_ONCE, _NAMES_AT_ONCE = 512, 64 << 10
#: A line of names takes at least so many bytes, unless it is damaged.
_LEAST_LINE = 20
#: JSON values of an identity.
_MOST_OF_IDENTITY = 128
#: Most reads of a counter until two in a row agree.
COUNTER_LOOKS = 8
#: Drains that a reader waits for an unfinished record with finished ones after it.
GAP_PATIENCE = 20


class BadRing(Exception):
    """The file is not a ring that this version can read; the message gives the reason."""


class Drained(NamedTuple):
    """Result of one ``drain``: complete records one after another, their number, and the number of lost ones."""

    records: bytes
    read: int
    lost: int


class _Lines(NamedTuple):
    """Some lines of the names, without line breaks; and whether no whole line follows them in what was read."""

    texts: list[bytes]
    complete: bool


def _entries(lines: list[bytes]) -> list[dict[str, Any]]:
    """Return the entries in lines of names; lines that make no sense are skipped."""
    entries = []
    for line in filter(None, lines):
        with contextlib.suppress(ValueError, RecursionError):
            entry = _parse_json(line, _MOST_VALUES)
            if isinstance(entry, dict):
                entries.append(entry)
    return entries


def _open(path: Path) -> int:
    """Open a ring for reading; raise ``BadRing`` if it is no file, or of a user who is not trusted."""
    try:
        return crossing.open_file(path, crossing.trainers())
    except crossing.Refused as why:
        raise BadRing(f"{path.name}: {why.strerror}") from None


def _parse_json(text: bytes, most_values: int) -> Any:
    """Parse a trainer's JSON; half a surrogate pair, which cannot be stored or sent, becomes ``?``.

    Raises ``ValueError`` if it is not JSON, and ``RecursionError`` if it is nested too deeply.
    """
    value = bounded.load(text, most_values)
    if (
        text.isascii() and b"\\u" not in text and b"\0" not in text
    ):  # nearly always: no surrogate in it, UTF-16 included
        return value
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


class RingReader:
    """Reads a ring file in the agent.

    Args:
        path: the ring file.
        next_n: number of the first record not read yet, as remembered from an earlier reader.

    Raises:
        BadRing: not a ring, or one of another version.
        OSError: cannot be opened.
    """

    def __init__(self, path: Path, next_n: int = 0) -> None:
        self.path, self._names_path = path, path.with_suffix(".names")
        self.next_n = next_n
        self._gap = (-1, 0)
        self._names_read = self._lines_read = 0
        #: Whether the bytes up to the next line break belong to a line that is too long.
        self._skips = False
        #: Whether the latest ``next_names`` left names behind that are there already.
        self.more_names = False
        #: Result of ``process_of``; ``None`` before the first call.
        self._pid: int | None = None
        self._fd = _open(path)
        try:
            about = os.fstat(self._fd)
            size, self.inode, self.uid = about.st_size, about.st_ino, about.st_uid
            head = os.pread(self._fd, HEADER.size, 0)
            if len(head) < HEADER.size or not head.startswith(MAGIC):
                raise BadRing(f"{path.name}: not a commwatch ring")
            _, version, records_at, record_size, self.slots, _, blob = HEADER.unpack(head)
            if version not in _READABLE:
                raise BadRing(
                    f"{path.name}: ring format {version}, this agent reads {VERSION}; use the same commwatch in trainer and agent"
                )
            self._splits_at = RECORDS_AT + self.slots * RECORD_SIZE
            self._splits_bytes = 0 if version in _WITHOUT_SPLITS else AREA_BYTES
            if (
                (records_at, record_size) != (RECORDS_AT, RECORD_SIZE)
                or size != self._splits_at + self._splits_bytes
                or not self.slots
                or blob > IN_FLIGHT_AT - IDENTITY_AT
            ):
                raise BadRing(f"{path.name}: damaged header or cut short ({size} bytes)")
            try:
                self.identity: dict[str, Any] = _parse_json(os.pread(self._fd, blob, IDENTITY_AT), _MOST_OF_IDENTITY)
            except (ValueError, RecursionError) as error:
                raise BadRing(f"{path.name}: damaged identity ({error})") from None
        except BaseException:
            os.close(self._fd)
            raise

    def _read(self, at: int, length: int) -> bytes:
        """Read bytes of the file, zeros past its end: reading a mapping there would end the process (SIGBUS)."""
        return os.pread(self._fd, length, at).ljust(length, b"\0")

    def counters(self) -> list[int]:
        """Return all counters of the trainer, by index (``HEARTBEAT``, ``DROPPED``, ...); 0 where the value is implausible."""
        before, after = (memoryview(self._read(COUNTERS_AT, 8 * COUNTERS)).cast("Q").tolist() for _ in range(2))
        return [
            self.counter(index) if value != again else value if value < MAX_PLAUSIBLE else 0
            for index, (value, again) in enumerate(zip(before, after, strict=True))
        ]

    def counter(self, index: int) -> int:
        """Return one of the trainer's counters; 0 if the value is implausible."""
        at = COUNTERS_AT + 8 * index
        found = self._read(at, 8)
        # A read may see part of an 8-byte store: two reads that agree did not.
        for _ in range(COUNTER_LOOKS):
            again = self._read(at, 8)
            if again == found:
                break
            found = again
        counted = int.from_bytes(found, "little")
        return counted if counted < MAX_PLAUSIBLE else 0

    def owner(self) -> int | None:
        """Return the pid of the live trainer process as this process sees it; 0 if it is not visible, ``None`` if it has ended.

        The lock on the file decides, also across containers. The pid in the file counts only if it is of this pid namespace
        and belongs to the process that wrote the file.
        """
        holder = lock_owner(self._fd)
        if holder is not None and holder >= 0:  # the trainer's commwatch uses process locks
            return holder
        if holder is None and self.identity.get("locked") is not False:
            return None
        if self._pid is None or holder is None:
            self._pid = process_of(self.identity, self.uid)
        return self._pid or (None if holder is None else 0)

    def alive(self) -> bool:
        """Return whether the trainer's process lives."""
        return self.owner() is not None

    def drain(self, final: bool = False, limit: int = 1 << 30) -> Drained:
        """Return the records written since the last call.

        Args:
            final: the writer has ended; records that are incomplete now are lost.
            limit: most records to take in one call.
        """
        first, cursor = self.next_n, max(self.counter(CURSOR), self.next_n)
        if final:  # the writer may have been killed between a record and the cursor
            cursor = max((n + 1 for n in range(cursor, cursor + MARGIN) if self._is_complete(n)), default=cursor)
        oldest = max(first, cursor - self.slots)
        upto = min(cursor + MARGIN, oldest + self.slots, oldest + limit)
        # Writer and copy go from first word to last: a record half written when the copy reaches it can be complete
        # when the copy leaves it. So the last words come from an earlier copy.
        before, copy = self._copy(oldest, upto), self._copy(oldest, upto)
        # Do not trust what a writer may have begun to overwrite during the copy.
        margin = 0 if final else MARGIN
        trusted = min(max(oldest, max(self.counter(CURSOR), cursor if final else 0) + margin - self.slots), upto)
        skipped = (trusted - oldest) * RECORD_SIZE
        taken, end = self._complete(before[skipped:], copy[skipped:], trusted, cursor, final)
        read = len(taken) // RECORD_SIZE
        self.next_n = end
        return Drained(taken, read, end - first - read)

    def _complete(self, before: bytes, copy: bytes, first: int, cursor: int, final: bool) -> tuple[bytes, int]:
        """Return the complete records of ``copy``, whose first is number ``first``, and the number to continue from."""
        total, words = len(copy) // RECORD_SIZE, RECORD_SIZE // 4
        heads, tails = array("I", copy)[::words], array("I", before)[words - 1 :: words]
        begin = (first + 1) & STAMP_MASK
        expected = array("I", range(begin, min(begin + total, STAMP_MASK + 1)))
        expected.extend(range(begin + total - STAMP_MASK - 1))
        # Usually all records up to the cursor are complete, and none after it.
        sure = min(total, max(0, cursor - first))
        if not heads[:sure] == tails[:sure] == expected[:sure]:
            sure = 0
        rest = zip(heads[sure:], tails[sure:], expected[sure:], strict=True)
        complete = [head == tail == stamp for head, tail, stamp in rest]
        written = max(cursor - first, max((sure + i + 1 for i, good in enumerate(complete) if good), default=0))
        kept: list[bytes] = [copy[: sure * RECORD_SIZE]]
        for i in range(sure, min(written, total)):
            if complete[i - sure]:
                kept.append(copy[i * RECORD_SIZE : (i + 1) * RECORD_SIZE])
            elif not final and not self._gave_up_on(first + i):
                written = i
                break
        return b"".join(kept), first + min(written, total)

    def _gave_up_on(self, n: int) -> bool:
        """Return True once record ``n`` has stayed incomplete for ``GAP_PATIENCE`` drains: its writer is gone."""
        gap, seen = self._gap
        self._gap = (n, seen + 1) if gap == n else (n, 1)
        return self._gap[1] > GAP_PATIENCE

    def _is_complete(self, n: int) -> bool:
        at = RECORDS_AT + n % self.slots * RECORD_SIZE
        stamp = struct.pack("<I", (n + 1) & STAMP_MASK)
        record = self._read(at, RECORD_SIZE)
        return record[:4] == stamp == record[-4:]

    def _copy(self, first: int, upto: int) -> bytes:
        """Return the bytes of records ``first`` to ``upto`` (excluded; at most one lap)."""
        a, b = first % self.slots, first % self.slots + (upto - first)
        head = self._read(RECORDS_AT + a * RECORD_SIZE, (min(b, self.slots) - a) * RECORD_SIZE)
        return head if b <= self.slots else head + self._read(RECORDS_AT, (b - self.slots) * RECORD_SIZE)

    def in_flight(self) -> list[Record]:
        """Return the operations in flight, oldest first."""
        for _ in range(3):
            table = self._read(IN_FLIGHT_AT, RECORDS_AT - IN_FLIGHT_AT)
            if table == self._read(IN_FLIGHT_AT, RECORDS_AT - IN_FLIGHT_AT):
                break
        words = RECORD_SIZE // 4
        stamps = memoryview(table).cast("I")[::words].tolist()
        if not any(stamps):
            return []
        places = (RECORD_SIZE * slot for slot, stamp in enumerate(stamps) if stamp)
        records = (Record._make(RECORD.unpack_from(table, at)) for at in places)
        return sorted((r for r in records if r.stamp == r.stamp2), key=lambda r: r.launch_ns)

    def outside(self) -> Outside:
        """Return what the rank waits for outside operations."""
        for _ in range(3):
            read = self._read(OUTSIDE_AT, OUTSIDE.size)
            if read == self._read(OUTSIDE_AT, OUTSIDE.size):
                break
        since_ns, inits, groups, code, _, text = OUTSIDE.unpack(read)
        call = OUTSIDE_CALLS[code] if code < len(OUTSIDE_CALLS) and since_ns < MAX_PLAUSIBLE else ""
        return Outside(since_ns if call else 0, inits, groups, call, text.rstrip(b"\0").decode(errors="replace"))

    def splits(self) -> bytes:
        """Return the part of the file with the split sizes of the latest calls (``splits.find``); empty in the file of an older writer."""
        for _ in range(3):
            read = self._read(self._splits_at, self._splits_bytes)
            if read == self._read(self._splits_at, self._splits_bytes):
                break
        return read

    def names(self) -> list[dict[str, Any]]:
        """Return all entries added to the names file since the last call; an incomplete line waits for the next one."""
        entries = self.next_names()
        while self.more_names:
            entries += self.next_names()
        return entries

    def may_have_names(self, pieces: int) -> bool:
        """Return whether there may be more new names than so many calls of ``next_names`` return."""
        try:
            size = os.lstat(self._names_path).st_size
        except OSError:
            return False
        return size - self._names_read > pieces * _LINES_AT_ONCE * _LEAST_LINE

    def next_names(self, rings: crossing.Folder | None = None) -> list[dict[str, Any]]:
        """Return the next entries of the names file, in bounded time; ``more_names`` is whether others follow them.

        Args:
            rings: the folder of the ring, if the caller has it open: the walk to it costs more than what is read.
        """
        self.more_names = False
        if self._lines_read >= MOST_NAMES:
            return []
        try:
            fd = self._open_names(rings)
        except OSError:
            return []
        with open(fd, "rb", buffering=0) as file:
            try:
                text, ended = self._names_from(file, _NAMES_AT_ONCE)
                if not (ended or b"\n" in text):
                    text, ended = self._names_from(file, _MOST_LINE)
            except OSError:
                return []
        lines = self._whole_lines(text, ended)
        self.more_names = self._lines_read < MOST_NAMES and not (ended and lines.complete)
        return _entries(lines.texts)

    def _open_names(self, rings: crossing.Folder | None) -> int:
        if rings is None:
            return crossing.open_file(self._names_path, crossing.user(self.uid))
        return rings.open_file(self._names_path.name, crossing.user(self.uid))

    def _whole_lines(self, text: bytes, ended: bool) -> _Lines:
        """Return the whole lines in the next bytes of the names, at most so many as are read at a time; go on after them.

        Args:
            ended: nothing follows these bytes yet.
        """
        *texts, rest = text.split(b"\n", min(_LINES_AT_ONCE, MOST_NAMES - self._lines_read))
        self._names_read += len(text) - len(rest)
        self._lines_read += len(texts)
        if texts and self._skips:
            del texts[0]
            self._skips = False
        if not (ended or b"\n" in text):  # a line without an end in sight
            self._names_read += len(rest)
            self._skips = True
        return _Lines(texts, b"\n" not in rest)

    def _names_from(self, file: FileIO, most: int) -> tuple[bytes, bool]:
        """Return at most ``most`` new bytes of the names file, up to its end or the first zero: reserved space is zeros.

        Also return whether there are no more.
        """
        file.seek(self._names_read)
        left = MOST_NAMES_BYTES - self._names_read
        piece = file.read(min(left, most)) if left > 0 else b""
        written, zero, _ = piece.partition(b"\0")
        return written, bool(zero) or len(piece) < most

    def close(self) -> None:
        """Close the descriptor; the file stays."""
        os.close(self._fd)
