"""A trace of torch.profiler as a part of a timeline: read in bounded memory, by the clock of the timeline. Pure but for ``ProfileSlices.of``."""

from __future__ import annotations

import io
import json
import re
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from statistics import median
from typing import IO, Any, NamedTuple, cast

from commwatch.wire import bounded
from commwatch.wire import events as ev
from commwatch_agent.model.clocks import Clock
from commwatch_agent.model.unpacking import Unpacking
from commwatch_agent.report.chrome_trace import Event, sort_index

#: Characters that are read at a time, and most characters before the events and of one event.
_PIECE, _MOST_PIECE = 1 << 20, 1 << 22
#: Bytes of a decompressed trace: a small file can decompress to more than a machine's memory.
MOST_BYTES = 1 << 30
_BASE = re.compile(r'"baseTimeNanoseconds"\s*:\s*(\d{1,20})')
#: Characters of its text.
_LONGEST_BASE = 200
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")
#: Most threads and streams of a rank, and most collectives by which a clock is checked.
_MOST_THREADS, _MOST_CHECKED = 4096, 1 << 16
#: Characters of a thread's name; bytes and numbers in a file of exposed communication.
_MOST_NAME, _MOST_EXPOSED_BYTES, _MOST_EXPOSED = 500, 16 << 20, 1 << 20
#: Processes have numbers above those of the ranks.
_FIRST_PROCESS = 10_000_000
#: The thread of exposed communication, before those of the trace.
_EXPOSED = 1
#: The arrows of one trace have numbers below this.
_FLOWS = 1 << 32
#: Slices, and both ends of arrows.
_KINDS = frozenset({"X", "s", "f"})
#: Collectives by the name in NCCL's kernels, and the backend whose own events last for a whole operation.
_KERNEL = re.compile(r"nccl(?:Dev)?Kernel_([A-Za-z]+)")
_OF_KERNEL = {"AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter"}
_BACKEND = "gloo:"
#: Share of the collectives whose deviation is at most the uncertainty.
_WITHIN = 0.9


class BadProfile(Exception):
    """A trace cannot be read; the message gives the reason."""


class ProfileTrace(NamedTuple):
    """A kept trace of one rank."""

    profile_id: str
    rank: int
    path: Path
    #: File with the begins and ends of its exposed communication, as JSON; profiles of earlier versions have none.
    exposed: Path
    #: Numbers of the step marks at begin and end of the profiled steps; and their Unix time in ns, by the clock of the trace.
    marks: tuple[int, int]
    begin_ns: int
    end_ns: int


class PlacedProfile(NamedTuple):
    """A trace, and what the history has of the same time, by the clock of the timeline."""

    trace: ProfileTrace
    #: To be added to the times of the trace.
    shift_ns: int
    #: Ends of the rank's symmetric collectives by operation, earliest first, in ns.
    ends: Mapping[str, Sequence[int]]


class ProfileSlices:
    """Makes the events of the profiles of one timeline.

    Args:
        origin_ns: time 0 of the timeline.
    """

    def __init__(self, origin_ns: int) -> None:
        self._origin_ns = origin_ns
        self._tracks: dict[int, _Tracks] = {}
        #: For the timeline's metadata: by profile, how well its clock fits, or why it cannot be read.
        self.notes: dict[str, dict[str, object]] = {}

    def of(self, profile: PlacedProfile, clock: Clock) -> Iterator[Event]:
        """Yield the slices and arrows of a profile, by the clock of the first node; not all if its trace cannot be read to the end."""
        trace, fit = profile.trace, _Fit(profile)
        note = self.notes[f"rank {trace.rank}, profile {trace.profile_id}"] = {}
        tracks = self._tracks.get(trace.rank)
        if tracks is None:
            tracks = self._tracks[trace.rank] = _Tracks(_FIRST_PROCESS + trace.rank)
            yield from _process(tracks.pid, trace.rank)
        flows = len(self.notes) * _FLOWS
        try:
            with unpacked(trace.path) as file:
                base_ns, events = read(file)
                for event in events:
                    if event.get("ph") == "M":
                        tracks.name(event)
                        continue
                    times, tid = _times(event, (base_ns or 0) + profile.shift_ns), tracks.number(event)
                    if tid is None or times is None:
                        continue
                    at_ns = clock.of_first(times[0]) - self._origin_ns
                    if at_ns >= 0:
                        fit.add(event, times[1])
                        at = {"pid": tracks.pid, "tid": tid, "ts": at_ns / 1000}
                        yield _event(event, at, times[1] - times[0], flows)
        except (OSError, EOFError, zlib.error, RecursionError, BadProfile) as error:
            note["error"] = f"{trace.path} cannot be read: {error}"
        exposed = _exposed(trace.exposed)
        yield from tracks.named(exposed=bool(exposed))
        for begin_ns, end_ns in exposed:
            at_us = (clock.of_first(begin_ns + profile.shift_ns) - self._origin_ns) / 1000
            lasts_us = (end_ns - begin_ns) / 1000
            yield {**_at("X", tracks.pid, _EXPOSED), "ts": at_us, "dur": lasts_us, "name": "exposed", "cat": "exposed"}
        note |= fit.note()


