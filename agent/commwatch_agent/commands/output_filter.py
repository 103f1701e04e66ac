"""NCCL's debug files in ``commwatch run``: shown where the user would see them without commwatch, and limited in size.

NCCL writes the files itself, so the job's own output does not pass through this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import select
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from commwatch.wire import crossing

#: Bytes of a file that stay on disk before the offset shown so far, because the agent may lag by as much.
MOST_KEPT_BYTES = 64 << 20
_BLOCK = 1 << 20
#: Lines that NCCL writes only if the job itself asked for more than warnings.
_MORE = re.compile(rb"NCCL (?:INFO|CALL|TRACE)")
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2

#: Which files the user sees: all, those with more than warnings, or none.
Shown = Literal["all", "more", "none"]


@dataclass
class _File:
    shown: bool
    #: Bytes processed so far, and written to the target if the file is shown.
    offset: int = 0
    #: Bytes at the file's beginning whose disk space was released.
    freed: int = 0


class Passing:
    """Copies lines that are added to the files of a directory to a file descriptor.

    Args:
        directory: holds NCCL's debug files of one job and nothing else.
        target: the file descriptor to write to.
        shown: which files the user would see without commwatch.
    """

    def __init__(self, directory: Path, target: int, shown: Shown) -> None:
        self._directory, self._shown = directory, shown
        #: ``None`` after the reader of the target has closed it.
        self._target: int | None = target
        self._files: dict[str, _File] = {}

    def tick(self, final: bool = False) -> None:
        """Copy new text; blocks while the reader of the target does not read.

        Args:
            final: all writers have ended, so copy a last line without a newline, too.
        """
        try:
            names = sorted(os.listdir(self._directory))  # noqa: PTH208 - names, not paths
        except OSError:
            return
        for name in names:
            with contextlib.suppress(OSError):
                self._read_on(name, final)

    def _read_on(self, name: str, final: bool) -> None:
        path = self._directory / name
        about = path.lstat()
        file = self._files.setdefault(name, _File(self._shown == "all"))
        if about.st_size == file.offset:
            return
        fd = crossing.open_file(path, crossing.own())
        try:
            if about.st_size < file.offset:  # truncated by a new process with an equal pid
                file.offset = file.freed = 0
            if self._shown == "more" and not file.shown and _has_more(fd, file.offset, about.st_size):
                file.shown, file.offset = True, 0
            file.offset = self._copy(fd, file.offset, about.st_size, final) if file.shown else about.st_size
        finally:
            os.close(fd)
        if file.offset - file.freed > MOST_KEPT_BYTES * 5 // 4:
            file.freed = file.offset - MOST_KEPT_BYTES
            _free(path, file.freed)

    def _copy(self, fd: int, offset: int, end: int, final: bool) -> int:
        """Write the whole lines from ``offset`` on to the target; return the offset after them."""
        while offset < end and (data := os.pread(fd, min(_BLOCK, end - offset), offset)):
            complete = data if final else data[: data.rfind(b"\n") + 1]
            if not complete and len(data) < _BLOCK:
                break
            complete = complete or data  # a line longer than a block
            offset += len(complete)
            if self._target is not None and not _write(self._target, complete.replace(b"\0", b"")):
                self._target = None
        return offset


def _free(path: Path, until: int) -> None:
    """Release the disk space of the first ``until`` bytes if possible; the length stays, so NCCL is not affected."""
    fd = crossing.open_file(path, crossing.own(), flags=os.O_WRONLY)
    try:
        how = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
        ctypes.CDLL(None).fallocate(fd, how, ctypes.c_int64(0), ctypes.c_int64(until))
    finally:
        os.close(fd)


def _has_more(fd: int, offset: int, end: int) -> bool:
    """Return whether NCCL wrote more than warnings from ``offset`` on."""
    while offset < end and (data := os.pread(fd, _BLOCK, offset)):
        if _MORE.search(data):
            return True
        offset += len(data)
    return False


def _write(target: int, data: bytes) -> bool:
    """Write all of ``data``; return False if the reader is gone. What a full disk rejects stays in NCCL's file."""
    while data:
        try:
            data = data[os.write(target, data) :]
        except BlockingIOError:  # another process that shares the terminal or pipe made it non-blocking
            until_writable = select.poll()  # not select(), which refuses descriptors above 1023
            until_writable.register(target, select.POLLOUT)
            until_writable.poll()
        except OSError as error:
            return error.errno not in (errno.EPIPE, errno.EIO, errno.EBADF)
    return True
