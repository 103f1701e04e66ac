"""When processes end, to the millisecond: of ranks that a launcher ends together, the first shows. The kernel reports it at once.

One signal may end them all, and each one's memory takes its time: what was killed by the time of another one's end has ended with it.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time

from commwatch_collectors.node.process import exit_status, is_killed

#: Most processes that are watched, each with an open file; longest wait for the end of one, in s.
_MOST, _WAIT_S = 256, 1.0
#: A process has closed its files, and given up its locks, at most so many ms before it ends, unless a driver holds it up.
_MOMENT_MS = 50


class ProcessEnds:
    """Watches processes by pidfds; one thread calls ``tick``, any thread the other methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epoll = select.epoll()
        #: By pid: its file, and by file its pid.
        self._files: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        #: By pid: the monotonic time of its end, in ns.
        self._ended: dict[int, int] = {}
        #: By pid: its exit code, or ``-n`` for signal n, where that is known.
        self._statuses: dict[int, int] = {}
        #: By pid: when it was first seen that it was killed, of those that have not ended.
        self._killed: dict[int, int] = {}

    def watch(self, pid: int) -> None:
        """Note when this process ends. Without a free file, or on a kernel before 5.3, it is not noted."""
        with self._lock:
            if pid in self._files or len(self._files) >= _MOST or self._epoll.closed:
                return
            with contextlib.suppress(OSError, AttributeError):
                opened = os.pidfd_open(pid)
                self._ended.pop(pid, None)  # of an earlier process with this number
                self._statuses.pop(pid, None)
                self._files[pid], self._pids[opened] = opened, pid
                self._epoll.register(opened, select.EPOLLIN)

    def at(self, pid: int) -> int | None:
        """Return when a process ended that is ending or has ended, as monotonic ns; ``None``: not known, or it does not end within a moment."""
        opened = self._files.get(pid)
        # It has closed its files, but may not have ended yet; or the thread that waits for ends has not come to it.
        if opened is not None:
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                ends = select.poll()
                ends.register(opened, select.POLLIN)
                ends.poll(_MOMENT_MS)
                self._note(self._epoll.poll(0))
        return self._ended.get(pid)

    def status(self, pid: int) -> int | None:
        """Return the exit code of a process that ended, ``-n`` if signal n ended it; ``None``: not known."""
        return self._statuses.get(pid)

    def forget(self, pid: int) -> None:
        """Drop what is known of a process."""
        with self._lock:
            self._ended.pop(pid, None)
            self._statuses.pop(pid, None)
            self._killed.pop(pid, None)
            self._drop(pid)

    def tick(self) -> None:
        """Wait for ends, at most a second, and note them."""
        self._note(self._epoll.poll(_WAIT_S))

    def _note(self, found: list[tuple[int, int]]) -> None:
        now_ns = time.monotonic_ns()
        with self._lock:
            for pid in {self._pids[opened] for opened, _ in found if opened in self._pids}:
                status = exit_status(pid, self._files[pid])
                if status is not None:
                    self._statuses[pid] = status
                self._ended[pid] = self._killed.pop(pid, now_ns)
                self._drop(pid)
            for pid in self._files if found else ():
                if pid not in self._killed and is_killed(pid):
                    self._killed[pid] = now_ns

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for pid in list(self._files):
                self._drop(pid)
            self._epoll.close()

    def _drop(self, pid: int) -> None:
        opened = self._files.pop(pid, None)
        if opened is not None:
            del self._pids[opened]
            os.close(opened)  # which also unregisters it
