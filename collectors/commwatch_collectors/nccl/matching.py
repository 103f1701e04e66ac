"""The log files of a job: where its user said they are, in files that belong to this user."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import NamedTuple

from commwatch.wire import crossing
from commwatch.wire.crossing import ANYBODY, Folder, Refused

#: Most parts of a path that may have wildcards: in a request of another user, and of the user that this process has.
_LEVELS, _OWN_LEVELS = 1, 4
#: A wildcard of ``glob`` that stands for itself.
_ESCAPED = re.compile(r"\[([*?[])\]")


class Output(NamedTuple):
    """What is read of a file that is the output of processes."""

    #: Device and number of its inode: another file of that name is not read.
    inode: tuple[int, int]
    #: Its bytes before the first of the processes; they are of others.
    start: int
    #: The processes have ended, or others write to it, too: what is added from now on is not read.
    is_over: bool = False
    #: The processes' NCCL writes to files of its own: here are at most copies of its lines, which are not read.
    without_nccl: bool = False


@dataclass(frozen=True)
class LogPattern:
    """The files of one user that match a pattern of ``glob``."""

    pattern: str
    #: The user whose files are meant; others that match are left out.
    uid: int
    #: ``None``: all of each file is read.
    output: Output | None = None

    @property
    def folder(self) -> Path | None:
        """The folder of the files; ``None`` if it has wildcards itself."""
        parts = [literal(part) for part in PurePath(self.pattern).parts[:-1]]
        return None if None in parts else Path(*(part or "" for part in parts))

    def files(self, left: list[int]) -> Iterator[tuple[Folder, str]]:
        """Yield the names that match, each with its folder, which is open until the next one.

        Only folders in which the user may write are searched, because the user has no files in others.

        Args:
            left: one number, the entries of folders that may still be looked at; those that are looked at are taken from it.

        Raises:
            Refused: too many parts of the path have wildcards, or the user cannot write in the folder that would be searched.
            OSError: a folder cannot be opened.
        """
        parts = PurePath(self.pattern).parts
        wild = [at for at, part in enumerate(parts) if literal(part) is None]
        levels = _OWN_LEVELS if self.uid == os.geteuid() else _LEVELS
        if len(wild) > levels:
            why = f"{len(wild)} parts of the path have wildcards, and at most {levels} may have"
            raise Refused(errno.EINVAL, why, self.pattern)
        first = wild[0] if wild else len(parts) - 1
        with crossing.folder(Path(*(literal(part) or "" for part in parts[:first])), ANYBODY) as where:
            yield from _below(where, parts[first:], self.uid, left)


def _below(where: Folder, parts: tuple[str, ...], uid: int, left: list[int]) -> Iterator[tuple[Folder, str]]:
    """Yield the names below ``where``; ``left``: how many entries may still be looked at."""
    name = literal(parts[0])
    if name is not None:
        names = [name]
    elif _may_write(where.about, uid):
        seen, names = where.names(parts[0], left[0])
        left[0] -= seen
    else:
        raise Refused(errno.EACCES, "the job's user cannot write there", str(where.path))
    for name in names:
        if len(parts) == 1:
            yield where, name
            continue
        with suppress(OSError), crossing.folder(where.path / name, ANYBODY) as deeper:
            yield from _below(deeper, parts[1:], uid, left)


def _may_write(about: os.stat_result, uid: int) -> bool:
    """Return whether a user may be able to create files in a folder: it is the user's, or others may, too."""
    return uid in (0, about.st_uid) or bool(about.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def literal(part: str) -> str | None:
    """Return the only name that a part of a pattern matches; ``None``: it has wildcards.

    >>> literal("[[]nccl].log"), literal("nccl.[0-9]*")
    ('[nccl].log', None)
    """
    return None if re.search(r"[*?[]", _ESCAPED.sub("", part)) else _ESCAPED.sub(r"\1", part)
