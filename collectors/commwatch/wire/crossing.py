"""The gate for files that cross users: the one place that opens what another user may have put there.

A path is walked one folder at a time. Each folder and link is looked at before it is used, and a file is opened only after its kind and its
owner are known, because an open can wait for another process, wake it up, or start a device. Each call names whose files it accepts.
This also runs inside the trainer: standard library only.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from commwatch.wire.handlers import raised_by_handler
from commwatch.wire.writers import others_may_write, unmapped_uid

#: Entries of one folder that are looked at: another user can put any number there.
MOST_ENTRIES = 16_384
#: Links that one path may lead through, as in the kernel.
_MOST_LINKS = 40
#: Look at what a name stands for, without opening it.
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_COPY = ", not to this user or root; use a {} of your own"
_KINDS = {stat.S_IFREG: "not a file", stat.S_IFIFO: "not a pipe", stat.S_IFDIR: "not a folder"}


class Refused(OSError):
    """The file must not be used; ``strerror`` is the reason, ``filename`` the path."""


@dataclass(frozen=True)
class Trust:
    """Whose files are accepted."""

    #: Owners of the file; ``None``: every user, because its content is only data.
    uids: frozenset[int] | None
    #: Members of the group that shares a folder (``COMMWATCH_GROUP``), too: the folder passes its group on to the files in it.
    group: bool = False
    #: No other user can have changed the file: neither it nor a folder above it belongs to others or may be written by them. Links of the
    #: trusted users are followed. Without this, links are followed as long as others cannot write to a folder above them.
    strict: bool = False


#: Files of every user are accepted: they are read as data, within bounds.
ANYBODY = Trust(None)


def operator() -> Trust:
    """Return the trust in files that decide what this process does, such as settings: only this user and root can have written them."""
    return Trust(frozenset({os.geteuid(), 0}), strict=True)


def own() -> Trust:
    """Return the trust in files of this user and of root, in a folder that others may share."""
    return Trust(frozenset({os.geteuid(), 0}))


def trainers() -> Trust:
    """Return the trust in records: those of this user, of root, of the group that shares the folder; for root those of every user."""
    return Trust(None if os.geteuid() == 0 else frozenset({os.geteuid(), 0}), group=True)


def user(uid: int) -> Trust:
    """Return the trust in files of one user, such as those that the user's job names."""
    return Trust(frozenset({uid}))


class Found(NamedTuple):
    """What a path leads to: its descriptor (``O_PATH``), with which nothing is opened yet, its state, and the state of its folder."""

    fd: int
    about: os.stat_result
    folder: os.stat_result


def open_file(
    path: Path, trust: Trust, *, kind: int = stat.S_IFREG, flags: int = os.O_RDONLY, start: int | None = None
) -> int:
    """Open an existing file and return its descriptor; never wait for another process.

    Args:
        kind: ``S_IFREG``, ``S_IFIFO`` or ``S_IFDIR``.
        flags: for ``os.open``.
        start: descriptor of the folder that is the root of the path, as for a process in a container; ``None``: the root of this process.

    Raises:
        Refused: it is of another kind or owner, or others can write where only the trusted users may.
        OSError: it cannot be opened; ELOOP for a link that is not followed.
    """
    with _found(path, trust, start) as found:
        _check(found, trust, path, kind)
        return _reopened(found.fd, flags)


def look(path: Path, trust: Trust, *, kind: int = stat.S_IFREG, start: int | None = None) -> os.stat_result:
    """Return the state of a file without opening it; arguments and errors as for ``open_file``."""
    with _found(path, trust, start) as found:
        _check(found, trust, path, kind)
        return found.about


def read(path: Path, most_bytes: int, trust: Trust) -> bytes:
    """Return the content of a file.

    Raises:
        Refused: as for ``open_file``, or it is larger than ``most_bytes``.
        OSError: it cannot be read; ELOOP for a link that is not followed.
    """
    return _content(open_file(path, trust), most_bytes, path)[0]


def make(path: Path, mode: int) -> int:
    """Make a new file and return a descriptor for reading and writing; errors as for ``create``, and FileExistsError."""
    try:
        where = open_folder(path.parent)
    except OSError as error:
        if raised_by_handler(error) or error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        # A trainer may have one descriptor left. The caller has checked the folder just before.
        return _made(str(path), mode, None)
    try:
        return where.make(path.name, mode)
    finally:
        where.close()


def create(path: Path, mode: int) -> int:
    """Create a new file and return a descriptor for writing; an existing file, link or FIFO is removed first.

    Raises:
        OSError: no permission, another process created the file first, or a folder that others share has a link in the path.
    """
    with folder(path.parent) as where:
        return where.create(path.name, mode)


def lock_file(path: Path, mode: int) -> int:
    """Open a file of this user to lock it, for reading and writing; create it if it is missing. Errors as for ``open_file``."""
    while True:
        try:
            return open_file(path, own(), flags=os.O_RDWR)
        except FileNotFoundError as error:
            if raised_by_handler(error):
                raise
        try:
            return make(path, mode)
        except FileExistsError as error:
            if raised_by_handler(error):
                raise


