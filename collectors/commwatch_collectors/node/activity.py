"""What a process and its children have done so far, and where its main thread waits: samples from ``/proc``.

The agent takes them of ranks for which others wait. ``cmdline``, which a process can make block its readers, is not read.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from commwatch.wire import files

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
#: With more processes on the node, or more children of one, children are not known.
_MOST_PROCESSES, _MOST_CHILDREN = 8192, 128
#: Share of the time from which on a process that computes has its threads looked at; and most threads.
_SOME_CPU, _MOST_THREADS = 0.04, 256
#: Where the kernel waits for sockets, and for terminals and others.
ANY_WAIT = "wait_woken"


class Io(NamedTuple):
    """Bytes that a process, and those of its children that have ended, have read and written so far."""

    #: By system calls: files in the page cache, pipes, sockets.
    called_read: int
    called_written: int
    #: Of disks: also of mapped files.
    disk_read: int
    disk_written: int


class Process(NamedTuple):
    """A process and its threads."""

    name: str
    #: Letter of ``/proc/PID/stat``, of the main thread.
    state: str
    parent: int
    #: When it began, in ticks: another process may get its number.
    began: int
    #: CPU time of all its threads; and of those of its children that have ended.
    cpu_s: float
    ended_cpu_s: float
    #: ``None``: the kernel does not count it, or another user's.
    io: Io | None = None


class GpuUse(NamedTuple):
    """How busy the GPU of a rank is."""

    #: 0 to 1; ``None``: not known.
    busy: float | None
    #: The rank computes on it if it is busy: no other rank does, and no kernel of NCCL waits there.
    is_own: bool


class Sample(NamedTuple):
    """A process at one moment."""

    now_ns: int
    own: Process
    #: The function of the kernel in which the main thread waits; empty: it runs, or not known.
    waits_in: str = ""
    #: The main thread waits in a system call for sockets.
    on_socket: bool = False
    #: By pid: children, their children and so on; ``None``: not known.
    children: Mapping[int, Process] | None = None
    #: ``None``: it has none.
    gpu: GpuUse | None = None
    #: One of its threads runs, or is ready to run.
    runs: bool = False


def process_of(stat: str, io: Io | None = None) -> Process | None:
    """Return the process of which this is the text of ``stat``; ``None``: it is no such text."""
    head, _, rest = stat.rpartition(")")
    fields = rest.split()
    try:
        user, system, ended_user, ended_system = (int(field) for field in fields[11:15])
        parent, began = int(fields[1]), int(fields[19])
    except (ValueError, IndexError):
        return None
    # Whoever runs a process gives it its name.
    name = "".join(char if char.isprintable() else "?" for char in head.partition("(")[2])
    spent = (user + system) / _TICKS_PER_S, (ended_user + ended_system) / _TICKS_PER_S
    return Process(name, fields[0], parent, began, *spent, io)


def io_of(text: str) -> Io | None:
    """Return the counters in the text of ``io``; ``None``: it lacks one."""
    counts = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    try:
        return Io(*(int(counts[key]) for key in ("rchar", "wchar", "read_bytes", "write_bytes")))
    except (KeyError, ValueError):
        return None


def read(pid: int, proc: Path = _PROC) -> Process | None:
    """Return a process; ``None``: it does not exist, or is not visible."""
    io = io_of(files.text(f"{proc}/{pid}/io") or "")
    return process_of(files.text(f"{proc}/{pid}/stat") or "", io)


def sample(
    pid: int,
    now_ns: int,
    parents: Mapping[int, int] | None,
    *,
    before: Sample | None = None,
    others: Collection[int] = (),
    gpu: GpuUse | None = None,
    proc: Path = _PROC,
) -> Sample | None:
    """Return a sample of a process; ``None``: it does not exist, or is not visible.

    Args:
        now_ns: the monotonic clock.
        parents: the result of ``Parents.read``.
        before: the latest sample of it: only if it has computed since then, all of its threads are looked at.
        others: processes that are no children, although it may have begun them: other ranks.
    """
    own = read(pid, proc)
    if own is None:
        return None
    waits_in = files.text(f"{proc}/{pid}/wchan") or ""
    on_socket = waits_in == ANY_WAIT and _socket_call(files.text(f"{proc}/{pid}/syscall") or "")
    children = None if parents is None else _children(pid, parents, others, proc)
    runs = own.state == "R" or (_has_computed(before, own, now_ns) and _has_running_thread(pid, proc))
    return Sample(now_ns, own, "" if waits_in == "0" else waits_in, on_socket, children, gpu, runs)


def _has_computed(before: Sample | None, own: Process, now_ns: int) -> bool:
    if before is None:
        return False
    return own.cpu_s - before.own.cpu_s >= _SOME_CPU * (now_ns - before.now_ns) / 1e9


def _has_running_thread(pid: int, proc: Path) -> bool:
    threads = files.names(f"{proc}/{pid}/task")[:_MOST_THREADS]
    return any(files.of_process(int(thread), f"{proc}/{pid}/task")[:1] == ["R"] for thread in threads)


#: Numbers of system calls on sockets by machine: recvfrom, recvmsg, recvmmsg, sendto, sendmsg, sendmmsg, connect.
_ON_SOCKETS = {
    "x86_64": frozenset({"45", "47", "299", "44", "46", "307", "42"}),
    "aarch64": frozenset({"207", "212", "243", "206", "211", "269", "203"}),
}


def _socket_call(syscall: str) -> bool:
    return syscall.partition(" ")[0] in _ON_SOCKETS.get(os.uname().machine, ())


def _children(
    pid: int, parents: Mapping[int, int], others: Collection[int], proc: Path
) -> Mapping[int, Process] | None:
    found: dict[int, Process] = {}
    for child, parent in _below(pid, parents, others):
        if len(found) == _MOST_CHILDREN:
            return None
        process = read(child, proc)
        if process is not None and process.parent == parent:  # else it has ended, or got another parent
            found[child] = process
    return found


def _below(pid: int, parents: Mapping[int, int], others: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yield children with their parents, those of a child after it."""
    of: dict[int, list[int]] = {}
    for child, parent in parents.items():
        of.setdefault(parent, []).append(child)
    todo, seen = [pid], {pid}
    while todo:
        parent = todo.pop()
        new = [child for child in of.get(parent, ()) if child not in others and child not in seen]
        seen.update(new)
        todo += new
        yield from ((child, parent) for child in new)


class Parents:
    """The parent of each process of the node. Only processes that are new since the latest reading are read."""

    def __init__(self, proc: Path = _PROC) -> None:
        self._proc, self._known = proc, dict[int, int]()

    def read(self) -> Mapping[int, int] | None:
        """Return the parents by pid; ``None``: there are too many processes."""
        pids = [int(name) for name in files.names(str(self._proc)) if name.isdecimal()]
        if len(pids) > _MOST_PROCESSES:
            return None
        self._known = {pid: self._known.get(pid) or self._parent(pid) for pid in pids}
        return self._known

    def forget(self) -> None:
        """Forget all processes."""
        self._known = {}

    def _parent(self, pid: int) -> int:
        fields = files.of_process(pid, str(self._proc))
        return int(fields[1]) if len(fields) > 1 and fields[1].isdecimal() else 0
