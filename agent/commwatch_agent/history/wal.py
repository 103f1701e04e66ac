"""Transactions in the write-ahead log of a history: SQLite silently drops all that follows a damaged frame."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

_HEADER, _FRAME, _SUM = struct.Struct(">8I"), struct.Struct(">6I"), struct.Struct(">2I")
#: Its last bit is the byte order of the checksums.
_MAGIC = 0x377F0682
#: Most frames that are read of a log.
_MOST_FRAMES = 1 << 18


class Frames(NamedTuple):
    """Contents of the log at ``path``; frames have numbers from 1 on."""

    path: Path
    #: Its header, and whether that is undamaged, so that SQLite reads the frames.
    head: bytes
    head_valid: bool
    #: The last frame of each transaction since the log's latest reset, and the last frame of all since then.
    commits: tuple[int, ...]
    last: int

    def lost(self, valid: int) -> int:
        """Return how many transactions are lost to damage, if SQLite accepts the first ``valid`` frames; -1: it cannot say.

        Raises:
            OSError: the log cannot be read.
        """
        if valid < 0:  # another connection is about to write the log into the database
            return 0
        if not self.head_valid:
            return len(self.commits)
        if not any(number > valid for number in self.commits):
            return 0
        damaged = self._first_damaged(valid)
        return sum(number >= damaged for number in self.commits)

    def _first_damaged(self, valid: int) -> int:
        """Return the first damaged frame after ``valid``; beyond the last one if there is none.

        The last frame does not count unless the file ends with it: SQLite writes a frame's header before its page, so the agent may have been
        killed between the two.
        """
        magic, _, page, *_ = _HEADER.unpack(self.head)
        size, none = _FRAME.size + page, self.last + 1
        with self.path.open("rb") as file:
            if file.read(_HEADER.size) != self.head:  # another agent has reset the log meanwhile
                return none
            end = file.seek(0, os.SEEK_END)
            file.seek(_HEADER.size + valid * size - (page + _SUM.size if valid else _SUM.size))
            checksum = _SUM.unpack(file.read(_SUM.size))
            file.seek(_HEADER.size + valid * size)
            for number in range(valid + 1, none):
                frame = file.read(size)
                checksum = _checksum(magic, frame[:8] + frame[_FRAME.size :], checksum)
                if frame[8:16] != self.head[16:24] or frame[16:24] != _SUM.pack(*checksum):
                    is_torn = number == self.last and end != _HEADER.size + number * size
                    return none if is_torn else number
        return none


def frames(path: Path) -> Frames:
    """Return the frames of the log at ``path``; none if there is no log.

    Raises:
        OSError: it cannot be read.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return Frames(path, b"", True, (), 0)
    with file:
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size:
            return Frames(path, head, True, (), 0)
        magic, _, page, _, *salts, _, _ = _HEADER.unpack(head)
        head_valid = magic & ~1 == _MAGIC and _checksum(magic, head[:24], (0, 0)) == _SUM.unpack_from(head, 24)
        found, number, last = [], 0, 0
        step = page if head_valid else _page_of(path)
        most = (os.fstat(file.fileno()).st_size - _HEADER.size) // (_FRAME.size + step)
        for number in range(1, min(most, _MOST_FRAMES) + 1):
            _, size, *of_frame, _, _ = _FRAME.unpack(file.read(_FRAME.size))
            # Frames from before a reset of the log have other salts. If the header is damaged, any frame may have been valid.
            if not head_valid or of_frame == salts:
                last = number
                if size:
                    found.append(number)
            file.seek(step, 1)
    return Frames(path, head, head_valid, tuple(found), last)


def _page_of(path: Path) -> int:
    """Return the page size in bytes, from the database's header."""
    with path.with_name(path.name.removesuffix("-wal")).open("rb") as file:
        file.seek(16)
        page = int.from_bytes(file.read(2), "big")
    return 1 << 16 if page == 1 else max(page, 512)


def _checksum(magic: int, data: bytes, before: tuple[int, int]) -> tuple[int, int]:
    """Return SQLite's checksum of ``data``, which continues ``before``."""
    first, second = before
    words = struct.unpack(f"{'>' if magic & 1 else '<'}{len(data) // 4}I", data)
    for even, odd in zip(words[::2], words[1::2], strict=True):
        first = (first + even + second) & 0xFFFFFFFF
        second = (second + odd + first) & 0xFFFFFFFF
    return first, second
