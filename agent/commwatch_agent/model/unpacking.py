"""Reads compressed data that others have written, within limits: a kilobyte can unpack to a megabyte, again and again."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from typing import IO, Any, cast

#: Bytes that any file may unpack to; beyond it, so many times what was read of it. Traces and logs unpack to 10 to 50 times their size.
_ALWAYS_BYTES, _MOST_TIMES = 64 << 20, 200


class UnpacksToMore(gzip.BadGzipFile):
    """The data unpack to more than such a file has; the message gives the limit."""


class Limit:
    """Counts unpacked data.

    Args:
        packed_bytes: returns the bytes that were read of the file.
        most_bytes: limit besides the ratio; ``None``: there is none.
    """

    def __init__(self, packed_bytes: Callable[[], int], most_bytes: int | None = None) -> None:
        self._packed_bytes, self._most_bytes, self._unpacked = packed_bytes, most_bytes, 0

    def counted(self, data: bytes) -> bytes:
        """Return the data; raise ``UnpacksToMore`` beyond the limits."""
        self._unpacked += len(data)
        if self._most_bytes is not None and self._unpacked > self._most_bytes:
            raise UnpacksToMore(f"it unpacks to more than {self._most_bytes} bytes")
        if self._unpacked > max(_ALWAYS_BYTES, _MOST_TIMES * self._packed_bytes()):
            raise UnpacksToMore(f"it unpacks to more than {_ALWAYS_BYTES} bytes and {_MOST_TIMES} times its size")
        return data


class Limited(io.BufferedIOBase):
    """The data of ``plain``, to be read in pieces. Reads raise ``UnpacksToMore`` beyond the limits."""

    def __init__(self, plain: io.BufferedIOBase, limit: Limit) -> None:
        self._plain, self._limit = plain, limit

    def readable(self) -> bool:
        """It can be read."""
        return True

    def read(self, size: int | None = -1) -> bytes:
        """Return the next data."""
        return self._limit.counted(self._plain.read(size))

    def read1(self, size: int = -1) -> bytes:
        """Return the next data, as many as there are at once."""
        return self._limit.counted(self._plain.read1(size))

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer with as many data as there are at once: all before a damage are read."""
        data = self.read1(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _gunzip(file: IO[bytes]) -> io.BufferedIOBase:
    return gzip.GzipFile(fileobj=file, mode="rb")


class Unpacking(Limited):
    """The unpacked data of ``file``.

    Args:
        most_bytes: limit besides the ratio; ``None``: there is none.
        unpack: opens packed data.
    """

    def __init__(
        self,
        file: IO[bytes],
        most_bytes: int | None = None,
        unpack: Callable[[IO[bytes]], io.BufferedIOBase] = _gunzip,
    ) -> None:
        packed = _Counted(file)
        super().__init__(unpack(cast("IO[bytes]", packed)), Limit(lambda: packed.taken, most_bytes))


class _Counted(io.RawIOBase):
    """Counts what is read of a file, and does not close it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.taken = file, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.taken += len(data)
        return data