class _Tracks:
    """The threads and streams of the profiles of one rank, by the numbers that these give their processes and threads."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._numbers: dict[tuple[int, int], int] = {}
        self._named, self._has_exposed = 0, False
        self._names: dict[tuple[Any, Any], str] = {}
        self._gpus: dict[Any, str] = {}

    def number(self, event: Event) -> int | None:
        """Return the number of the thread of a slice or an arrow; ``None``: it is another event, or of no thread."""
        process, thread = event.get("pid"), event.get("tid")
        if event.get("ph") not in _KINDS or not isinstance(process, int) or not isinstance(thread, int):
            return None
        if event["ph"] != "X" and not isinstance(event.get("id"), int):
            return None
        found = self._numbers.setdefault((process, thread), len(self._numbers) + 1 + _EXPOSED)
        if len(self._numbers) > _MOST_THREADS:
            raise BadProfile(f"more than {_MOST_THREADS} threads and streams")
        return found

    def name(self, event: Event) -> None:
        """Keep the first name of a thread, and the name of a GPU."""
        about, thread = event.get("args"), (str(event.get("pid"))[:_MOST_NAME], str(event.get("tid"))[:_MOST_NAME])
        if not isinstance(about, dict) or len(self._names) + len(self._gpus) > _MOST_THREADS:
            return
        if event.get("name") == "thread_name":
            self._names.setdefault(thread, str(about.get("name"))[:_MOST_NAME].strip())
        elif event.get("name") == "process_labels" and str(about.get("labels")).startswith("GPU"):
            self._gpus[thread[0]] = str(about["labels"])[:_MOST_NAME]

    def named(self, *, exposed: bool) -> Iterator[Event]:
        """Yield the names of the threads that have come since the last call; ``exposed``: also that of exposed communication."""
        if exposed and not self._has_exposed:
            self._has_exposed = True
            yield from _thread(self.pid, _EXPOSED, "exposed communication")
        for (process, thread), tid in list(self._numbers.items())[self._named :]:
            name = self._names.get((str(process), str(thread)), f"thread {thread}")
            yield from _thread(self.pid, tid, f"{self._gpus.get(str(process), '')} {name}".strip())
        self._named = len(self._numbers)


class _Fit:
    """How well the clock of a profile fits that of the timeline: by the collectives that both have."""

    def __init__(self, profile: PlacedProfile) -> None:
        self._profile, self._later = profile, array("q")
        self._from_ns = profile.trace.begin_ns + profile.shift_ns
        self._until_ns = profile.trace.end_ns + profile.shift_ns

    def add(self, event: Event, end_ns: int) -> None:
        """Add a slice of the profile if it is a collective that the history has, too."""
        op = _collective(event)
        ends = self._profile.ends.get(op) if op is not None else None
        if not ends or not self._from_ns <= end_ns <= self._until_ns or len(self._later) >= _MOST_CHECKED:
            return
        at = bisect_left(ends, end_ns)
        self._later.append(min((end_ns - own_ns for own_ns in ends[max(at - 1, 0) : at + 1]), key=abs))

    def note(self) -> dict[str, object]:
        """Return the comparison for people who read the timeline."""
        found: dict[str, object] = {"moved_us": self._profile.shift_ns / 1e3, "compared": len(self._later)}
        if self._later:
            deviations = sorted(map(abs, self._later))
            found["later_us"] = median(self._later) / 1e3
            found["uncertainty_us"] = deviations[min(len(deviations) - 1, int(_WITHIN * len(deviations)))] / 1e3
        return found


@contextmanager
def unpacked(path: Path) -> Iterator[IO[str]]:
    """Yield the text of a compressed trace; reads raise ``UnpacksToMore`` beyond the limits."""
    with path.open("rb") as packed, Unpacking(packed, MOST_BYTES) as plain:
        yield io.TextIOWrapper(cast("IO[bytes]", plain), encoding="utf-8", errors="replace")


def base_ns_anywhere(file: IO[str]) -> int:
    """Return the Unix time in ns of a trace's zero, wherever it is in the trace; 0: it has none, its times are Unix time."""
    text = ""
    while piece := file.read(_PIECE):
        text = text[-_LONGEST_BASE:] + piece
        if (base := _BASE.search(text)) is not None:
            return int(base[1])
    return 0


