"""Chunks of the history: compressed runs of raw records of one ring, with the ranges needed to find them."""

from __future__ import annotations

import logging
import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commwatch.wire.events import RECORD_SIZE
from commwatch_agent.history.packing import pack, unpack
from commwatch_agent.history.soundness import row_checksum

if TYPE_CHECKING:
    from commwatch_agent.history.ranges import Ranges

log = logging.getLogger("commwatch")
#: A kind of damage, and a key that identifies the piece in every process.
Piece = tuple[str, int]
#: Pieces of one kind that are named in the log.
_MOST_LOGGED = 10
Statement = tuple[str, tuple[Any, ...]]

#: Records of a full chunk, and of the smallest one that stays as it is.
CHUNK_RECORDS, LEAST_RECORDS = 1024, 256
#: Smaller pieces of a chunk. One more, and they become one: rows must not become many.
MOST_PIECES = 16
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
            return unpack(data, _MOST_BYTES)
        except ValueError as error:
            why = str(error)
        self.note(("chunk", chunk), f"{path}: chunk {chunk} of the raw records is damaged and was skipped: {why}")
        return None


class OpenChunk:
    """The newest records of a ring, until they make a chunk. Each commit adds a piece; a larger one replaces the small ones."""

    def __init__(self, ring: int, offset_ns: int) -> None:
        self.ring, self.offset_ns = ring, offset_ns
        self.records = bytearray()
        self.first_n: int | None = None
        self.until_n = 0
        #: Bytes in stored pieces, and the number of these.
        self._stored = self._pieces = 0

    def append(self, records: bytes, until_n: int) -> None:
        """Add whole records; the last one has number ``until_n - 1``."""
        if self.first_n is None:
            self.first_n = until_n - len(records) // RECORD_SIZE
        self.records += records
        self.until_n = until_n

    @property
    def is_full(self) -> bool:
        """Whether it takes no more records."""
        return len(self.records) >= CHUNK_RECORDS * RECORD_SIZE

    @property
    def fresh(self) -> bytearray:
        """The records of the next row: those that are not stored yet, or all if it replaces the pieces."""
        return self.records[0 if self._whole else self._stored :]

    def stored(self) -> bool:
        """Note that the statements are committed; return whether the chunk takes no more records."""
        written = len(self.records) - (0 if self._whole else self._stored)
        self._pieces = 1 if self._whole else self._pieces + 1
        self._stored = len(self.records)
        return written >= LEAST_RECORDS * RECORD_SIZE

    @property
    def _whole(self) -> bool:
        """Whether the next row replaces all pieces."""
        is_large = len(self.records) - self._stored >= LEAST_RECORDS * RECORD_SIZE
        return self.is_full or is_large or self._pieces >= MOST_PIECES

    def row(self, records: bytearray, found: Ranges, arrived_ns: int) -> Iterator[Statement]:
        """Yield the SQL statements that store the ``fresh`` records, in which ``found`` are the ranges."""
        first_n = self.until_n - len(records) // RECORD_SIZE
        if self._whole and self._pieces:
            pieces = "SELECT id FROM chunk WHERE ring = ? AND first_n >= ?"
            for table, column in (("span", "chunk"), ("extent", "chunk"), ("chunk", "id")):
                yield f"DELETE FROM {table} WHERE {column} IN ({pieces})", (self.ring, self.first_n)
        data = pack(records)
        about = (self.ring, first_n, self.until_n, found.from_ns, found.until_ns, len(data))
        yield (
            "INSERT OR REPLACE INTO chunk (ring, first_n, until_n, from_ns, until_ns, size, data, crc, arrived_ns)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*about, data, row_checksum(about), arrived_ns),
        )
        row = "FROM chunk WHERE ring = ? AND first_n = ?"
        extent = (self.ring, found.from_ns, found.until_ns, *found.extent())
        yield (
            f"INSERT OR REPLACE INTO extent SELECT id, ?, ?, ?, ?, ?, ?, ?, ?, ? {row}",
            (*extent, row_checksum(extent), self.ring, first_n),
        )
        for span in found.spans:
            yield f"INSERT OR REPLACE INTO span SELECT id, ?, ?, ? {row}", (*span[:3], self.ring, first_n)


def statements(chunks: Sequence[OpenChunk], arrived_ns: int) -> list[list[Statement]]:
    """Return for each chunk the SQL statements that store all its records so far, after those that are stored.

    Args:
        arrived_ns: when the latest of them came, by the clock of arrivals.
    """
    if not chunks:
        return []
    from commwatch_agent.history.ranges import ranges  # brings in numpy, which an agent without trainers does not need

    runs = [(chunk.fresh, chunk.offset_ns) for chunk in chunks]
    rows = zip(chunks, runs, ranges(runs), strict=True)
    return [list(chunk.row(records, found, arrived_ns)) for chunk, (records, _), found in rows]
