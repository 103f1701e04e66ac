"""Transactions in the write-ahead log of a history: SQLite silently drops all that follows a damaged frame."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

_HEADER, _FRAME = struct.Struct(">8I"), struct.Struct(">6I")
#: Its last bit is the byte order of the checksums.
_MAGIC = 0x377F0682
#: Most frames that are read of a log.
_MOST_FRAMES = 1 << 18


class Frames(NamedTuple):
    """Contents of a log; ``commits``: number (from 1) of the last frame of each transaction since its latest reset."""

    #: Its header is undamaged, so SQLite reads the frames.
    head_valid: bool
    commits: tuple[int, ...]

    def lost(self, valid: int) -> int:
        """Return how many transactions are committed beyond the first ``valid`` frames, which SQLite accepts."""
        return sum(number > (valid if self.head_valid else 0) for number in self.commits)


def frames(path: Path) -> Frames:
    """Return the frames of the log at ``path``; none if there is no log.

    Raises:
        OSError: it cannot be read.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return Frames(True, ())
    with file:
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size:
            return Frames(True, ())
        magic, _, page, _, *salts, _, _ = _HEADER.unpack(head)
        head_valid = _head_is_valid(head, magic)
        found, number = [], 0
        step = page if head_valid else _page_of(path)
        while number < _MOST_FRAMES and len(about := file.read(_FRAME.size)) == _FRAME.size:
            number += 1
            _, size, *of_frame, _, _ = _FRAME.unpack(about)
            # Frames from before a reset of the log have other salts. If the header is damaged, any frame may have been valid.
            if size and (not head_valid or of_frame == salts):
                found.append(number)
            file.seek(step, 1)
    return Frames(head_valid, tuple(found))


def _page_of(path: Path) -> int:
    """Return the page size in bytes, from the database's header."""
    with path.with_name(path.name.removesuffix("-wal")).open("rb") as file:
        file.seek(16)
        page = int.from_bytes(file.read(2), "big")
    return 1 << 16 if page == 1 else max(page, 512)


def _head_is_valid(head: bytes, magic: int) -> bool:
    if magic & ~1 != _MAGIC:
        return False
    order = ">" if magic & 1 else "<"
    words = struct.unpack(f"{order}6I", head[:24])
    first = second = 0
    for even, odd in zip(words[::2], words[1::2], strict=True):
        first = (first + even + second) & 0xFFFFFFFF
        second = (second + odd + first) & 0xFFFFFFFF
    return (first, second) == struct.unpack(">2I", head[24:32])