def read(file: IO[str], number: Callable[[str], Any] | None = None) -> tuple[int | None, Iterator[Event]]:
    """Return the Unix time in ns of a trace's zero, and its events; raise ``BadProfile``, also while these are read.

    Args:
        number: reads a number with a fraction; ``None``: all its digits are kept.

    Returns:
        ``None`` instead of the time: it does not come before the events.
    """
    head = ""
    while (begin := _EVENTS.search(head)) is None:
        piece = file.read(_PIECE)
        if not piece or len(head) > _MOST_PIECE:
            raise BadProfile("it has no list of trace events")
        head += piece
    base = _BASE.search(head, 0, begin.start())
    return None if base is None else int(base[1]), _each(file, head[begin.end() :], number or _exact)


def _each(file: IO[str], text: str, number: Callable[[str], Any]) -> Iterator[Event]:
    """Yield the events that follow in a file after ``text``."""
    decode, at = json.JSONDecoder(parse_float=number, parse_constant=lambda _: None).raw_decode, 0
    while True:
        between = _BETWEEN.match(text, at)
        at = at if between is None else between.end()
        if text[at : at + 1] == "]":
            return
        try:
            event, at = decode(text, at)
        except ValueError:
            piece = file.read(_PIECE)
            if not piece or len(text) - at > _MOST_PIECE:
                raise BadProfile("it is cut short, or no JSON") from None
            text, at = text[at:] + piece, 0
            continue
        if isinstance(event, dict):
            yield event


def _times(event: Event, base_ns: int) -> tuple[int, int] | None:
    """Return Unix time in ns of begin and end; ``None``: not valid."""
    begin, lasts = event.get("ts"), event.get("dur", 0)
    if not isinstance(begin, (int, Decimal)) or not isinstance(lasts, (int, Decimal)):
        return None
    begin_us, lasts_us = Decimal(begin), Decimal(lasts)
    if abs(begin_us) > ev.MAX_PLAUSIBLE or not 0 <= lasts_us <= ev.MAX_PLAUSIBLE:
        return None
    begin_ns = base_ns + round(begin_us * 1000)
    return begin_ns, begin_ns + round(lasts_us * 1000)


def _exact(text: str) -> Decimal | None:
    """Return a number of JSON as it is: a double has no ns of Unix time; ``None``: too large."""
    number = Decimal(text)
    return number if abs(number) < ev.MAX_PLAUSIBLE else None


def _event(event: Event, at: Event, lasts_ns: int, flows: int) -> Event:
    """Return a slice or an arrow of a profile at its place in the timeline; ``flows``: added to the numbers of arrows."""
    about = event.get("args")
    made = {"ph": event["ph"], **at, "name": str(event.get("name") or "?"), "cat": str(event.get("cat") or "?")}
    if event["ph"] == "X":
        return {**made, "dur": lasts_ns / 1000, **({"args": about} if isinstance(about, dict) else {})}
    return {**made, "id": flows + event["id"] % _FLOWS, **({"bp": "e"} if event["ph"] == "f" else {})}


def _process(pid: int, rank: int) -> Iterator[Event]:
    """Yield the name of the process that has the profiles of a rank; it comes after that of the rank."""
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"rank {rank}, torch.profiler"}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": sort_index(rank) + 1}}


def _thread(pid: int, tid: int, name: str) -> Iterator[Event]:
    yield {**_at("M", pid, tid), "name": "thread_name", "args": {"name": name}}
    yield {**_at("M", pid, tid), "name": "thread_sort_index", "args": {"sort_index": tid}}


def _at(kind: str, pid: int, tid: int) -> Event:
    return {"ph": kind, "pid": pid, "tid": tid}


def _exposed(path: Path) -> list[tuple[int, int]]:
    """Return the begins and ends of exposed communication in a file; empty if there is none, or it cannot be read."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_EXPOSED_BYTES)
        return [(int(begin), int(end)) for begin, end in bounded.load(text, _MOST_EXPOSED)]
    except (OSError, ValueError, TypeError, RecursionError):
        return []


def _collective(event: Event) -> str | None:
    """Return the symmetric operation that an event lasts for; ``None``: it is none."""
    name, category = str(event.get("name", "")), event.get("cat")
    if category == "kernel":
        found = _KERNEL.match(name)
        return None if found is None else _OF_KERNEL.get(found[1])
    op = name.removeprefix(_BACKEND)
    return op if category == "user_annotation" and op != name and op in ev.SYMMETRIC else None
