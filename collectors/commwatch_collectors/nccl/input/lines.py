"""Any bytes to texts of whole physical lines, with bounded memory; the input may be cut anywhere.

A text has about 32 KiB of lines, because one line at a time takes longer; its reader splits it at ``\\n``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from io import BufferedIOBase

from commwatch_collectors.nccl.input.records import messages, without_ray
from commwatch_collectors.nccl.input.wraps import unwrapped

#: Bytes. A longer line is split into pieces of this size (a progress bar may write for hours without a newline).
MOST_BYTES = 65_536
_BLOCK = 1 << 20
#: Bytes of a text: the lines of more do not stay in the caches of a core.
_SLICE = 32_768


class Lines:
    """Cuts a stream between its lines; an incomplete line waits for its newline.

    Args:
        first: number of its first line.
    """

    def __init__(self, first: int = 1) -> None:
        self._rest = b""
        self._number = first

    def feed(self, data: bytes) -> Iterator[tuple[int, str]]:
        """Yield the lines that ``data`` completes as texts, each with the number (from 1) of its first line.

        A piece of a line that is longer than ``MOST_BYTES`` is a text of its own, with the number of that line.
        """
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

    def forget(self, most_bytes: int) -> int:
        """Forget the incomplete line if it is longer than that, and return how many bytes must be fed again."""
        if len(self._rest) <= most_bytes:
            return 0
        length, self._rest = len(self._rest), b""
        return length

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
            text = complete.decode("utf-8", "replace")
            yield self._number, text
            self._number += text.count("\n") + 1
            return
        for line in complete.split(b"\n"):
            for at in range(0, len(line) or 1, MOST_BYTES):
                yield self._number, line[at : at + MOST_BYTES].decode("utf-8", "replace")
            self._number += 1


def split_lines(texts: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line, without newline."""
    for first, text in texts:
        yield from enumerate(text.split("\n"), first)


def lines_of(stream: BufferedIOBase) -> Iterator[tuple[int, str]]:
    """Yield the lines of a stream as ``Lines.feed`` does, without what others than NCCL and PyTorch have put around them.

    For a damaged archive, yield the lines before the damage, then raise its error.
    """
    errors: list[Exception] = []
    yield from without_ray(unwrapped(messages(unwrapped(_physical(stream, errors)))))
    if errors:
        raise errors[0]


def _physical(stream: BufferedIOBase, errors: list[Exception]) -> Iterator[tuple[int, str]]:
    """Yield the lines as they are in the stream; what ends the reading before the end is added to ``errors``."""
    lines = Lines()
    try:
        while block := stream.read1(_BLOCK):
            yield from lines.feed(block)
    except Exception as error:
        errors.append(error)
    yield from lines.end()
