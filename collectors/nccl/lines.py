"""Split any bytes into physical lines with bounded memory; the input may be cut anywhere."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from io import BufferedIOBase

#: Bytes. A longer line is split into pieces of this size (a progress bar may write for hours without a newline).
MOST_BYTES = 65_536
_BLOCK = 1 << 20


class Lines:
    """Splits a stream into lines; an incomplete line waits for its newline."""

    def __init__(self) -> None:
        self._rest = b""
        self._number = 1

    def feed(self, data: bytes) -> Iterator[tuple[int, str]]:
        """Yield number (from 1) and text, without newline, of each line that ``data`` completes."""
        if b"\0" in data:  # zeros replace the truncated part of a file that is still written
            data = data.replace(b"\0", b"")
        complete, newline, self._rest = (self._rest + data).rpartition(b"\n")
        if newline:
            yield from self._whole(complete)
        while len(self._rest) > MOST_BYTES:
            piece, self._rest = self._rest[:MOST_BYTES], self._rest[MOST_BYTES:]
            yield self._number, piece.decode("utf-8", "replace")

    def end(self) -> Iterator[tuple[int, str]]:
        """Yield the incomplete line at the end of the stream, if there is one."""
        if self._rest:
            yield self._number, self._rest.decode("utf-8", "replace")
        self._rest = b""

    def _whole(self, complete: bytes) -> Iterator[tuple[int, str]]:
        lines = complete.split(b"\n")
        first, self._number = self._number, self._number + len(lines)
        if len(max(lines, key=len)) <= MOST_BYTES:  # a newline also ends a damaged character
            yield from enumerate(complete.decode("utf-8", "replace").split("\n"), first)
            return
        for number, line in enumerate(lines, first):
            for at in range(0, len(line) or 1, MOST_BYTES):
                yield number, line[at : at + MOST_BYTES].decode("utf-8", "replace")


def lines_of(stream: BufferedIOBase) -> Iterator[tuple[int, str]]:
    """Yield all lines of a stream; for a damaged archive the lines before the damage, then raise its error."""
    lines = Lines()
    try:
        while block := stream.read1(_BLOCK):
            yield from lines.feed(block)
    except (EOFError, OSError, zlib.error):
        yield from lines.end()
        raise
    yield from lines.end()
