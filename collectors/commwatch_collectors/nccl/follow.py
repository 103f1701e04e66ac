"""Follow log files while they are written: late, rotated, truncated or endless ones. The cost of a tick is bounded."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from commwatch.wire import crossing
from commwatch.wire.crossing import MOST_ENTRIES, Folder, Trust
from commwatch_collectors.nccl.input.lines import Lines
from commwatch_collectors.nccl.matching import LogPattern, Output

#: Most bytes read in one tick, over all files; the rest waits for the next.
TICK_BYTES = 512 * 1024
#: Bytes. If a file has more unread, only the latest ``_KEPT_BEHIND`` are read; the others are skipped and counted.
MOST_BEHIND = 64 << 20
_KEPT_BEHIND = 4 << 20
_CHUNK = 128 * 1024
#: Files of one job that are open at a time, and quiet ones that are known beside them.
MOST_FILES, _MOST_QUIET = 256, 1024
#: See ``Follower.of_time`` and ``quick_s``.
OF_TIME, QUICK_S = 0.05, 0.005
_TOO_MANY = "(too many)"
#: Bytes of the incomplete line that a quiet file keeps.
_MOST_REST = 1024
#: Ticks without a new byte after which a deleted file is closed.
_PATIENCE = 120
#: Most bytes before the begin of an output in which the lines are counted: of one, and of all in one look.
MOST_COUNTED = 64 << 20
#: What a line of NCCL has.
_NCCL = re.compile("NCCL (?:INFO|WARN|TRACE|CALL|ABORT) ")


@dataclass
class _File:
    path: str
    fd: int
    offset: int = 0
    lines: Lines = field(default_factory=Lines)
    idle: int = 0
    #: Bytes of the file when its reading stopped.
    size: int = 0
    #: Where its reading ends; ``None``: where the file does.
    until: int | None = None
    without_nccl: bool = False
    #: Its path as text that can be sent and stored: file names may be any bytes.
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.begin(0)

    def begin(self, at: int, *, is_counted: bool = True) -> None:
        """Begin to read at an offset; raise ``OSError`` if that fails. With too much before it, or if told so, lines are counted from there."""
        self.name = os.fsencode(self.path).decode(errors="replace")
        first = 1
        if not is_counted or at > MOST_COUNTED:
            self.name = f"{self.name} from byte {at}"
        else:
            blocks = (os.pread(self.fd, min(_CHUNK, at - begin), begin) for begin in range(0, at, _CHUNK))
            first += sum(block.count(b"\n") for block in blocks)
        self.offset, self.lines = at, Lines(first)

    def end(self, size: int) -> int:
        """Return where its reading ends, given its size."""
        return size if self.until is None else min(size, self.until)

    def take(self, texts: Iterable[tuple[int, str]]) -> Iterable[tuple[int, str]]:
        """Return what is read of some of its lines."""
        return without_nccl(texts) if self.without_nccl else texts


class Follower:
    """Reads what is added to the files that match patterns.

    Args:
        take: called with what is read of a file at a time: lines as ``Lines`` yields them, and the path.
        since: Unix time in s; files last written before it are ignored.
        clock: monotonic time.
    """

    def __init__(
        self,
        take: Callable[[Iterable[tuple[int, str]], str], object],
        since: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._take, self._since, self._clock = take, since, clock
        self.patterns: dict[LogPattern, None] = {}
        #: Files that are open at a time; part of the time that may go into looking for files if one look takes more than ``quick_s``. All are
        #: less where many jobs share the agent.
        self.most_files, self.of_time, self.quick_s = MOST_FILES, OF_TIME, QUICK_S
        #: Monotonic time (s) before which there is no other look.
        self._next_look_s = 0.0
        #: By device and inode: NCCL continues to write to a renamed file.
        self._files: dict[tuple[int, int], _File] = {}
        #: Closed in favour of others, until their size changes.
        self._quiet: dict[tuple[int, int], _File] = {}
        #: Files that the latest look found: another one could not be opened again.
        self._there: set[tuple[int, int]] = set()
        self._least: list[tuple[int, tuple[int, int]]] = []
        self._too_many = False
        #: Bytes in which this look may still count lines.
        self._may_count = 0
        #: Paths that cannot be read, with the reason.
        self.troubles: dict[str, str] = {}
        self.skipped_bytes = 0

    @property
    def inodes(self) -> set[tuple[int, int]]:
        """Device and inode of the files that the latest look found."""
        return self._there

    @property
    def paths(self) -> list[str]:
        """The files being followed."""
        return sorted({file.path for file in [*self._files.values(), *self._quiet.values()]})

    def share(self, number: int, all_files: int) -> None:
        """Share files and time with the followers of other jobs.

        Args:
            number: of followers, this one included.
            all_files: that all of them may have open together.
        """
        self.most_files = min(MOST_FILES, all_files // number)
        self.of_time, self.quick_s = OF_TIME / number, QUICK_S / number

    def tick(self, final: bool = False) -> int:
        """Find new files and read what was added; return the bytes read.

        Args:
            final: the writers have ended: read all there is, and a last line without its newline.
        """
        if final or self._clock() >= self._next_look_s:
            self._look()
        there, total = self._there, 0
        for inode, file in list(self._files.items()):
            read = self._read(file, None if final else TICK_BYTES - total)
            total += read
            file.idle = 0 if read else file.idle + 1
            if final:
                self._end(file)
            elif inode not in there and file.idle > _PATIENCE:
                self._end(file)
                os.close(self._files.pop(inode).fd)
        for inode in self._quiet.keys() - there:
            self._end(self._quiet.pop(inode))
        return total

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            os.close(file.fd)
        self._files.clear()
        self._quiet.clear()

    def _look(self) -> None:
        """Look for files; the longer that takes, the longer the pause after it: a folder may have any number of files."""
        began_s = time.thread_time()
        self._there = self._discover()
        took_s = time.thread_time() - began_s
        if took_s > self.quick_s:
            self._next_look_s = self._clock() + took_s / self.of_time

    def _discover(self) -> set[tuple[int, int]]:
        there, seen, self._too_many = set[tuple[int, int]](), set[str](), False
        self._may_count = MOST_COUNTED
        #: Those that can be closed in favour of others, the quietest last.
        self._least = sorted(
            (file.idle, inode) for inode, file in self._files.items() if file.idle and inode in self._there
        )
        left = [MOST_ENTRIES]  # shared by all patterns
        # A file that is also an output is read as NCCL's.
        for pattern in sorted(self.patterns, key=lambda each: (each.output is not None, each.pattern)):
            try:
                for where, name in pattern.files(left):
                    path = str(where.path / name)
                    if path not in seen:
                        seen.add(path)
                        self._note(where, name, pattern, there)
                if pattern.pattern not in seen:  # that of the file of this name stays
                    self.troubles.pop(pattern.pattern, None)
            except FileNotFoundError:
                self._miss(pattern, pattern.pattern, "not found")
            except OSError as error:
                self.troubles[pattern.pattern] = error.strerror or str(error)
        if self._too_many:
            self.troubles[_TOO_MANY] = (
                f"more than {self.most_files} files: the others are read once some of these are quiet"
            )
        else:
            self.troubles.pop(_TOO_MANY, None)
        return there

    def _note(self, where: Folder, name: str, pattern: LogPattern, there: set[tuple[int, int]]) -> None:
        """Add a file to those that are ``there``, and open it if it has something new."""
        path, trust, output = str(where.path / name), crossing.user(pattern.uid), pattern.output
        try:
            about = where.look(name)
            if stat.S_ISLNK(about.st_mode):
                about = crossing.look(where.path / name, trust)
            inode = (about.st_dev, about.st_ino)
            if not stat.S_ISREG(about.st_mode) or (about.st_mtime < self._since and not self._knows(inode)):
                return
            if output is not None and output.inode != inode:
                self._miss(pattern, path, "another file has this name")
                return
            if inode in there:
                return
            there.add(inode)
            known = self._quiet.get(inode)
            if inode not in self._files and (known is None or known.size != known.end(about.st_size)):
                if len(self._files) >= self.most_files and not (self._least and self._rest(self._least.pop()[1])):
                    self._too_many = True
                    return
                start = 0 if output is None else output.start
                if known is None and max(self._may_count, 0) < start <= MOST_COUNTED:  # until the next look
                    return
                self._open(inode, path, trust, start)
            if output is not None:
                self._limit(inode, output, about.st_size)
            self.troubles.pop(path, None)
        except FileNotFoundError:
            self._miss(pattern, path, "not found")
        except OSError as error:
            self.troubles[path] = error.strerror or str(error)

    def _miss(self, pattern: LogPattern, path: str, why: str) -> None:
        """Note that a file is not there. A log may come late; an output has been there, but in a container maybe not at this path."""
        if pattern.output is None or pattern.output.is_over or self._knows(pattern.output.inode):
            self.troubles.pop(path, None)
        else:
            self.troubles[path] = why

    def _knows(self, inode: tuple[int, int]) -> bool:
        return inode in self._files or inode in self._quiet

    def _open(self, inode: tuple[int, int], path: str, trust: Trust, start: int) -> None:
        """Open a new file, or one again that was quiet, where its reading stopped; raise ``OSError`` if that fails."""
        fd = crossing.open_file(Path(path), trust)
        try:
            file = self._quiet.pop(inode, None)
            if file is None:
                file = _File(path, fd)
                # A file that is smaller was truncated since then.
                file.begin(start if start <= os.fstat(fd).st_size else 0)
                self._may_count -= start
        except OSError:
            os.close(fd)
            raise
        file.fd, file.idle = fd, 0
        self._files[inode] = file

    def _limit(self, inode: tuple[int, int], output: Output, size: int) -> None:
        """Note what is read of an output. One that is over remains so."""
        file = self._files.get(inode) or self._quiet[inode]
        file.without_nccl = output.without_nccl
        if output.is_over and file.until is None:
            file.until = size

    def _rest(self, inode: tuple[int, int]) -> bool:
        """Close a file that is quiet, to make room for another; return whether that was possible."""
        if len(self._quiet) >= _MOST_QUIET:
            return False
        self._quiet[inode] = file = self._files.pop(inode)
        # A long incomplete line is read again, because those of many files would take memory.
        file.size, file.offset = file.offset, file.offset - file.lines.forget(_MOST_REST)
        os.close(file.fd)
        return True

    def _read(self, file: _File, most: int | None) -> int:
        """Read what was added, up to about ``most`` bytes; return the bytes read."""
        total = 0
        try:
            size = os.fstat(file.fd).st_size
            if size < file.offset:  # truncated: it begins again
                self._end(file)
                file.begin(0)
            size = file.end(size)
            if size - file.offset > MOST_BEHIND:
                skipped = size - file.offset - _KEPT_BEHIND
                self.skipped_bytes += skipped
                file.begin(file.offset + skipped, is_counted=False)
            while file.offset < size and (most is None or total < most):
                data = os.pread(file.fd, min(_CHUNK, size - file.offset), file.offset)
                if not data:
                    break
                file.offset += len(data)
                total += len(data)
                self._take(file.take(file.lines.feed(data)), file.name)
        except OSError as error:
            self.troubles[file.path] = error.strerror or str(error)
        return total

    def _end(self, file: _File) -> None:
        self._take(file.take(file.lines.end()), file.name)


def without_nccl(texts: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield texts with an empty line in place of each line of NCCL."""
    for number, text in texts:
        lines = ("" if _NCCL.search(line) else line for line in text.split("\n"))
        yield number, "\n".join(lines) if _NCCL.search(text) else text
