"""Communication and its exposed part, from a trace of torch.profiler (Chrome format). Pure but for ``main``.

On CUDA, kernels decide: communication is where an NCCL kernel runs, compute where any other kernel runs on the same GPU. Without kernels, CPU
operators decide: communication is where the backend records its work (``gloo:all_reduce``), compute where an operator runs
that is neither a collective nor a wait. docs/definitions.md describes the accuracy.
"""

from __future__ import annotations

import gc
import gzip
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from commwatch.collectors.wire import bounded
from commwatch.core.intervals import Intervals

#: Characters of a decompressed trace, and values in it: a small file can decompress to more than a machine's memory.
MOST_CHARACTERS, MOST_VALUES = 1 << 30, 1 << 25
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
    #: Begins and ends of the exposed communication, earliest first, in ns from the begin of the window.
    exposed: list[tuple[int, int]] = field(default_factory=list)


class _Event(NamedTuple):
    """An event of a trace; times in ns from the start of the window."""

    start: int
    end: int
    category: str
    name: str
    thread: tuple[Any, Any]
    #: Of a kernel, where it ran.
    device: str
    group: str | None


def overlap(trace: Any, from_ns: int, until_ns: int) -> Overlap:
    """Measure the window of ``trace`` between two Unix times in ns.

    Raises:
        BadTrace: it is not a trace, or no event lies in the window.
    """
    events = sorted(_events(trace, from_ns, until_ns - from_ns), key=lambda event: event.start)
    if not events:
        raise BadTrace("no event of the trace lies within the steps; its clock may differ from the system's")
    length = until_ns - from_ns
    measure = _kernels if any(event.category == "kernel" for event in events) else _cpu_ops
    return measure(events, length)


def _events(trace: Any, from_ns: int, length: int) -> Iterable[_Event]:
    """Yield the complete events that overlap the window, cut to it; raise ``BadTrace`` if it is not a trace."""
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise BadTrace("it has no list of trace events")
    base = trace.get("baseTimeNanoseconds", 0)
    if not isinstance(base, int):
        raise BadTrace("its base time is not a number")
    for event in trace["traceEvents"]:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        at, duration, arguments = event.get("ts"), event.get("dur"), event.get("args")
        if not isinstance(at, (int, float)) or not isinstance(duration, (int, float)):
            continue
        start = base - from_ns + round(at * 1000)
        end = start + round(duration * 1000)
        if end > 0 and start < length and end > start:
            known = arguments if isinstance(arguments, dict) else {}
            thread = (event.get("pid"), event.get("tid"))
            names = str(event.get("cat", "")), str(event.get("name", ""))
            device = str(known.get("device", event.get("pid")))
            yield _Event(max(start, 0), min(end, length), *names, thread, device, _group(known))


def _group(arguments: dict[str, Any]) -> str | None:
    description = arguments.get("Process Group Description")
    if description in (None, "", "undefined", "N/A"):
        description = arguments.get("Process Group Name")
    return None if description in (None, "") else str(description)


def _kernels(events: list[_Event], length: int) -> Overlap:
    kernels = [event for event in events if event.category == "kernel"]
    comm = [event for event in kernels if event.name.startswith(_COMM_KERNELS)]
    compute = {
        device: _union(
            event for event in kernels if event.device == device and not event.name.startswith(_COMM_KERNELS)
        )
        for device in {event.device for event in kernels}
    }

    def exposed(part: list[_Event]) -> Intervals:
        # A kernel hides communication of its own GPU only.
        found = Intervals()
        for device, computed in compute.items():
            _add(found, _union(event for event in part if event.device == device).minus(computed))
        return found

    by_group: dict[str, list[_Event]] = {}
    for event in comm:
        if event.group is not None:
            by_group.setdefault(event.group, []).append(event)
    groups = [
        GroupShare(name, *_shares(_union(part), exposed(part), length)) for name, part in sorted(by_group.items())
    ]
    return _measured("kernels", _union(comm), exposed(comm), length, groups)


def _cpu_ops(events: list[_Event], length: int) -> Overlap:
    works = [event for event in events if _of_backend(event) is not None]
    #: A backend's own threads: what they compute belongs to the collective. Sends appear on the thread that calls them.
    backend = {event.thread for event in works if _of_backend(event) not in _P2P}
    calls = [event for event in events if event.category == "cpu_op" and event.name.startswith(_COLLECTIVE_OPS)]
    if calls and not works:  # a backend that records nothing: not known, which is not zero
        return Overlap("cpu_ops", length / 1e9, None, None)
    compute = Intervals()
    for thread in {event.thread for event in events} - backend:
        ops = _union(event for event in events if event.thread == thread and _computes(event))
        _add(compute, ops.minus(_union(call for call in calls if call.thread == thread)))
    comm = _union(event for event in works if _of_backend(event) not in _P2P)
    # A receive that is posted early counts only while no operator computes.
    _add(comm, _union(event for event in works if _of_backend(event) in _P2P).minus(compute))
    return _measured("cpu_ops", comm, comm.minus(compute), length, [])


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


def _measured(source: str, comm: Intervals, exposed: Intervals, length: int, groups: list[GroupShare]) -> Overlap:
    pieces = list(zip(*exposed.within(0, length), strict=True))
    return Overlap(source, length / 1e9, *_shares(comm, exposed, length), groups, pieces)


def _shares(comm: Intervals, exposed: Intervals, length: int) -> tuple[float, float]:
    return comm.measure(0, length) / 1e9, exposed.measure(0, length) / 1e9


def main(arguments: list[str]) -> int:
    """Measure a compressed trace (path, begin, end in ns) and print JSON; in a process of its own: traces are large."""
    gc.disable()
    path, from_ns, until_ns = arguments
    try:
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
            text = file.read(MOST_CHARACTERS + 1)
        if len(text) > MOST_CHARACTERS:
            raise BadTrace(f"it unpacks to more than {MOST_CHARACTERS} characters")
        answer = asdict(overlap(bounded.load(text, MOST_VALUES), int(from_ns), int(until_ns)))
    except (OSError, EOFError, ValueError, RecursionError, MemoryError, BadTrace) as error:
        answer = {"error": f"the trace cannot be read: {error}"}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
