"""Split any bytes into physical lines with bounded memory; the input may be cut anywhere."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from io import BufferedIOBase

#: Bytes. A longer line is split into pieces of this size (a progress bar may write for hours without a newline).
MOST_BYTES = 65_536
_BLOCK = 1 << 20
#: Bytes that are split at a time: the lines of more do not stay in the caches of a core.
_SLICE = 32_768


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
        at = 0
        while at <= len(complete):
            end = complete.rfind(b"\n", at, at + _SLICE) if len(complete) - at > _SLICE else len(complete)
            end = end if end >= 0 else complete.find(b"\n", at)
            end = end if end >= 0 else len(complete)
            yield from self._some(complete[at:end])
            at = end + 1

    def _some(self, complete: bytes) -> Iterator[tuple[int, str]]:
        if len(complete) <= MOST_BYTES:  # a newline also ends a damaged character
            lines = complete.decode("utf-8", "replace").split("\n")
            first, self._number = self._number, self._number + len(lines)
            yield from enumerate(lines, first)
            return
        for line in complete.split(b"\n"):
            for at in range(0, len(line) or 1, MOST_BYTES):
                yield self._number, line[at : at + MOST_BYTES].decode("utf-8", "replace")
            self._number += 1


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
