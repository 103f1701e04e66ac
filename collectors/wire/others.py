"""Open, read and create files where another user may have put something else: regular files only, with a limit on size, and without blocking.

A run directory may be shared with a group (``COMMWATCH_GROUP``). Any member can put a FIFO, a link or an endless file in the
place of an expected one. This also runs inside the trainer: standard library only.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


class Refused(OSError):
    """The file must not be read; ``strerror`` is the reason, ``filename`` the path."""


def open_plain(path: Path, *, links: bool = False) -> int:
    """Open a regular file for reading and return its descriptor; never block on another process.

    Args:
        links: follow ``path`` if it is a link; links in its parent directories are always followed.

    Raises:
        Refused: it is not a regular file.
        OSError: it cannot be opened; ELOOP if it is a link and ``links`` is false.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Refused(errno.EINVAL, "not a file", str(path))
    return fd


def check_owner(path: Path, about: os.stat_result) -> None:
    """Accept files of this user, of root, and of the group that shares the directory; root accepts any.

    Raises:
        Refused: another user owns it.
    """
    if os.getuid() == 0 or about.st_uid in (0, os.getuid()):
        return
    directory = path.parent.stat()
    if not (directory.st_mode & stat.S_ISGID and directory.st_gid == about.st_gid):
        why = f"belongs to uid {about.st_uid}; set COMMWATCH_GROUP for trainer and agent"
        raise Refused(errno.EPERM, why, str(path))


def read(path: Path, most_bytes: int) -> bytes:
    """Return the content of a file in a directory that trainers and agent share.

    Raises:
        Refused: not a regular file, larger than ``most_bytes``, or owned by another user.
        OSError: it cannot be read; ELOOP if it is a link.
    """
    with open(open_plain(path), "rb") as file:
        about = os.fstat(file.fileno())
        check_owner(path, about)
        content = file.read(most_bytes + 1) if about.st_size <= most_bytes else b""
        if max(len(content), about.st_size) > most_bytes:
            raise Refused(errno.EFBIG, f"larger than {most_bytes} bytes", str(path))
        return content


def create(path: Path, mode: int) -> int:
    """Create a new file and return a descriptor for writing; an existing file, link or FIFO is removed first.

    Raises:
        OSError: no permission, or another process created the file first.
    """
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    os.fchmod(fd, mode)  # whatever the umask
    return fd
