"""What a process does, in a word and in a sentence: from samples of some seconds. Pure.

A word is only given where it is certain: what could not be read makes the activity unknown, and not asleep.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from commwatch_collectors.node.activity import ANY_WAIT, Io, Process, Sample

#: Activities cover this time, so that a quiet second between two files changes nothing; and at least that.
WINDOW_S, _LEAST_S = 4.5, 0.5
#: Least CPU time, as share of the time, of a process that computes; and least bytes per second of one that reads or writes.
_CPU, _IO = 0.3, 1e6
#: CPU time up to which a process surely does nothing.
_LITTLE_CPU = 0.1
#: A process that also computes counts as reading or writing only from this rate on, in bytes per second.
_MUCH_IO = 20e6
#: An activity goes on until it is below this part of these limits.
_ENDS = 0.6
#: A GPU is busy from this share on, and does nothing up to that one.
_BUSY, _QUIET = 0.5, 0.1
#: Functions of the kernel: of disks and file systems, where a wait is one for data.
_DISK = re.compile(
    "folio_wait|wait_on_page|wait_on_buffer|io_schedule|blk_|blkdev|bdev|bio_|jbd2|fsync|writeback|balance_dirty|ext4|xfs|xlog|btrfs|"
    "zfs|nfs|rpc_wait|fuse|request_wait_answer|cifs|smb|ceph|ptlrpc|cl_sync_io|lustre|gpfs|cxiWaitEventWait|submit_bio|filemap|swap"
)
_CHILD_BEGINS = re.compile("vfork")
#: Of TCP sockets.
_NETWORK = (
    (re.compile("inet_csk_accept"), "waits for a connection"),
    (
        re.compile("inet_wait_for_connect|inet_stream_connect|sk_stream_wait_connect"),
        "waits until a connection is made",
    ),
    (re.compile("sk_stream_wait_memory|tcp_sendmsg"), "waits until the network takes its data"),
    (re.compile("sk_wait_data|tcp_recvmsg"), "waits for data from the network"),
)
#: Of sleeps in which a process may wait for anything.
_ASLEEP = (
    (re.compile("futex"), "is asleep in a lock"),
    (re.compile("nanosleep"), "is asleep in a timer"),
    (re.compile("epoll|ep_poll|poll_schedule|do_select|do_poll|do_sys_poll"), "is asleep until a file or socket is ready"),
    (re.compile("do_wait|kernel_wait|wait_consider"), "is asleep until a child process ends"),
    (re.compile("pipe"), "is asleep in a pipe"),
    (re.compile("unix_"), "is asleep in a local socket"),
    (re.compile(ANY_WAIT), "is asleep in a socket or terminal"),
)  # fmt: skip


@dataclass(frozen=True)
class Activity:
    """What a rank does while others wait for it."""

    #: ``computing``, ``reading``, ``writing``, ``disk`` (waits for one), ``child`` (one of its child processes works), ``gpu``, ``network`` (waits
    #: for it), ``asleep`` or ``stopped``.
    kind: str
    #: What follows "rank 3" in a sentence: ``is writing 210 MB/s``.
    says: str
    #: For how many seconds it has been doing that, as far as known.
    for_s: float
    #: Whether it gets on by itself; ``None``: not known.
    is_working: bool | None


class _Found(NamedTuple):
    kind: str
    says: str
    is_working: bool | None


def judged(samples: Sequence[Sample], before: Activity | None = None) -> Activity | None:
    """Return what a process does; ``None``: not known.

    Args:
        samples: the latest last.
        before: the result when the latest sample was not there yet.
    """
    if not samples:
        return None
    last = samples[-1]
    window = [
        each for each in samples if last.now_ns - each.now_ns <= WINDOW_S * 1e9 and each.own.began == last.own.began
    ]
    span_s = (last.now_ns - window[0].now_ns) / 1e9
    if span_s < _LEAST_S:
        return None
    found = next(_possible(window, _Rates(window[0], last, span_s), before.kind if before is not None else ""), None)
    if found is None:
        return None
    if before is None:
        return Activity(found.kind, found.says, span_s, found.is_working)
    goes_on_s = before.for_s if before.kind == found.kind else 0.0
    return Activity(found.kind, found.says, goes_on_s + (last.now_ns - window[-2].now_ns) / 1e9, found.is_working)


def _possible(window: Sequence[Sample], rates: _Rates, before: str) -> Iterator[_Found]:
    """Yield what a process may be said to do, the most telling first."""

    def least(limit: float, kind: str) -> float:
        return limit * (_ENDS if kind == before else 1.0)

    if all(each.own.state in "Tt" for each in window[-2:]):
        yield _Found("stopped", "is stopped", is_working=False)
    if window[-1].own.state in "ZXx":
        return
    computes = rates.own.cpu >= least(_CPU, "computing") or _most_of([each.runs for each in window])
    kind, moved = _moves(rates.own)
    if moved >= (_MUCH_IO if computes else least(_IO, kind)):
        yield _Found(kind, f"is {kind} {rate(moved)}", is_working=True)
    if computes:
        # A thread that waits for its GPU may do so in a loop, and a kernel of NCCL that waits keeps the GPU busy.
        busy, gpus = _gpu_busy(window), [each.gpu for each in window if each.gpu is not None]
        is_known = all(gpu.is_own for gpu in gpus) or (busy is not None and busy <= _QUIET)
        yield _Found("computing", "computes", is_working=True if is_known else None)
    yield from _of_disk(window)
    yield from _of_children(window, rates, least(_CPU, "child"), least(_IO, "child"))
    yield from _of_gpu(window)
    yield from _of_network(window)
    yield from _asleep(window, rates)


def _most_of(looks: Sequence[bool]) -> bool:
    """Return whether a process runs, or is ready to run because others have the cores, in most of some looks."""
    return len(looks) > 2 and 2 * sum(looks) > len(looks)


def _moves(did: _Did) -> tuple[str, float]:
    return ("reading", did.read) if did.read > did.written else ("writing", did.written)


def _of_disk(window: Sequence[Sample]) -> Iterator[_Found]:
    waits = [each for each in window if each.own.state == "D" or _DISK.search(each.waits_in)]
    if 2 * len(waits) < len(window) or len(waits) < 2 or any(_CHILD_BEGINS.search(each.waits_in) for each in waits):
        return
    if 2 * sum(bool(_DISK.search(each.waits_in)) for each in waits) >= len(waits):
        yield _Found("disk", "waits for a disk or file system", is_working=True)
    else:
        yield _Found("disk", "waits in the kernel, for a disk or a driver", is_working=None)


def _of_children(window: Sequence[Sample], rates: _Rates, least_cpu: float, least_io: float) -> Iterator[_Found]:
    names = {pid: child.name for pid, child in (window[-1].children or {}).items()}
    states = {
        pid: [each.children[pid].state for each in window if each.children and pid in each.children] for pid in names
    }
    running = [pid for pid, of_child in states.items() if _most_of([state == "R" for state in of_child])]
    computes = rates.children.cpu >= least_cpu or bool(running)
    kind, moved = _moves(rates.children)
    if moved >= (_MUCH_IO if computes else least_io):
        which = _most({pid: max(did.read, did.written) for pid, did in rates.of_child.items()})
        yield _child(which, names, f"is {kind} {rate(moved)}")
    if computes:
        which = _most({pid: did.cpu for pid, did in rates.of_child.items()})
        yield _child(which or min(running, default=None), names, "computes")
    stuck = [pid for pid, of_child in states.items() if len(of_child) > 2 and set(of_child) == {"D"}]
    if stuck:
        yield _child(min(stuck), names, "waits for a disk or file system")


def _most(did: Mapping[int, float]) -> int | None:
    """Return the child that did most of it; ``None``: several did."""
    return next((pid for pid, much in did.items() if 2 * much > sum(did.values())), None)


def _child(pid: int | None, names: Mapping[int, str], does: str) -> _Found:
    whom = "one of its child processes" if pid is None else f"its child process {pid} ({names[pid]})"
    return _Found("child", f"waits while {whom} {does}", is_working=True)


def _of_gpu(window: Sequence[Sample]) -> Iterator[_Found]:
    busy = _gpu_busy(window)
    if busy is not None and busy >= _BUSY and all(each.gpu is None or each.gpu.is_own for each in window):
        yield _Found("gpu", "waits while its GPU is busy", is_working=True)


def _gpu_busy(window: Sequence[Sample]) -> float | None:
    busy = [each.gpu.busy for each in window if each.gpu is not None and each.gpu.busy is not None]
    return sum(busy) / len(busy) if busy else None


def _of_network(window: Sequence[Sample]) -> Iterator[_Found]:
    wait = _usual_wait(window)
    for function, says in _NETWORK:
        if function.search(wait):
            yield _Found("network", says, is_working=None)
    if wait == ANY_WAIT and all(each.on_socket for each in window if each.waits_in == wait):
        yield _Found("network", "waits for the network", is_working=None)


def _usual_wait(window: Sequence[Sample]) -> str:
    return Counter(each.waits_in for each in window).most_common(1)[0][0]


def _asleep(window: Sequence[Sample], rates: _Rates) -> Iterator[_Found]:
    if window[-1].own.state != "S" or not rates.are_complete:
        return
    wait, busy = _usual_wait(window), _gpu_busy(window)
    # A GPU that is busy may compute for this rank or for another one, or wait itself.
    # On a node whose cores are taken, a thread that computes may get little time.
    in_doubt = (
        window[-1].gpu is not None and (busy is None or busy > _QUIET)
    ) or rates.own.cpu + rates.children.cpu > _LITTLE_CPU
    says = next((says for function, says in _ASLEEP if function.search(wait)), "is asleep")
    yield _Found("asleep", says, is_working=None if in_doubt else False)


class _Did(NamedTuple):
    """What a process did, per second: CPU time, and bytes read and written."""

    cpu: float
    read: float
    written: float


class _Rates:
    """What a process and its children did between two samples, per second."""

    def __init__(self, first: Sample, last: Sample, span_s: float) -> None:
        has_children = first.children is not None and last.children is not None
        before, now = (dict(each.children or {}) if has_children else {} for each in (first, last))
        every = [first.own, last.own, *before.values(), *now.values()]
        has_io = all(each.io is not None for each in every)
        #: Whether all was read that it and its children may do.
        self.are_complete = has_children and has_io
        done = {pid: _since(before.get(pid), child, has_io) for pid, child in now.items()}
        #: By pid, of those that last: names of others would change all the time.
        self.of_child = {pid: _did(each, span_s) for pid, each in done.items() if pid in before}
        # What a child has done counts as its parent's once it has ended.
        sums = (
            [_so_far(own, has_io), *(_so_far(child, has_io) for child in of.values())]
            for own, of in ((last.own, now), (first.own, before))
        )
        together = _minus(*map(_total, sums))
        alone = _minus(together, _total([*done.values(), _so_far(None, has_io)]))
        own_cpu = max(0.0, last.own.cpu_s - first.own.cpu_s) / span_s
        self.own = _did(alone, span_s)._replace(cpu=own_cpu)
        of_children = _did(_minus(together, alone), span_s)
        self.children = of_children._replace(cpu=max(0.0, together[0] / span_s - own_cpu))


def _so_far(process: Process | None, has_io: bool) -> list[float]:
    """Return what a process, and its children that have ended, have done: CPU time and the counters of ``Io``."""
    if process is None:
        return [0.0] * 5
    return [process.cpu_s + process.ended_cpu_s, *(process.io if has_io and process.io else Io(0, 0, 0, 0))]


def _since(before: Process | None, now: Process, has_io: bool) -> list[float]:
    """Return what a process has done since an earlier sample of it, or at all if there is none."""
    is_same = before is not None and before.began == now.began
    return _minus(_so_far(now, has_io), _so_far(before if is_same else None, has_io))


def _total(done: Sequence[Sequence[float]]) -> list[float]:
    return [sum(each) for each in zip(*done, strict=True)]


def _minus(after: Sequence[float], before: Sequence[float]) -> list[float]:
    return [max(0.0, late - early) for late, early in zip(after, before, strict=True)]


def _did(done: Sequence[float], span_s: float) -> _Did:
    cpu_s, called_read, called_written, disk_read, disk_written = done
    return _Did(cpu_s / span_s, max(called_read, disk_read) / span_s, max(called_written, disk_written) / span_s)


def rate(bytes_per_s: float) -> str:
    """Return a rate with two digits, so that a text does not change all the time.

    >>> [rate(value) for value in (1.26e6, 35.4e6, 212e6, 2.14e9)]
    ['1.3 MB/s', '35 MB/s', '210 MB/s', '2.1 GB/s']
    """
    value = float(f"{bytes_per_s:.2g}")
    return f"{value / 1e9:g} GB/s" if value >= 1e9 else f"{value / 1e6:g} MB/s"
