"""Files that somebody else may have made: read without waiting, without growing, and only where they are what they should be.

A run directory may be shared with a group (``COMMWATCH_GROUP``). Any member can put a FIFO, a link or an endless file in the
place of what trainer or agent expect there. Runs inside the trainer, too: standard library only.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


class Refused(OSError):
    """The file is not read; ``strerror`` says why, ``filename`` names it."""


def open_plain(path: Path, *, links: bool = False) -> int:
    """A descriptor to read a regular file with; never waits for another process.

    Args:
        links: follow a link in the place of the file; those on the way to it always count.

    Raises:
        Refused: it is no regular file.
        OSError: it cannot be opened; ELOOP where it is a link.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Refused(errno.EINVAL, "not a file", str(path))
    return fd


def check_owner(path: Path, about: os.stat_result) -> None:
    """Accept a file of this user or of root, and one of the group that shares the directory; root accepts any.

    Raises:
        Refused: it is somebody else's.
    """
    if os.getuid() == 0 or about.st_uid in (0, os.getuid()):
        return
    directory = path.parent.stat()
    if not (directory.st_mode & stat.S_ISGID and directory.st_gid == about.st_gid):
        why = f"belongs to uid {about.st_uid}; set COMMWATCH_GROUP for trainer and agent"
        raise Refused(errno.EPERM, why, str(path))


def read(path: Path, most_bytes: int) -> bytes:
    """The content of a file in a directory that trainers and agent share.

    Raises:
        Refused: no regular file, larger than ``most_bytes``, or somebody else's.
        OSError: it cannot be read; ELOOP where it is a link.
    """
    with open(open_plain(path), "rb") as file:
        about = os.fstat(file.fileno())
        check_owner(path, about)
        content = file.read(most_bytes + 1) if about.st_size <= most_bytes else b""
        if max(len(content), about.st_size) > most_bytes:
            raise Refused(errno.EFBIG, f"larger than {most_bytes} bytes", str(path))
        return content


def create(path: Path, mode: int) -> int:
    """A descriptor to write a new file with; what lay there, a link or a FIFO perhaps, is removed.

    Raises:
        OSError: no rights, or somebody is faster.
    """
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    os.fchmod(fd, mode)  # whatever the umask
    return fd
