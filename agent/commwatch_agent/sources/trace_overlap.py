"""Communication and its exposed part, from a trace of torch.profiler (Chrome format). Pure but for ``of_file`` and what follows it.

On CUDA, kernels decide: communication is where an NCCL kernel runs, compute where any other kernel runs on the same GPU. Without kernels, CPU
operators decide: communication is where the backend records its work (``gloo:all_reduce``), compute where an operator runs
that is neither a collective nor a wait. docs/numbers.md describes the accuracy.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import sys
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from commwatch.wire.events import MAX_PLAUSIBLE
from commwatch_agent.model.intervals import Intervals
from commwatch_agent.report.profile_trace import BadProfile, base_ns_anywhere, read, unpacked

#: Address space in bytes of the process that reads a trace, 150 MB of them for the interpreter; and most kernels, operators and annotations in
#: the window: each takes up to 200 bytes.
MOST_BYTES, MOST_EVENTS = 1 << 29, 1 << 21
#: Most groups, characters of a name, and pieces of exposed communication in the answer, which the agent holds in memory.
_MOST_GROUPS, _MOST_NAME, _MOST_PIECES = 1024, 200, 1 << 16
#: Trainers and the agent have priority.
_NICE = 10
#: Events of other categories are not measured.
_CATEGORIES = frozenset({"kernel", "cpu_op", "user_annotation"})
_COMM_KERNELS = ("nccl", "rccl", "msccl")
#: Backends whose collectives are user annotations: their prefix before the colon.
_BACKENDS = ("gloo", "mpi", "ucc", "xccl", "hccl")
_P2P = ("send", "recv", "recvAnySource")
_COLLECTIVE_OPS = ("c10d::", "c10d_functional::", "_c10d_functional::", "_c10d_functional_autograd::")
#: Operators that only wrap others, and whatever a hook waits for.
_SHELLS = ("autograd::engine::", "torch::autograd::")


class BadTrace(Exception):
    """The trace cannot be measured; the message gives the reason."""


@dataclass(frozen=True)
class GroupShare:
    """Communication of one process group, in seconds, by the name that the trace gives it."""

    group: str
    comm_s: float
    exposed_s: float


@dataclass(frozen=True)
class Overlap:
    """Communication within a window of a trace, in seconds; ``None``: the trace does not show it."""

    #: ``kernels`` or ``cpu_ops``.
    source: str
    length_s: float
    comm_s: float | None
    exposed_s: float | None
    #: Empty where the trace names no groups.
    groups: list[GroupShare] = field(default_factory=list)
    #: Begins and ends of the exposed communication, earliest first, in ns from the begin of the window; empty if there are too many.
    exposed: list[tuple[int, int]] = field(default_factory=list)


class _Event(NamedTuple):
    """An event of a trace; times in ns from the start of the window."""

    start: int
    end: int
    category: str
    name: str
    thread: tuple[str, str]
    #: Of a kernel, where it ran.
    device: str
    group: str | None


def overlap(trace: Any, from_ns: int, until_ns: int) -> Overlap:
    """Measure the window of ``trace`` between two Unix times in ns.

    Raises:
        BadTrace: it is not a trace, or no event lies in the window.
    """
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise BadTrace("it has no list of trace events")
    base = trace.get("baseTimeNanoseconds", 0)
    if not isinstance(base, int):
        raise BadTrace("its base time is not a number")
    return measured(trace["traceEvents"], base, from_ns, until_ns)


def measured(trace_events: Iterable[Any], base_ns: int, from_ns: int, until_ns: int) -> Overlap:
    """Measure the window between two Unix times in ns.

    Args:
        trace_events: as in a trace; only those of the window that count are kept.
        base_ns: Unix time of the zero of their times.

    Raises:
        BadTrace: no event lies in the window, or there are too many.
    """
    length, found, other = until_ns - from_ns, list[_Event](), False
    same: dict[tuple[str, str], tuple[str, str]] = {}
    for event in trace_events:
        read = _event(event, base_ns - from_ns, length, same)
        if read is None:
            continue
        if read.category not in _CATEGORIES:
            other = True
            continue
        found.append(read)
        if len(found) > MOST_EVENTS:
            raise BadTrace(f"it has more than {MOST_EVENTS} events in the steps")
    if not found and not other:
        raise BadTrace("no event of the trace lies within the steps; its clock may differ from the system's")
    found.sort(key=lambda event: event.start)
    measure = _kernels if any(event.category == "kernel" for event in found) else _cpu_ops
    return measure(found, length)


def _event(event: Any, shift: int, length: int, same: dict[tuple[str, str], tuple[str, str]]) -> _Event | None:
    """Return a complete event that overlaps the window, cut to it; ``None``: it is another one.

    Args:
        shift: from the zero of the trace to the begin of the window, in ns.
        same: the threads, each of which is kept once.
    """
    if not isinstance(event, dict) or event.get("ph") != "X":
        return None
    at, duration, arguments = _ns(event.get("ts")), _ns(event.get("dur")), event.get("args")
    if at is None or duration is None:
        return None
    start, end = shift + at, shift + at + duration
    if not (end > 0 and start < length and end > start):
        return None
    known = arguments if isinstance(arguments, dict) else {}
    thread = _short(event.get("pid")), _short(event.get("tid"))
    names = _short(event.get("cat", "")), _short(event.get("name", ""))
    device, group = _short(known.get("device", event.get("pid"))), _group(known)
    return _Event(max(start, 0), min(end, length), *names, same.setdefault(thread, thread), device, group)


def _ns(us: object) -> int | None:
    return round(us * 1000) if isinstance(us, (int, float)) and abs(us) < MAX_PLAUSIBLE else None


def _short(value: object) -> str:
    """Return a value as text that is kept once."""
    return sys.intern(str(value)[:_MOST_NAME])


def _group(arguments: dict[str, Any]) -> str | None:
    description = arguments.get("Process Group Description")
    if description in (None, "", "undefined", "N/A"):
        description = arguments.get("Process Group Name")
    return None if description in (None, "") else _short(description)


def _kernels(events: list[_Event], length: int) -> Overlap:
    kernels = [event for event in events if event.category == "kernel"]
    comm = [event for event in kernels if event.name.startswith(_COMM_KERNELS)]
    computes = _by(event for event in kernels if not event.name.startswith(_COMM_KERNELS))
    compute = {device: _union(part) for device, part in computes.items()}

    def exposed(part: list[_Event]) -> Intervals:
        # A kernel hides communication of its own GPU only.
        found = Intervals()
        for device, ran in _by(part).items():
            _add(found, _union(ran).minus(compute.get(device, Intervals())))
        return found

    by_group: dict[str, list[_Event]] = {}
    for event in comm:
        if event.group is not None:
            by_group.setdefault(event.group, []).append(event)
    if len(by_group) > _MOST_GROUPS:
        raise BadTrace(f"it has more than {_MOST_GROUPS} groups")
    groups = [
        GroupShare(name, *_shares(_union(part), exposed(part), length)) for name, part in sorted(by_group.items())
    ]
    return _figures("kernels", _union(comm), exposed(comm), length, groups)


def _by(events: Iterable[_Event]) -> dict[str, list[_Event]]:
    """Return events by device."""
    found: dict[str, list[_Event]] = {}
    for event in events:
        found.setdefault(event.device, []).append(event)
    return found


def _cpu_ops(events: list[_Event], length: int) -> Overlap:
    works = [event for event in events if _of_backend(event) is not None]
    #: A backend's own threads: what they compute belongs to the collective. Sends appear on the thread that calls them.
    backend = {event.thread for event in works if _of_backend(event) not in _P2P}
    calls = [event for event in events if event.category == "cpu_op" and event.name.startswith(_COLLECTIVE_OPS)]
    if calls and not works:  # a backend that records nothing: not known, which is not zero
        return Overlap("cpu_ops", length / 1e9, None, None)
    compute = Intervals()
    threads: dict[tuple[str, str], list[_Event]] = {}
    for event in events:
        if event.thread not in backend:
            threads.setdefault(event.thread, []).append(event)
    for of in threads.values():
        own = _union(event for event in of if event.category == "cpu_op" and event.name.startswith(_COLLECTIVE_OPS))
        _add(compute, _union(event for event in of if _computes(event)).minus(own))
    comm = _union(event for event in works if _of_backend(event) not in _P2P)
    # A receive that is posted early counts only while no operator computes.
    _add(comm, _union(event for event in works if _of_backend(event) in _P2P).minus(compute))
    return _figures("cpu_ops", comm, comm.minus(compute), length, [])


def _of_backend(event: _Event) -> str | None:
    """Return the operation that a backend records; ``None``: the event is of no backend."""
    backend, colon, op = event.name.partition(":")
    named = bool(colon) and event.category == "user_annotation" and backend in _BACKENDS
    return op if named and not op.startswith(":") else None


def _computes(event: _Event) -> bool:
    shell = event.name.startswith(_SHELLS) or "::" not in event.name
    return event.category == "cpu_op" and not shell and not event.name.startswith(_COLLECTIVE_OPS)


def _union(events: Iterable[_Event]) -> Intervals:
    union = Intervals()
    for event in events:
        union.add(event.start, event.end)
    return union


def _add(union: Intervals, more: Intervals) -> None:
    for start, end in zip(more.starts, more.ends, strict=True):
        union.add(start, end)


def _figures(source: str, comm: Intervals, exposed: Intervals, length: int, groups: list[GroupShare]) -> Overlap:
    pieces = list(zip(*exposed.within(0, length), strict=True))
    shown = pieces if len(pieces) <= _MOST_PIECES else []
    return Overlap(source, length / 1e9, *_shares(comm, exposed, length), groups, shown)


def _shares(comm: Intervals, exposed: Intervals, length: int) -> tuple[float, float]:
    return comm.measure(0, length) / 1e9, exposed.measure(0, length) / 1e9


def of_file(path: Path, from_ns: int, until_ns: int) -> Overlap:
    """Measure a compressed trace, in bounded memory.

    Raises:
        BadTrace, BadProfile: it is not a trace, or has no event in the window, or too many.
        OSError, EOFError, zlib.error: it cannot be read.
        RecursionError: it is nested too deeply.
    """
    with unpacked(path) as file:
        base_ns, events = read(file, float)
        if base_ns is None:
            with unpacked(path) as again:
                base_ns = base_ns_anywhere(again)
        return measured(events, base_ns, from_ns, until_ns)


def main(arguments: list[str]) -> int:
    """Measure a compressed trace (path, begin, end in ns) and print JSON; in a process of its own: traces are large."""
    gc.disable()
    path, from_ns, until_ns = arguments
    try:
        answer = asdict(of_file(Path(path), int(from_ns), int(until_ns)))
    except MemoryError:
        answer = {"error": f"the trace cannot be read: reading it takes more than {MOST_BYTES >> 20} MiB of memory"}
    except (OSError, EOFError, ValueError, RecursionError, zlib.error, BadProfile, BadTrace) as error:
        answer = {"error": f"the trace cannot be read: {error}"}
    print(json.dumps(answer))
    return 0


def confine() -> None:
    """Limit the memory of this process, and let others have priority."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    os.nice(_NICE)
    with contextlib.suppress(OSError):  # out of memory: kill this process rather than the agent
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    confine()
    sys.exit(main(sys.argv[1:]))
