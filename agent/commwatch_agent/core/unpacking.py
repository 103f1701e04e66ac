"""Reads gzip data that others have written, within limits: a kilobyte can unpack to a megabyte, again and again."""

from __future__ import annotations

import gzip
import io
from typing import IO, cast

#: Bytes that any file may unpack to; beyond it, so many times what was read of it. Traces and logs unpack to 10 to 50 times their size.
_ALWAYS_BYTES, _MOST_TIMES = 64 << 20, 200


class UnpacksToMore(gzip.BadGzipFile):
    """The data unpack to more than such a file has; the message gives the limit."""


class Unpacking(gzip.GzipFile):
    """The unpacked data of ``file``, to be read in pieces.

    Reads raise ``UnpacksToMore`` beyond the limits.

    Args:
        most_bytes: limit besides the ratio; ``None``: there is none.
    """

    def __init__(self, file: IO[bytes], most_bytes: int | None = None) -> None:
        self._packed, self._most_bytes, self._unpacked = _Counted(file), most_bytes, 0
        super().__init__(fileobj=cast("IO[bytes]", self._packed), mode="rb")

    def read(self, size: int | None = -1) -> bytes:
        """Return the next data."""
        return self._within(super().read(size))

    def read1(self, size: int = -1) -> bytes:
        """Return the next data, as many as there are at once."""
        return self._within(super().read1(size))

    def _within(self, data: bytes) -> bytes:
        self._unpacked += len(data)
        if self._most_bytes is not None and self._unpacked > self._most_bytes:
            raise UnpacksToMore(f"it unpacks to more than {self._most_bytes} bytes")
        if self._unpacked > max(_ALWAYS_BYTES, _MOST_TIMES * self._packed.taken):
            raise UnpacksToMore(f"it unpacks to more than {_ALWAYS_BYTES} bytes and {_MOST_TIMES} times its size")
        return data


class _Counted(io.RawIOBase):
    """Counts what is read of a file, and does not close it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.taken = file, 0

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.taken += len(data)
        return data