def write(path: Path, text: str, mode: int) -> None:
    """Write a file atomically, with exactly these permission bits whatever the umask; errors as for ``create``, or no space."""
    with folder(path.parent) as where:
        where.write(path.name, text.encode(), mode)


@contextmanager
def folder(path: Path, trust: Trust = ANYBODY) -> Iterator[Folder]:
    """Yield a folder, to work on the files in it; errors as for ``open_file``.

    Args:
        trust: in the folder. Each file in it is checked by itself.
    """
    where = open_folder(path, trust)
    try:
        yield where
    finally:
        where.close()


def open_folder(path: Path, trust: Trust = ANYBODY) -> Folder:
    """Return a folder as ``folder`` does; the caller closes it."""
    return Folder(open_file(path, trust, kind=stat.S_IFDIR, flags=os.O_RDONLY | os.O_DIRECTORY), path)


class Folder:
    """An open folder: it stays the same one, whatever others put in the place of its path. No name in it is followed as a link."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd, self.path = fd, path
        self.about = os.fstat(fd)

    def names(self, pattern: str, most: int = MOST_ENTRIES) -> tuple[int, list[str]]:
        """Return how many entries were looked at, at most ``most``, and the names that match, sorted; hidden ones only if the pattern is."""
        with os.scandir(self._fd) as entries:
            names = [entry.name for entry in islice(entries, most)]
        found = (name for name in fnmatch.filter(names, pattern) if pattern[0] == "." or name[0] != ".")
        return len(names), sorted(found)

    def folder(self, name: str) -> Folder:
        """Return a folder in this one; the caller closes it. Errors as for ``open_folder``."""
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
        return Folder(fd, self.path / name)

    def is_removed(self) -> bool:
        """Return whether the folder has been removed; until then, take note of a change of its owner or mode."""
        self.about = os.fstat(self._fd)
        return not self.about.st_nlink

    def entries(self) -> Iterator[os.DirEntry[str]]:
        """Return an iterator over all entries, for which the folder must stay open; the caller bounds how many it takes at a time."""
        return os.scandir(self._fd)

    def close(self) -> None:
        """Close the folder."""
        os.close(self._fd)

    def look(self, name: str) -> os.stat_result:
        """Return the state of a file, or of a link itself; raise ``OSError`` if there is none."""
        return os.stat(name, dir_fd=self._fd, follow_symlinks=False)

    def open_file(self, name: str, trust: Trust) -> int:
        """Open a regular file for reading; errors as for the function of this name."""
        fd = os.open(name, _LOOK, dir_fd=self._fd)
        try:
            _check(Found(fd, os.fstat(fd), self.about), trust, self.path / name, stat.S_IFREG)
            return _reopened(fd, os.O_RDONLY)
        finally:
            os.close(fd)

    def read(self, name: str, most_bytes: int, trust: Trust) -> tuple[bytes, int]:
        """Return the content of a file, and the uid of its owner; errors as for the function of this name."""
        return _content(self.open_file(name, trust), most_bytes, self.path / name)

    def make(self, name: str, mode: int) -> int:
        """Make a file as the function of this name does."""
        return _made(name, mode, self._fd)

    def create(self, name: str, mode: int) -> int:
        """Create a file as the function of this name does."""
        self.remove(name)
        return self.make(name, mode)

    def write(self, name: str, content: bytes, mode: int) -> None:
        """Write a file as the function of this name does."""
        hidden = f".{name}.{os.getpid()}"
        try:
            with os.fdopen(self.create(hidden, mode), "wb") as file:
                file.write(content)
            self.rename(hidden, name)
        finally:
            self.remove(hidden)

    def rename(self, name: str, to: str) -> None:
        """Rename a file within the folder, in place of another of that name; raise ``OSError`` if that fails."""
        os.rename(name, to, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def remove(self, name: str) -> None:
        """Remove a file, link or FIFO if there is one; raise ``OSError`` if that fails."""
        try:
            os.unlink(name, dir_fd=self._fd)
        except FileNotFoundError as error:
            if raised_by_handler(error):
                raise


class KeptFolder:
    """A folder that stays open between uses, because the walk along its path costs more than most of them.

    Args:
        uses: after so many the path is walked again, because it may lead elsewhere by then.
    """

    def __init__(self, path: Path, uses: int = 16) -> None:
        self.path, self._uses, self._left = path, uses, 0
        self._folder: Folder | None = None

    def folder(self) -> Folder:
        """Return the folder, which the next call may close; errors as for ``open_folder``."""
        if self._folder is None or not self._left or self._folder.is_removed():
            self.close()
            self._folder, self._left = open_folder(self.path), self._uses
        self._left -= 1
        return self._folder

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the folder; that is also done when nothing refers to this any more."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None


def _made(name: str, mode: int, folder_fd: int | None) -> int:
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder_fd)
    os.fchmod(fd, mode)  # whatever the umask
    return fd


def _content(fd: int, most_bytes: int, path: Path) -> tuple[bytes, int]:
    """Return the content of an open file and the uid of its owner, and close it."""
    with open(fd, "rb") as file:
        about = os.fstat(fd)
        content = file.read(most_bytes + 1) if about.st_size <= most_bytes else b""
    if max(len(content), about.st_size) > most_bytes:
        raise Refused(errno.EFBIG, f"larger than {most_bytes} bytes", str(path))
    return content, about.st_uid


def _reopened(fd: int, flags: int) -> int:
    """Open what an ``O_PATH`` descriptor stands for: that very file, whatever has its name by now."""
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)


def _check(found: Found, trust: Trust, path: Path, kind: int) -> None:
    """Raise ``Refused`` unless the file is of this kind, and the trusted users have written it."""
    about = found.about
    if stat.S_IFMT(about.st_mode) != kind:
        link = stat.S_ISLNK(about.st_mode)
        raise Refused(
            errno.ELOOP if link else errno.EINVAL, os.strerror(errno.ELOOP) if link else _KINDS[kind], str(path)
        )
    shared = trust.group and bool(found.folder.st_mode & stat.S_ISGID) and found.folder.st_gid == about.st_gid
    if trust.uids is not None and about.st_uid not in trust.uids and not shared:
        remedy = (
            "; set COMMWATCH_GROUP for trainer and agent"
            if trust.group
            else _COPY.format("file")
            if trust.strict
            else ""
        )
        raise Refused(errno.EPERM, f"belongs to uid {about.st_uid}{remedy}", str(path))
    if trust.strict and kind != stat.S_IFDIR and others_may_write(found.fd, about):
        raise Refused(errno.EPERM, f"others may write to it; chmod go-w {path}", str(path))


# -- the walk ---------------------------------------------------------------------------------


@contextmanager
def _found(path: Path, trust: Trust, start: int | None) -> Iterator[Found]:
    root = os.open("/", _LOOK) if start is None else os.dup(start)
    walk = _Walk(path.absolute() if start is None else path, trust, root)
    try:
        yield walk.to_its_end()
    finally:
        walk.close()


class _Walk:
    """A walk along one path. It holds few descriptors at a time: of the root, the latest folder, and what was found in it."""

    def __init__(self, path: Path, trust: Trust, root: int) -> None:
        self._path, self._trust, self._root = path, trust, root
        #: Besides that of the root.
        self._open: list[int] = []
        #: Others can write to a folder that was passed: what is below it may be of anybody.
        self._shared = False
        self._links = 0

    def to_its_end(self) -> Found:
        """Return what the path leads to; raise ``Refused`` or ``OSError``."""
        parts = deque(self._path.parts)
        about = os.fstat(self._root)
        top = here = Found(self._root, about, about)
        self._enter(top)
        while parts:
            name = parts.popleft()
            if name == "/" or (name == ".." and os.path.samestat(here.about, about)):
                here = top
                self._close()
                continue
            found = self._step(here, name)
            if stat.S_ISLNK(found.about.st_mode):
                parts.extendleft(reversed(self._target(found).parts))
                os.close(self._open.pop())
                continue
            if stat.S_ISDIR(found.about.st_mode):
                self._enter(found)
            here = found
            self._close(all_but=1)
        return here

    def _step(self, here: Found, name: str) -> Found:
        try:
            fd = os.open(name, _LOOK, dir_fd=here.fd)
        except OSError as error:
            if not raised_by_handler(error):
                error.filename = str(self._path)
            raise
        self._open.append(fd)
        return Found(fd, os.fstat(fd), here.about)

    def _enter(self, found: Found) -> None:
        """Check a folder."""
        about, trust = found.about, self._trust
        stranger = trust.uids is not None and about.st_uid not in trust.uids and about.st_uid != 0
        if not trust.strict:
            self._shared |= stranger or bool(about.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
        elif stranger and about.st_uid != unmapped_uid():
            why = f"its folder {_path_of(found.fd)} belongs to uid {about.st_uid}{_COPY.format('folder')}"
            raise Refused(errno.EPERM, why, str(self._path))
        elif not about.st_mode & stat.S_ISVTX and others_may_write(found.fd, about):
            where = _path_of(found.fd)
            raise Refused(errno.EPERM, f"others may write to its folder {where}; chmod go-w {where}", str(self._path))

    def _target(self, link: Found) -> Path:
        """Return where a link leads to, if it may be followed."""
        self._links += 1
        uids = self._trust.uids
        of_others = uids is not None and link.about.st_uid not in {*uids, 0}
        if self._links > _MOST_LINKS or self._shared or of_others:
            raise Refused(errno.ELOOP, f"{os.strerror(errno.ELOOP)}: others may have made one", str(self._path))
        return Path(os.readlink("", dir_fd=link.fd))

    def close(self) -> None:
        """Close all descriptors."""
        self._close()
        os.close(self._root)

    def _close(self, all_but: int = 0) -> None:
        """Close the descriptors besides the latest ``all_but``."""
        while len(self._open) > all_but:
            os.close(self._open.pop(0))


def _path_of(fd: int) -> str:
    """Return the path of a folder, for a message."""
    return os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
