"""Writes to descriptor 2 as long as it is the standard error with which the process came to the probe.

The descriptor is the program's. It may close it, and the next file that it opens, perhaps a checkpoint, gets its number. So this module
remembers the open file behind the number when it is first imported, at the latest as the probe is installed, and compares before each
line. ``native/standard_error.h`` has the same rules for the lines of the native hook.

What remains: a file that native code opens without ``O_CLOEXEC``, over a descriptor 2 that was closed before the probe came, if standard
error was a regular file, too; and one that gets device and inode of the standard error that was closed and deleted, on a file system
that does not know when a file was created (NFS before 4.2).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import select
import stat
import sys
from typing import NamedTuple

NUMBER = 2
#: Most bytes of a line: a pipe that has room at all takes as many without blocking.
MOST_BYTES = select.PIPE_BUF
_AT_EMPTY_PATH, _AT_STATX_DONT_SYNC, _STATX_BTIME = 0x1000, 0x4000, 0x800
#: Where ``struct statx`` has its mask and the time of creation, and its size.
_BORN_AT, _STATX_BYTES = 80, 256

_libc = ctypes.CDLL(None)


class OpenFile(NamedTuple):
    """Distinguishes an open file from another one that later gets its number."""

    device: int
    inode: int
    #: Its type, as in ``st_mode``.
    kind: int
    #: Access mode and ``O_APPEND``.
    flags: int
    #: When the file was created; 0 if the file system does not know.
    born_ns: int

    @classmethod
    def of(cls, number: int) -> OpenFile:
        """Return the open file that a descriptor has now; raise ``OSError`` if it has none."""
        about = os.fstat(number)
        flags = fcntl.fcntl(number, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND)
        return cls(about.st_dev, about.st_ino, stat.S_IFMT(about.st_mode), flags, _born_ns(number))


def _born_ns(number: int) -> int:
    """Return when a file was created; 0 if that is not known. Its inode number may have been another file's before."""
    found = ctypes.create_string_buffer(_STATX_BYTES)
    ask = getattr(_libc, "statx", None)  # glibc 2.28
    if ask is None or ask(number, b"", _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC, _STATX_BTIME, found):
        return 0
    if not ctypes.c_uint32.from_buffer(found).value & _STATX_BTIME:
        return 0
    seconds, part = ctypes.c_int64.from_buffer(found, _BORN_AT), ctypes.c_uint32.from_buffer(found, _BORN_AT + 8)
    return seconds.value * 1_000_000_000 + part.value


def _inherited() -> OpenFile | None:
    """Return the open file at descriptor 2; ``None`` if there is none, or if it was opened in this process.

    A file that came through ``exec`` is not closed by ``exec``. All that Python opens is, but for ``os.dup2``.
    """
    try:
        return None if fcntl.fcntl(NUMBER, fcntl.F_GETFD) & fcntl.FD_CLOEXEC else OpenFile.of(NUMBER)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return None


def _found() -> OpenFile | None:
    """Return standard error as the process came to us; ``None`` if it had none, or its number has already been used for another file."""
    stream = sys.__stderr__
    if stream is None or stream.closed:  # not open when Python began
        return None
    found = _inherited()
    # Python has looked at its beginning whether standard error is a file in which it can seek, and remembers that.
    if found is not None and stat.S_ISREG(found.kind) and not stream.seekable():
        return None
    return found


#: Standard error when the probe came; ``None``: there was none, and there never is any.
AT_START = _found()


def is_standard_error() -> bool:
    """Return whether descriptor 2 still is the standard error with which the process came."""
    return AT_START is not None and _inherited() == AT_START


def accepts(number: int, size: int) -> bool:
    """Return whether so many bytes can be written now: without blocking, and without a signal that may end the process.

    The signals are SIGPIPE, for a pipe without a reader, and SIGXFSZ, for a file beyond ``RLIMIT_FSIZE``.
    """
    ready = select.poll()
    ready.register(number, select.POLLOUT)
    if ready.poll(0) != [(number, select.POLLOUT)]:  # also an error, or a pipe without a reader
        return False
    most, about = resource.getrlimit(resource.RLIMIT_FSIZE)[0], os.fstat(number)
    if most == resource.RLIM_INFINITY or not stat.S_ISREG(about.st_mode):
        return True
    return max(about.st_size, os.lseek(number, 0, os.SEEK_CUR)) + size <= most


def write(line: bytes) -> None:
    """Write a line to standard error, in one write; drop it if descriptor 2 is another file by now, or does not accept it.

    It is checked and written through a duplicate, because another thread may close the number between the two.

    Raises:
        OSError: the write has failed.
    """
    if not is_standard_error():
        return
    line = line if len(line) <= MOST_BYTES else line[: MOST_BYTES - 1] + b"\n"
    try:
        number = fcntl.fcntl(NUMBER, fcntl.F_DUPFD_CLOEXEC, NUMBER + 1)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.EINVAL):
            raise
        number = NUMBER  # none is left, so that another file hardly gets this one at this moment
    try:
        if OpenFile.of(number) == AT_START and accepts(number, len(line)):
            os.write(number, line)
    finally:
        if number != NUMBER:
            os.close(number)
