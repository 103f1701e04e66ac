"""Operations, steps and marks as events of the Chrome trace format, which Perfetto and chrome://tracing show. Pure.

A rank is a process of the trace, a group a thread of it; the operations of a group that overlap have further threads, because the slices of
one thread must lie within one another. Events come out while operations are put in: only incomplete collectives are kept, and not many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from commwatch.wire import events as ev
from commwatch_agent.model.bandwidth import bus_factor
from commwatch_agent.model.cells import GroupInfo
from commwatch_agent.model.node_counters import GPU_BUSY, CounterSample
from commwatch_agent.model.views import TraceOperation

Event = dict[str, Any]
#: Most collectives, and most messages, of which not all parts are there. Beyond it, the first is treated as if no more came.
MOST_PENDING = 1 << 14
#: Threads of a process: marks and steps come before those of the groups. 0 would be the process itself.
_MARKS, _STEPS, _FIRST_GROUP = 1, 2, 3
#: Threads of incidents, which lie beside the marks in the picture; above the numbers of all groups.
_FIRST_INCIDENT = 40_000
#: Processes have other numbers than threads: a thread with the number of its process would be its main one.
_FIRST_PROCESS = 100_000
#: Processes of the nodes have numbers below those of the ranks, and come after them in the picture.
_FIRST_NODE, _AFTER_RANKS = 50_000, 1 << 30


class TraceStep(NamedTuple):
    """One step of one rank; times as in ``TraceOperation``, parts in ns or ``None``."""

    rank: int
    seq: int
    start_ns: int
    end_ns: int
    comm_ns: int | None
    exposed_ns: int | None
    p2p_wait_ns: int | None
    long: bool


class TraceMark(NamedTuple):
    """A moment, such as an alert, or a time, such as an incident; ``rank``: whom it is about, ``None``: all."""

    at_ns: int
    name: str
    rank: int | None
    args: Mapping[str, Any]
    #: ``None``: it is a moment.
    end_ns: int | None = None


class _Part(NamedTuple):
    """What is kept of an operation until those of the other ranks are there."""

    rank: int
    tid: int
    start_ns: int
    end_ns: int
    #: Whether its duration can be compared with those of the other ranks.
    compares: bool


class _Threads:
    """The threads of the trace's processes."""

    def __init__(self) -> None:
        self._named: set[tuple[int, int]] = set()
        #: By rank and group: its threads, each with the begin of its earliest slice.
        self._lanes: dict[tuple[int, str], list[tuple[int, int]]] = {}
        self._used: dict[int, int] = {}
        #: By rank: the end of the last incident in each of its threads.
        self._incidents: dict[int, list[int]] = {}

    def named(self, rank: int, tid: int, name: str) -> Iterator[Event]:
        """Yield the name of a thread, once."""
        if (rank, tid) not in self._named:
            self._named.add((rank, tid))
            yield _metadata(rank, tid, "thread_name", name=name)
            yield _metadata(rank, tid, "thread_sort_index", sort_index=tid if tid < _FIRST_INCIDENT else _MARKS)

    def of_incident(self, rank: int, start_ns: int, end_ns: int) -> tuple[int, str]:
        """Return number and name of a thread in which no incident lasts at its begin, and put it there; they come by begin."""
        ends = self._incidents.setdefault(rank, [])
        at = next((i for i, last_ns in enumerate(ends) if last_ns <= start_ns), len(ends))
        ends[at : at + 1] = [end_ns]
        return _FIRST_INCIDENT + at, f"incidents{f' ({at + 1})' if at else ''}"

    def lane(self, rank: int, group: GroupInfo, start_ns: int, end_ns: int) -> tuple[int, str]:
        """Return number and name of a thread of the group in which nothing begins before this end, and put the slice into it."""
        lanes = self._lanes.setdefault((rank, group.group_id), [])
        at = next((i for i, (_, earliest_ns) in enumerate(lanes) if end_ns <= earliest_ns), len(lanes))
        if at == len(lanes):
            self._used[rank] = self._used.get(rank, _FIRST_GROUP - 1) + 1
            lanes.append((self._used[rank], start_ns))
        tid, _ = lanes[at]
        lanes[at] = tid, start_ns
        return tid, f"{group.label}, {group.size} ranks{f' ({at + 1})' if at else ''}"

    def first(self, rank: int, group: GroupInfo) -> tuple[int, str]:
        """Return number and name of the group's first thread."""
        lanes = self._lanes.get((rank, group.group_id))
        if not lanes:
            return self.lane(rank, group, ev.MAX_PLAUSIBLE, ev.MAX_PLAUSIBLE)
        return lanes[0][0], ""


