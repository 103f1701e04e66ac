"""Chunks of the history: compressed runs of raw records of one ring, with the ranges needed to find them."""

from __future__ import annotations

import logging
import struct
import threading
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from commwatch.collectors.wire.events import MAX_PLAUSIBLE, RECORD_SIZE
from commwatch.history.soundness import seal

log = logging.getLogger("commwatch")
#: A kind of damage, and a key that identifies the piece in every process.
Piece = tuple[str, int]
#: Pieces of one kind that are named in the log.
_MOST_LOGGED = 10
Statement = tuple[str, tuple[Any, ...]]

#: Records of a full chunk; a chunk that is not full is rewritten when it grows.
CHUNK_RECORDS = 1024
#: Most bytes of a chunk: an almost full one takes another whole piece.
_MOST_BYTES = 2 * CHUNK_RECORDS * RECORD_SIZE


class Damaged:
    """Counts each damaged piece of the history once, and logs the first ten of a kind. Thread-safe."""

    def __init__(self) -> None:
        self._known: set[Piece] = set()
        self._of_kind: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def row(self, path: Path, table: str, row: object) -> None:
        """Count a damaged row."""
        says = f"{path}: a row of the table {table} is damaged and was skipped"
        self.note((table, zlib.crc32(repr(row).encode())), says)

    def log_lost(self, path: Path, transactions: int) -> None:
        """Count a damaged end of the write-ahead log, which lost ``transactions`` transactions."""
        lost = (
            f"the last {transactions} transactions in it are lost; records that are still in the rings are read again"
        )
        self.note(("log", transactions), f"{path}: the write-ahead log is damaged: {lost}")

    def note_file(self, path: Path, why: str) -> None:
        """Count damage of the file itself."""
        self.note(("file", zlib.crc32(why.encode())), f"{path}: {why}")

    def note(self, piece: Piece, says: str) -> None:
        """Count a new piece, and log it unless ten of its kind have been logged."""
        with self._lock:
            if piece in self._known:
                return
            self._known.add(piece)
            self._of_kind[piece[0]] += 1
            number = self._of_kind[piece[0]]
        if number <= _MOST_LOGGED:
            log.warning("%s%s", says, "; further damage of this kind is only counted" if number == _MOST_LOGGED else "")

    def unpacked(self, path: Path, chunk: int, data: bytes) -> bytes | None:
        """Return the decompressed records of a chunk; ``None``, and count it, if it is damaged."""
        try:
            unpacking = zlib.decompressobj()
            records = unpacking.decompress(data, _MOST_BYTES)
            if not unpacking.eof:
                why = f"more than {_MOST_BYTES} bytes, or cut short"
            elif len(records) % RECORD_SIZE:
                why = f"{len(records)} bytes are not a whole number of records"
            else:
                return records
        except zlib.error as error:
            why = str(error)
        self.note(("chunk", chunk), f"{path}: chunk {chunk} of the raw records is damaged and was skipped: {why}")
        return None


class OpenChunk:
    """The newest records of a ring, until they fill a chunk."""

    _PARTS = struct.Struct("<4xBxH24xI12xQ8x")

    def __init__(self, ring: int, offset_ns: int) -> None:
        self.ring, self._offset_ns = ring, offset_ns
        self.records = bytearray()
        self.first_n: int | None = None
        self.until_n = 0
        self.from_ns, self.until_ns = 0, 0
        self.spans: dict[int, tuple[int, int]] = {}

    def append(self, records: bytes, until_n: int) -> None:
        """Add whole records; the last one has number ``until_n - 1``."""
        ops, groups, seqs, ends = zip(*self._PARTS.iter_unpack(records), strict=True)
        if max(ends) + self._offset_ns >= MAX_PLAUSIBLE:
            ends = tuple(end for end in ends if end + self._offset_ns < MAX_PLAUSIBLE) or (
                self.until_ns - self._offset_ns,
            )
        self.until_ns = max(self.until_ns, max(ends) + self._offset_ns)
        first = min(ends) + self._offset_ns
        self.from_ns = min(self.from_ns, first) if self.records else first
        of_group: defaultdict[int, list[int]] = defaultdict(list)
        for op, group, seq in zip(ops, groups, seqs, strict=True):
            if op:  # a step mark (0) has no group
                of_group[group].append(seq)
        for group, numbers in of_group.items():
            low, high = self.spans.get(group, (numbers[0], numbers[0]))
            self.spans[group] = min(low, *numbers), max(high, *numbers)
        if self.first_n is None:
            self.first_n = until_n - len(records) // RECORD_SIZE
        self.records += records
        self.until_n = until_n

    def statements(self) -> Iterator[Statement]:
        """Yield the SQL statements that write the chunk in place of its earlier version."""
        data = zlib.compress(self.records, 1)
        about = (self.ring, self.first_n, self.until_n, self.from_ns, self.until_ns, len(data))
        yield (
            "INSERT INTO chunk (ring, first_n, until_n, from_ns, until_ns, size, data, crc) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (ring, first_n) DO UPDATE SET until_n = excluded.until_n, from_ns = excluded.from_ns,"
            " until_ns = excluded.until_ns, size = excluded.size, data = excluded.data, crc = excluded.crc",
            (*about, data, seal(about)),
        )
        for group, (low, high) in self.spans.items():
            yield (
                "INSERT OR REPLACE INTO span SELECT id, ?, ?, ? FROM chunk WHERE ring = ? AND first_n = ?",
                (group, low, high, self.ring, self.first_n),
            )
