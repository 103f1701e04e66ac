"""New files that are mapped whole, and of which the trainer keeps no descriptor.

A program may close descriptors that it has not opened (``os.closerange``, daemons, launchers) and then has their numbers
for files of its own. So nothing here is done through a descriptor that was opened before: the mapping alone keeps the file
and the lock on it. ``mmap.mmap(fd, size)`` would not do, it duplicates the descriptor and closes the duplicate at its end.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import resource
import struct
import weakref
from pathlib import Path

from commwatch.collectors.wire.handlers import raised_by_handler

#: ``struct flock`` of 64-bit Linux: type, whence, start, length, pid.
FLOCK = struct.Struct("hhqqi4x")
_MAP_FIXED = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p


class MappedFile:
    """A new file and its memory.

    Args:
        path: where the file is made; there must be none.
        size: of the file, in bytes.
        mode: permission bits. Writing is taken from them: only root can then open the file to cut it short, which would
            end the process at its next write (SIGBUS).

    Raises:
        OSError: no room, no rights, or a limit of the process; then there is no file.
    """

    def __init__(self, path: Path, size: int, mode: int) -> None:
        _refuse_past_limit(path, size)
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            os.fchmod(fd, mode & ~0o222)
            # A write to a hole of a full tmpfs is SIGBUS: every page is reserved here, or nothing is.
            os.posix_fallocate(fd, 0, size)
            self._file = _file_of(os.fstat(fd))
            _lay(self.memory, mmap.MAP_SHARED, fd)
            _lock(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        finally:
            os.close(fd)
        _of_this_process[:] = [known for known in _of_this_process if known() is not None]
        _of_this_process.append(weakref.ref(self))

    @property
    def address(self) -> int:
        """Where the memory is."""
        return _address(self.memory)

    def is_at(self, path: Path) -> bool:
        """True while ``path`` is this very file."""
        try:
            return _file_of(path.lstat()) == self._file
        except OSError as error:
            if raised_by_handler(error):
                raise
            return False

    def let_go(self) -> None:
        """Give up the file and its lock. What is written from now on goes nowhere."""
        _lay(self.memory, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)


def lock_owner(fd: int) -> int | None:
    """Who holds a lock on a file: the pid as this process sees it, ``None`` where there is no lock.

    It is -1 for a ``MappedFile``, whose lock is the open file's, and 0 for a process that cannot be seen from here.
    """
    asked = FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else pid


def is_locked(path: Path) -> bool:
    """Whether somebody holds a lock on a file. A mapping keeps its lock on most file systems, and not on overlayfs."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return lock_owner(fd) is not None
    finally:
        os.close(fd)


def _lock(fd: int) -> None:
    """Lock the open file, not the process: no descriptor that is closed gives up such a lock, only the last use of the open file."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


def _lay(memory: mmap.mmap, flags: int, fd: int) -> None:
    """Put a file, or nothing (-1), under the memory."""
    where, size = _address(memory), len(memory)
    if _libc.mmap(where, size, mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_FIXED, fd, 0) != where:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _file_of(about: os.stat_result) -> tuple[int, int]:
    return about.st_dev, about.st_ino


def _refuse_past_limit(path: Path, size: int) -> None:
    """Refuse what the kernel would answer with SIGXFSZ, for which the program may have a handler."""
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most != resource.RLIM_INFINITY and size > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))


#: No WeakSet: its Python runs while a file is freed, and what a signal handler raises there is lost.
_of_this_process: list[weakref.ref[MappedFile]] = []


def _forked() -> None:
    """In a child: the files are the parent's, and are to be without a lock once the parent is gone."""
    for known in _of_this_process:
        mapping = known()
        if mapping is not None:
            with contextlib.suppress(OSError):
                mapping.let_go()
    _of_this_process.clear()


os.register_at_fork(after_in_child=_forked)
