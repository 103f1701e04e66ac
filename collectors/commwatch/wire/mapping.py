"""Create files that are mapped whole, without an open descriptor in the trainer.

A program may close descriptors that it did not open (``os.closerange``, daemons, launchers) and reuse their numbers for
its own files. So no descriptor is kept: the mapping alone keeps the file and the lock on it. ``mmap.mmap(fd, size)``
does not work: it duplicates the descriptor, and closes the duplicate when the map ends.
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

from commwatch.wire import crossing
from commwatch.wire.handlers import raised_by_handler

#: ``struct flock`` of 64-bit Linux: type, whence, start, length, pid.
FLOCK = struct.Struct("hhqqi4x")
_MAP_FIXED = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p


class MappedFile:
    """A new file and its memory.

    Args:
        path: of the new file; it must not exist yet.
        size: of the file, in bytes.
        mode: permission bits without those for writing, so that only root can truncate the file, which would end the
            process at its next write (SIGBUS).

    Raises:
        OSError: no space, no permission, or a limit of the process; no file is left behind.
    """

    def __init__(self, path: Path, size: int, mode: int) -> None:
        _refuse_past_limit(path, size)
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        fd = crossing.make(path, mode & ~0o222)
        try:
            # A write to a hole of a full tmpfs raises SIGBUS, so reserve every page now.
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
        """Address of the memory."""
        return _address(self.memory)

    def is_at(self, path: Path) -> bool:
        """Return whether ``path`` still refers to this file."""
        try:
            return _file_of(path.lstat()) == self._file
        except OSError as error:
            if raised_by_handler(error):
                raise
            return False

    def let_go(self) -> None:
        """Release the file and its lock; later writes to the memory are discarded."""
        _lay(self.memory, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)


def lock_owner(fd: int) -> int | None:
    """Return the pid that holds a lock on a file, as seen by this process; ``None`` if there is no lock.

    It is -1 for a ``MappedFile``, whose lock belongs to the open file, and 0 for a process outside this pid namespace.
    """
    request = FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, request))
    return None if kind == fcntl.F_UNLCK else pid


def is_locked(path: Path) -> bool:
    """Return whether a file is locked. A mapping keeps its lock on most file systems, but not on overlayfs."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return lock_owner(fd) is not None
    finally:
        os.close(fd)


def _lock(fd: int) -> None:
    """Lock the open file, not the process: the lock ends with the last use of the open file, not when a descriptor is closed."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


def _lay(memory: mmap.mmap, flags: int, fd: int) -> None:
    """Map a file, or anonymous memory (``fd`` -1), at the address of ``memory``."""
    where, size = _address(memory), len(memory)
    if _libc.mmap(where, size, mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_FIXED, fd, 0) != where:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _file_of(about: os.stat_result) -> tuple[int, int]:
    return about.st_dev, about.st_ino


def _refuse_past_limit(path: Path, size: int) -> None:
    """Raise ``OSError`` past RLIMIT_FSIZE: the kernel would send SIGXFSZ, which the program may handle."""
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most != resource.RLIM_INFINITY and size > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))


#: Not a WeakSet: its Python code runs while a file is freed, and an exception of a signal handler is lost there.
_of_this_process: list[weakref.ref[MappedFile]] = []


def _forked() -> None:
    """In a forked child: release the parent's files, so that their locks end with the parent."""
    for known in _of_this_process:
        mapping = known()
        if mapping is not None:
            with contextlib.suppress(OSError):
                mapping.let_go()
    _of_this_process.clear()


os.register_at_fork(after_in_child=_forked)
