"""A strict reader of the Chrome trace format, written from its description, and knowing nothing of what makes our traces.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU and what Perfetto's importer asks beyond it.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

Event = dict[str, Any]
#: What each kind of event must have beside its kind, process and thread, and what else it may have.
FIELDS = {
    "M": ({"name", "args"}, set()),
    "X": ({"name", "cat", "ts", "dur"}, {"args"}),
    "i": ({"name", "ts", "s"}, {"cat", "args"}),
    "C": ({"name", "ts", "args"}, {"tid"}),
    "s": ({"name", "cat", "id", "ts"}, set()),
    "f": ({"name", "cat", "id", "ts", "bp"}, set()),
}
METADATA = {
    "process_name": str, "process_labels": str, "process_sort_index": int, "thread_name": str, "thread_sort_index": int,
}  # fmt: skip


class Slice(NamedTuple):
    """A slice; times in ns. ``inside``: the name of the slice around it."""

    #: From the name of its process.
    rank: int
    pid: int
    tid: int
    name: str
    cat: str
    start_ns: int
    end_ns: int
    args: Event
    inside: str | None


class Trace(NamedTuple):
    """A sound trace."""

    slices: list[Slice]
    #: The ranks that an arrow leads from and to, and its name.
    arrows: list[tuple[int, int, str]]
    instants: list[Event]
    counters: list[Event]
    processes: dict[int, str]
    threads: dict[tuple[int, int], str]
    about: Event

    def of(self, cat: str) -> list[Slice]:
        """The slices of a category."""
        return [each for each in self.slices if each.cat == cat]


def read(path: Path) -> Trace:
    """Read a file; fails where it is not sound."""
    data = path.read_bytes()
    return parsed(gzip.decompress(data) if path.suffix == ".gz" else data)


def parsed(data: bytes) -> Trace:
    """Read a trace in the JSON object format; fails where it is not sound."""

    def refused(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    found = json.loads(data.decode(), parse_constant=refused)
    assert set(found) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert found["displayTimeUnit"] in ("ms", "ns")
    return sound(found["traceEvents"], found["otherData"])


def sound(events: list[Event], about: Event) -> Trace:
    """The parts of a trace; fails where one breaks a rule."""
    by_kind: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        needed, may = FIELDS[event["ph"]]
        needed = (
            needed | {"ph", "pid"} | (set() if event["name"].startswith("process_") or event["ph"] == "C" else {"tid"})
        )
        assert needed <= set(event) <= needed | may, event
        assert all(type(event[name]) is int and event[name] > 0 for name in ("pid", "tid") if name in event), event
        assert event["pid"] != event.get("tid"), "that thread would be the main one"
        assert isinstance(event["name"], str), event
        assert event["name"], event
        by_kind[event["ph"]].append(event)
    processes, threads = _names(by_kind["M"])
    for event in events:
        assert event["pid"] in processes, event
        if event["ph"] not in "MC":
            assert (event["pid"], event["tid"]) in threads, event
    for event in by_kind["i"]:
        assert event["s"] in ("g", "p", "t"), event
        _ns(event["ts"])
    for event in by_kind["C"]:
        assert event["args"], event
        for name, value in event["args"].items():
            assert type(value) in (int, float), event
            assert 0 <= value <= (100 if not name.endswith("MB/s") else 1e6), event
        _ns(event["ts"])
    slices = _slices(by_kind["X"], processes)
    arrows = _arrows(by_kind, slices)
    return Trace(slices, arrows, by_kind["i"], by_kind["C"], processes, threads, about)


def _ns(us: float) -> int:
    """Microseconds as whole nanoseconds: nothing finer is recorded, and nothing is lost in a double."""
    assert type(us) in (int, float)
    assert 0 <= us < 2**53 / 1000
    assert abs(us * 1000 - round(us * 1000)) < 0.2, us
    return round(us * 1000)


def _names(metadata: list[Event]) -> tuple[dict[int, str], dict[tuple[int, int], str]]:
    processes: dict[int, str] = {}
    threads: dict[tuple[int, int], str] = {}
    for event in metadata:
        ((_, value),) = event["args"].items()
        assert type(value) is METADATA[event["name"]], event
        text = str(value)
        if event["name"] == "process_name":
            assert event["pid"] not in processes, event
            processes[event["pid"]] = text
        if event["name"] == "thread_name":
            assert text, event
            assert (event["pid"], event["tid"]) not in threads, event
            threads[event["pid"], event["tid"]] = text
    return processes, threads


def _slices(events: list[Event], processes: dict[int, str]) -> list[Slice]:
    """The slices, with what is around each; fails where two of a thread overlap and neither is inside the other."""
    by_thread: dict[tuple[int, int], list[tuple[int, int, Event]]] = defaultdict(list)
    for event in events:
        start, length = _ns(event["ts"]), _ns(event["dur"])
        by_thread[event["pid"], event["tid"]].append((start, start + length, event))
    found = []
    for (pid, tid), each in by_thread.items():
        rank = int(processes[pid].removeprefix("rank ").removesuffix(", torch.profiler"))
        # Of those that begin together the longest is outside; of equal ones, the operation is around its parts.
        each.sort(key=lambda one: (one[0], -one[1], one[2]["cat"] != "operation"))
        around: list[tuple[int, str]] = []
        for start, end, event in each:
            while around and around[-1][0] <= start and not (around[-1][0] == start == end):
                around.pop()
            assert not around or end <= around[-1][0], (event, around[-1])
            inside = around[-1][1] if around else None
            found.append(Slice(rank, pid, tid, event["name"], event["cat"], start, end, event.get("args", {}), inside))
            around.append((end, event["name"]))
    return found


def _arrows(by_kind: dict[str, list[Event]], slices: list[Slice]) -> list[tuple[int, int, str]]:
    """The arrows; fails where one has no end, leads back in time, or begins or ends in no slice."""
    begins = {(event["cat"], event["name"], event["id"]): event for event in by_kind["s"]}
    ends = {(event["cat"], event["name"], event["id"]): event for event in by_kind["f"]}
    assert len(begins) == len(by_kind["s"]), "two arrows have one id"
    assert begins.keys() == ends.keys()
    assert len(ends) == len(by_kind["f"])
    by_thread: dict[tuple[int, int], list[Slice]] = defaultdict(list)
    for each in slices:
        by_thread[each.pid, each.tid].append(each)
    found = []
    for key, begin in begins.items():
        end = ends[key]
        assert end["bp"] == "e", end
        assert _ns(begin["ts"]) <= _ns(end["ts"]), key
        around = [_innermost(by_thread[event["pid"], event["tid"]], _ns(event["ts"])) for event in (begin, end)]
        # Perfetto draws an arrow from the slice that begins first, whatever its events say.
        assert around[0].start_ns <= around[1].start_ns, around
        found.append((around[0].rank, around[1].rank, begin["name"]))
    return found


def _innermost(slices: list[Slice], at_ns: int) -> Slice:
    """The slice that an arrow is bound to; a slice does not include its end, unless it has no length."""
    around = [each for each in slices if each.start_ns <= at_ns < max(each.end_ns, each.start_ns + 1)]
    assert around, at_ns
    return max(around, key=lambda each: (each.start_ns, -each.end_ns))
