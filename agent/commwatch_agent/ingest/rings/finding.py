"""Finds new ring files in the run directory, and decides which of them may be opened.

Anyone who may write to the directory can put any number of files there. So a look takes a bounded number of entries and goes on at
the next one, and each user may have a number of open rings and of refused files that leaves room for others.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from commwatch.wire import crossing
from commwatch_agent.model.shares import Room, fair
from commwatch_agent.text.units import counted

log = logging.getLogger("commwatch")
#: Temporary errors when a directory or a ring is opened.
PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
#: Entries that are taken of the directory in one look; most refused files of one user, and how many of them the log names.
_ENTRIES, MOST_REFUSED, _MOST_LOGGED = 8192, 4096, 100


class Finder:
    """Finds new rings.

    Args:
        directory: holds the ``*.ring`` files.
        most_rings: open at a time.
    """

    def __init__(self, directory: Path, most_rings: int) -> None:
        self._most_rings = most_rings
        #: By name and inode of refused files, the user who owns them; and the number of them by user.
        self._refused: dict[tuple[str, int], int] = {}
        self._refused_of: Counter[int] = Counter()
        #: A look that goes on, and what it has found so far: new files by name, and refused ones that are still there.
        self._look: Iterator[os.DirEntry[str]] | None = None
        self._kept = crossing.KeptFolder(directory)
        #: The folder of the rings as of the latest look, to read what lies in it; ``None``: there is none, or it could not be opened.
        self.rings: crossing.Folder | None = None
        self._fresh: dict[str, tuple[int, os.DirEntry[str]]] = {}
        self._seen: set[tuple[str, int]] = set()
        #: Number of files that could not be read.
        self.bad = 0
        #: Why some files are not read yet; ``None``: all are.
        self.waiting: str | None = None

    def find(
        self, known: Collection[str], open_owners: Callable[[], Iterable[int]]
    ) -> dict[int, list[os.DirEntry[str]]]:
        """Return the files to open, by owner.

        Args:
            known: names of the rings that have been opened.
            open_owners: returns the owner of each open ring.

        Raises:
            OSError: the directory cannot be read.
        """
        try:
            over = self._take_entries(known)
        except FileNotFoundError:
            self._look = None
            self._fresh, self._seen = {}, set()
            return {}
        except OSError as error:
            self._look = None
            if error.errno not in PASSING:
                raise
            self.waiting = f"cannot look for rings: {error}"
            return {}
        if over:
            self._forget_refused()
        if self._fresh:
            return self._with_room(open_owners())
        self.waiting = None
        return {}

    def _take_entries(self, known: Collection[str]) -> bool:
        """Take some entries of the directory; return whether they were the last."""
        if self._look is None:
            self.rings = None
            self.rings = self._kept.folder()
            self._look, self._fresh, self._seen = self.rings.entries(), {}, set()
        for number, entry in enumerate(self._look, start=1):
            if entry.name.endswith(".ring") and not entry.name.startswith("."):
                self._take(entry, known)
            if number >= _ENTRIES:
                return False
        self._look = None
        return True

    def _take(self, entry: os.DirEntry[str], known: Collection[str]) -> None:
        at = entry.name, entry.inode()
        if at in self._refused:
            self._seen.add(at)
        elif entry.name not in known:
            try:
                owner = entry.stat(follow_symlinks=False).st_uid
            except FileNotFoundError:
                return
            if self._refused_of[owner] < MOST_REFUSED:
                self._fresh[entry.name] = owner, entry

    def _forget_refused(self) -> None:
        """Forget refused files that no longer exist."""
        for at in self._refused.keys() - self._seen:
            self._refused_of[self._refused.pop(at)] -= 1

    def _with_room(self, open_owners: Iterable[int]) -> dict[int, list[os.DirEntry[str]]]:
        """Return the new files for which there is room, the owners in turn; the others wait."""
        room = Room(self._most_rings)
        for owner in open_owners:
            room.hold(owner, 1)
        wanted: dict[int, list[os.DirEntry[str]]] = {}
        for name in sorted(self._fresh):
            owner, entry = self._fresh[name]
            wanted.setdefault(owner, []).append(entry)
        owner_of = {entry.name: owner for owner, entry in self._fresh.values()}
        found: dict[int, list[os.DirEntry[str]]] = {}
        for entry in fair(wanted):
            owner = owner_of[entry.name]
            if room.move(owner, 1):
                found.setdefault(owner, []).append(entry)
        left = len(self._fresh) - sum(map(len, found.values()))
        self.waiting = (
            f"{counted(left, 'ring')} wait{'s' * (left == 1)} until others end: at most {self._most_rings} are read at a time"
            if left > 0
            else None
        )
        return found

    def opened(self, entry: os.DirEntry[str]) -> None:
        """Note that a file is open, or gone."""
        self._fresh.pop(entry.name, None)

    def refuse(self, entry: os.DirEntry[str], why: Exception) -> None:
        """Note that a file is no ring, and log it."""
        owner, _ = self._fresh.pop(entry.name)
        self.ignore(entry.name, entry.inode(), owner)
        self.bad += 1
        if self._refused_of[owner] < _MOST_LOGGED:
            log.warning("cannot read ring %s: %s", entry.name, why)
        elif self._refused_of[owner] == _MOST_LOGGED:
            log.warning("cannot read ring %s: %s; further ones of uid %d are only counted", entry.name, why, owner)

    def ignore(self, name: str, inode: int, owner: int) -> None:
        """Do not open a file again as long as it is there."""
        self._seen.add((name, inode))
        self._refused[name, inode] = owner
        self._refused_of[owner] += 1