class ChromeTrace:
    """Makes the events of one trace, and counts them.

    Args:
        origin_ns: time 0 of the trace, not later than any event; on the clock of the operations.
        ranks: the ranks in the trace, each with a label for its process.
    """

    def __init__(self, origin_ns: int, ranks: Mapping[int, str]) -> None:
        self._origin_ns, self._ranks, self._threads = origin_ns, ranks, _Threads()
        self._collectives: dict[tuple[str, int], tuple[TraceOperation, list[_Part]]] = {}
        self._messages: dict[tuple[object, ...], list[tuple[bool, _Part]]] = {}
        self._expected: dict[str, int] = {}
        self.operations = self.steps = self.marks = self.arrows = 0

    def processes(self) -> Iterator[Event]:
        """Yield the names of the processes, which come before all else."""
        for rank, label in sorted(self._ranks.items()):
            yield _metadata(rank, None, "process_name", name=f"rank {rank}")
            yield _metadata(rank, None, "process_labels", labels=label)
            yield _metadata(rank, None, "process_sort_index", sort_index=sort_index(rank))

    def of_operations(self, operations: Iterable[TraceOperation]) -> Iterator[Event]:
        """Yield the events of operations, given latest end first."""
        for one in operations:
            self.operations += 1
            if one.flags & (ev.FAILED | ev.UNTIMED):
                yield from self._moment(one)
                continue
            begin_ns = _begin_ns(one)
            tid, name = self._threads.lane(one.rank, one.group, begin_ns, one.end_ns)
            yield from self._threads.named(one.rank, tid, name)
            part = _Part(one.rank, tid, begin_ns, one.end_ns, compares(one))
            yield self._slice(part, one.op, begin_ns, one.end_ns, args=_about(one))
            yield from self._message(one, part) if one.op in ev.P2P else self._collective(one, part)
        while self._collectives:
            yield from self._join(next(iter(self._collectives)))

    def of_steps(self, steps: Iterable[TraceStep]) -> Iterator[Event]:
        """Yield a slice for each step with the sums of its parts, and these as a counter in percent of the step."""
        for step in steps:
            self.steps += 1
            yield from self._threads.named(step.rank, _STEPS, "steps")
            part = _Part(step.rank, _STEPS, step.start_ns, step.end_ns, False)
            lasts = max(1, step.end_ns - step.start_ns)
            parts = {
                "communication": step.comm_ns,
                "exposed": step.exposed_ns,
                "waiting for messages": step.p2p_wait_ns,
            }
            shares = {name: round(100 * ns / lasts, 2) for name, ns in parts.items() if ns is not None}
            args: Event = {f"{name} %": share for name, share in shares.items()}
            args |= {f"{name}, us": ns / 1000 for name, ns in parts.items() if ns is not None}
            args |= {"long": True} if step.long else {}
            yield self._slice(part, f"step {step.seq}", step.start_ns, step.end_ns, cat="step", args=args)
            if shares:
                yield {**self._at("C", part, step.start_ns), "name": "share of the step, %", "args": shares}

    def of_marks(self, marks: Iterable[TraceMark]) -> Iterator[Event]:
        """Yield an instant for each mark, or a slice for one that lasts."""
        for mark in sorted(marks, key=lambda mark: mark.at_ns):
            self.marks += 1
            rank = mark.rank if mark.rank in self._ranks else None
            shown = min(self._ranks) if rank is None else rank
            if mark.end_ns is not None:
                tid, name = self._threads.of_incident(shown, mark.at_ns, mark.end_ns)
                yield from self._threads.named(shown, tid, name)
                part = _Part(shown, tid, mark.at_ns, mark.end_ns, False)
                yield self._slice(part, mark.name, mark.at_ns, mark.end_ns, cat="mark", args=dict(mark.args))
                continue
            part = _Part(shown, _MARKS, mark.at_ns, mark.at_ns, False)
            yield from self._threads.named(shown, _MARKS, "alerts")
            yield {
                **self._at("i", part, mark.at_ns),
                "s": "g" if rank is None else "p",
                "name": mark.name,
                "cat": "mark",
                "args": dict(mark.args),
            }

    def of_samples(self, node: int, host: str, samples: Iterable[CounterSample]) -> Iterator[Event]:
        """Yield counters of the GPUs in percent and of the network devices in MB (10^6 bytes) per second, in a process for their node.

        Args:
            node: the number of the node in this trace.
        """
        pid = _FIRST_NODE + node
        for number, sample in enumerate(samples):
            if not number:
                yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"node {host}"}}
                yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": _AFTER_RANKS + node}}
            tracks: dict[str, dict[str, float]] = {}
            for kind, device, value in sample.counters:
                if kind == GPU_BUSY:
                    tracks[f"GPU {device}"] = {"busy, %": round(100 * value, 2)}
                else:
                    tracks.setdefault(device, {})[f"{kind}, MB/s"] = round(value / 1e6, 3)
            at = {"ph": "C", "pid": pid, "ts": (sample.at_ns - self._origin_ns) / 1000}
            yield from ({**at, "name": name, "args": series} for name, series in tracks.items())

    def _moment(self, one: TraceOperation) -> Iterator[Event]:
        """Yield the launch of an operation that has no duration."""
        tid, name = self._threads.first(one.rank, one.group)
        yield from self._threads.named(one.rank, tid, name)
        part = _Part(one.rank, tid, one.launch_ns, one.launch_ns, False)
        what = "failed" if one.flags & ev.FAILED else "without times"
        yield {
            **self._at("i", part, one.launch_ns),
            "s": "t",
            "name": f"{one.op} {what}",
            "cat": "operation",
            "args": _about(one),
        }

    def _collective(self, one: TraceOperation, part: _Part) -> Iterator[Event]:
        """Keep a part of a collective; yield what shows how its parts depend on one another when those of all ranks here are there."""
        key = one.group.group_id, one.seq
        _, parts = self._collectives.setdefault(key, (one, []))
        parts.append(part)
        if len(parts) >= self._members_here(one.group):
            yield from self._join(key)
        elif len(self._collectives) > MOST_PENDING:
            yield from self._join(next(iter(self._collectives)))

    def _members_here(self, group: GroupInfo) -> int:
        if group.group_id not in self._expected:
            members = group.ranks
            self._expected[group.group_id] = (
                group.size if members is None else sum(rank in self._ranks for rank in members)
            )
        return self._expected[group.group_id]

    def _join(self, key: tuple[str, int]) -> Iterator[Event]:
        """Yield wait and transfer of the parts of a collective if all are known, and arrows from those that were waited for."""
        one, parts = self._collectives.pop(key)
        root = next((part for part in parts if part.rank == one.peer), None)
        if one.op in ev.SYMMETRIC and len(parts) == one.group.size > 1 and all(part.compares for part in parts):
            yield from self._split(parts, one.op)
        elif root is not None and one.op in ev.TO_ROOT:
            yield from self._arrows([part for part in parts if part is not root], root, one.op)
        else:
            hub = root if root is not None and one.op in ev.FROM_ROOT else max(parts, key=lambda part: part.start_ns)
            for part in parts:
                if part is not hub:
                    yield from self._arrows([hub], part, one.op)

    def _split(self, parts: list[_Part], op: str) -> Iterator[Event]:
        """Yield wait and transfer of each part, as ``collective_join.split`` does, and arrows from the rank that began last.

        Ends of one collective are seen some microseconds apart. No transfer is drawn before the last rank began, which all waited for.
        """
        late = min(parts, key=lambda part: part.end_ns - part.start_ns)
        transfer_ns = late.end_ns - late.start_ns
        for part in parts:
            wait_ns = part.end_ns - part.start_ns - transfer_ns
            begin_ns = min(max(part.start_ns + wait_ns, late.start_ns), part.end_ns)
            args = {"wait_us": wait_ns / 1000, "transfer_us": transfer_ns / 1000}
            if begin_ns > part.start_ns:
                yield self._slice(part, "wait", part.start_ns, begin_ns, cat="wait", args=args)
            yield self._slice(part, "transfer", begin_ns, part.end_ns, cat="transfer", args=args)
            if part is not late and begin_ns >= late.start_ns:
                yield from self._arrow(late, part, begin_ns, op)

    def _arrows(self, sources: list[_Part], target: _Part, name: str) -> Iterator[Event]:
        """Yield an arrow from each part to one that could not end before all of them began; none if it had ended by then.

        Perfetto draws an arrow from the slice that begins first. So if the target began before, the rest of it is a slice of its own.
        """
        if not sources:
            return
        last = max(sources, key=lambda part: part.start_ns)
        if target.start_ns < last.start_ns < target.end_ns:
            yield self._slice(target, f"since rank {last.rank} began", last.start_ns, target.end_ns, cat="since")
        if last.start_ns < max(target.end_ns, target.start_ns + 1):
            for source in sources:
                yield from self._arrow(source, target, max(last.start_ns, target.start_ns), name)

    def _message(self, one: TraceOperation, part: _Part) -> Iterator[Event]:
        """Keep a send or recv; yield the arrow between the two when the other is there."""
        if one.peer not in self._ranks:
            return
        sent = one.op == "send"
        pair = (one.rank, one.peer) if sent else (one.peer, one.rank)
        key = one.group.group_id, *pair, one.tag, one.seq
        waiting = self._messages.setdefault(key, [])
        other = next((each for each in waiting if each[0] is not sent), None)
        if other is None:
            waiting.append((sent, part))
            if len(self._messages) > MOST_PENDING:
                del self._messages[next(iter(self._messages))]
            return
        waiting.remove(other)
        if not waiting:
            del self._messages[key]
        source, target = (part, other[1]) if sent else (other[1], part)
        yield from self._arrows([source], target, "message")

    def _arrow(self, source: _Part, target: _Part, at_ns: int, name: str) -> Iterator[Event]:
        """Yield an arrow from the begin of a slice to a moment of another."""
        self.arrows += 1
        about = {"id": self.arrows, "cat": "flow", "name": name}
        yield {**self._at("s", source, source.start_ns), **about}
        yield {**self._at("f", target, at_ns), **about, "bp": "e"}

    def _slice(
        self, part: _Part, name: str, start_ns: int, end_ns: int, *, cat: str = "operation", args: Event | None = None
    ) -> Event:
        event = {**self._at("X", part, start_ns), "dur": (end_ns - start_ns) / 1000, "name": name, "cat": cat}
        return event if args is None else {**event, "args": args}

    def _at(self, phase: str, part: _Part, at_ns: int) -> Event:
        return {"ph": phase, "pid": pid_of(part.rank), "tid": part.tid, "ts": (at_ns - self._origin_ns) / 1000}


def pid_of(rank: int) -> int:
    """Return the number of a rank's process."""
    return _FIRST_PROCESS + rank


def sort_index(rank: int) -> int:
    """Return the place of a rank's process in the picture; the next one is free for its profiles."""
    return 2 * rank


def _metadata(rank: int, tid: int | None, what: str, **args: object) -> Event:
    thread = {} if tid is None else {"tid": tid}
    return {"ph": "M", "pid": pid_of(rank), **thread, "name": what, "args": args}


def _begin_ns(one: TraceOperation) -> int:
    """Return where the slice of an operation begins.

    A message that no device has timed begins at its launch. Its end may have been seen only when the caller waited for it, much later; its
    ``start_ns``, not before the end of the message before it, may then be after the time when it was received.
    """
    by_device = one.timing in (ev.BY_EVENTS, ev.BY_NCCL)
    return min(one.launch_ns, one.start_ns) if one.op in ev.P2P and not by_device else one.start_ns


def compares(one: TraceOperation) -> bool:
    """Return whether duration and end of an operation can be compared with those of the other ranks."""
    seen_late = one.timing == ev.BY_WAIT and one.flags & ev.ASYNC
    return one.group.aligned and not one.flags & ev.NOT_JOINED and not seen_late


def _about(one: TraceOperation) -> Event:
    """Return what a click on a slice shows: sizes in bytes, rates in GB/s (10^9), times in µs."""
    lasts_ns, factor = one.end_ns - one.start_ns, bus_factor(one.op, one.group.size)
    timed = not one.flags & (ev.FAILED | ev.UNTIMED) and lasts_ns > 0 and one.size
    found = {
        "group": one.group.label,
        "group_id": one.group.group_id,
        "seq": one.seq,
        "part": one.part,
        "size_bytes": one.size,
        "busbw_GB_per_s": round(one.size * factor / lasts_ns, 4) if timed and one.size and factor is not None else None,
        "dtype": one.dtype,
        "peer": one.peer if one.peer >= 0 else None,
        "tag": one.tag if one.op in ev.P2P else None,
        "queued_us": (one.start_ns - one.launch_ns) / 1000 if one.start_ns > one.launch_ns else None,
        "timing": ev.TIMING[one.timing] if one.timing < len(ev.TIMING) else None,
    }
    return {name: value for name, value in found.items() if value is not None}
