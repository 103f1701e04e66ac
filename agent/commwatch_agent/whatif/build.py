"""Rebuilds the programs of the ranks from recorded operations and steps. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import fmean, median
from typing import NamedTuple

from commwatch.wire import events as ev
from commwatch_agent.analysis.framework_settings import REPLICATED, SHARDED, role
from commwatch_agent.model.views import TraceOperation
from commwatch_agent.whatif.curves import curves_of, points_of
from commwatch_agent.whatif.model import CannotAnswer, Do, Kind, Model, Op, Program

#: Fewest steps of a replay.
LEAST_STEPS = 3
#: An operation whose end is seen so late after a step mark, as a share of the step, ended at the mark. Where the operations of most steps end in
#: them, so does one that is seen to end later, if the thread waited at the end of its step: what saw its end was late on a busy machine.
_LATE_SEEN = 0.01
#: A thread waits for an operation if the time from its end to the next launch varies less than this part of the time between the launches.
_STEADY = 0.5


class StepSpan(NamedTuple):
    """A step of one rank on the same clock."""

    start_ns: int
    end_ns: int
    exposed_ns: int | None


@dataclass
class _Shared:
    """An operation and its parts by rank."""

    first: TraceOperation
    parts: dict[int, TraceOperation] = field(default_factory=dict)


class _Gap(NamedTuple):
    """The time before a launch or the end of a step, in ns."""

    #: The launch before it, or the end of that operation if it blocks.
    free_ns: int
    at_ns: int
    #: The latest end in that time of an operation that does not block; ``None``: none ends.
    end_ns: int | None


@dataclass
class _Line:
    """What one rank did in one step, in order of launch."""

    span: StepSpan
    #: Number of the operation, its part, and when the thread launched it.
    parts: list[tuple[int, TraceOperation, int]]
    #: Numbers of the operations in which the thread is blocked from launch to end.
    blocking: frozenset[int] = frozenset()

    def gaps(self) -> list[_Gap]:
        """Return the time before each launch, and before the end of the step."""
        found, free_ns = [], self.span.start_ns
        moments = [*(at for _, _, at in self.parts), self.span.end_ns]
        open_ends = [part.end_ns for number, part, _ in self.parts if not self.blocks(number)]
        for place, at_ns in enumerate(moments):
            ends = [end for end in open_ends if free_ns < end <= at_ns]
            found.append(_Gap(free_ns, at_ns, max(ends, default=None)))
            if place < len(self.parts):
                number, part, _ = self.parts[place]
                free_ns = part.end_ns if self.blocks(number) else at_ns
        return found

    def outlasts(self) -> bool:
        """Return whether an operation is seen to end well after the step."""
        return any(part.end_ns > self._late_ns() for _, part, _ in self.parts)

    def waits_at_its_end(self) -> bool:
        """Return whether the thread is known to wait for most of the time after the last launch and the last end of an operation in the step."""
        moments = (moment for _, part, at in self.parts for moment in (at, part.end_ns) if moment <= self.span.end_ns)
        free_ns = max(moments, default=self.span.end_ns)
        return 2 * (self.span.exposed_ns or 0) > self.span.end_ns - free_ns > 0

    def end_in_it(self, *, waited: bool) -> None:
        """Let operations end with the step that are seen to end a little later; with ``waited`` also those that are seen to end much later."""
        until_ns = inf if waited else self._late_ns()
        self.parts = [
            (number, part._replace(end_ns=self.span.end_ns) if self.span.end_ns < part.end_ns <= until_ns else part, at)
            for number, part, at in self.parts
        ]

    def _late_ns(self) -> int:
        return self.span.end_ns + int(_LATE_SEEN * (self.span.end_ns - self.span.start_ns))

    def blocks(self, number: int) -> bool:
        """Return whether the thread is blocked in an operation."""
        return number in self.blocking


def build(
    parts: Iterable[TraceOperation], steps: Mapping[int, Sequence[StepSpan]], hosts: Mapping[int, str], world_size: int
) -> Model:
    """Return the model of the steps that all ranks have.

    Args:
        parts: the operations of the ranks.
        steps: consecutive steps by rank, oldest first; the same number for each rank.
        hosts: names of the ranks' hosts.
        world_size: ranks of the job.

    Raises:
        CannotAnswer: there are too few steps.
    """
    count = min(map(len, steps.values()), default=0)
    if count < LEAST_STEPS:
        raise CannotAnswer(f"too few steps of all ranks were recorded: {count}, at least {LEAST_STEPS} are needed")
    timed = sorted((part for part in parts if part.rank in steps), key=lambda part: (part.launch_ns, part.seq))
    shared, unknown = _shared(timed)
    lines = _lines(shared, steps)
    waits = _waits(lines)
    ops = _ops(shared)
    programs = {rank: list(_programs(of_rank, waits, shared)) for rank, of_rank in lines.items()}
    spanning = frozenset(each.first.group.label for each in shared if len({hosts.get(rank) for rank in each.parts}) > 1)
    labels = frozenset(op.group for op in ops.values())
    points = points_of(ops, _ready(lines, shared))
    curves, assumed = curves_of(ops, points)
    begin_ns = min(of_rank[0].start_ns for of_rank in steps.values())
    return Model(
        ops=ops,
        programs=programs,
        begins_s={rank: (of_rank[0].start_ns - begin_ns) / 1e9 for rank, of_rank in steps.items()},
        curves=curves,
        points=points,
        linked=spanning or labels,
        world_size=world_size,
        measured_s=tuple(
            fmean((span.end_ns - span.start_ns) / 1e9 for span in spans) for spans in zip(*steps.values(), strict=True)
        ),
        assumed=(*assumed, *_assumptions(shared, unknown, steps, world_size)),
        hosts=len({hosts[rank] for rank in steps if rank in hosts}),
    )


def _shared(parts: Iterable[TraceOperation]) -> tuple[list[_Shared], int]:
    """Return operations of the training in order of their first launch, and how many parts are left out because their times are not known."""
    found: dict[tuple[object, ...], _Shared] = {}
    numbers: Counter[tuple[object, ...]] = Counter()
    unknown = 0
    for part in parts:
        if part.flags & ev.BESIDE:
            continue
        if part.flags & (ev.FAILED | ev.UNTIMED) or part.end_ns < part.launch_ns:
            unknown += 1
            continue
        if part.op in ev.P2P:
            ends = (part.rank, part.peer) if part.op == "send" else (part.peer, part.rank)
            pair = (part.op, part.group.group_id, *ends, part.tag)
            numbers[pair] += 1
            key: tuple[object, ...] = (*pair[1:], part.seq)
        elif part.flags & ev.UNALIGNED or not part.group.aligned:
            key = (part.group.group_id, part.seq, part.rank)
        else:
            key = (part.group.group_id, part.seq)
        found.setdefault(key, _Shared(part)).parts[part.rank] = part
    return list(found.values()), unknown


def _lines(shared: Sequence[_Shared], steps: Mapping[int, Sequence[StepSpan]]) -> dict[int, list[_Line]]:
    """Return what each rank did in each step."""
    lines = {rank: [_Line(span, []) for span in spans] for rank, spans in steps.items()}
    begins = {rank: [span.start_ns for span in spans] for rank, spans in steps.items()}
    for number, each in enumerate(shared):
        for rank, part in each.parts.items():
            at_ns = _launched_ns(part)
            place = bisect_right(begins[rank], at_ns) - 1
            if place >= 0 and at_ns < steps[rank][place].end_ns:
                lines[rank][place].parts.append((number, part, at_ns))
    for of_rank in lines.values():
        for line in of_rank:
            line.parts.sort(key=lambda each: (each[2], each[0]))
        outlasting = sum(line.outlasts() for line in of_rank)
        for line in of_rank:
            line.end_in_it(waited=2 * outlasting < len(of_rank) and line.waits_at_its_end())
            moments = [at for _, _, at in line.parts[1:]] + [line.span.end_ns] * bool(line.parts)
            line.blocking = frozenset(
                number
                for (number, part, _), following in zip(line.parts, moments, strict=True)
                if not part.flags & ev.ASYNC and part.end_ns <= following
            )
    return lines


def _launched_ns(part: TraceOperation) -> int:
    """Return when the thread launched it; on a GPU, when the GPU could begin it, as the host runs ahead."""
    return part.start_ns if part.flags & ev.ON_DEVICE else part.launch_ns


def _waits(lines: Mapping[int, list[_Line]]) -> set[int]:
    """Return the places in the order of launches before which the threads wait for operations that end there.

    A thread that waits for an operation goes on when it ends: over the steps, the time from that end to the next launch varies less than
    the time between the launches.
    """
    usual = Counter(len(line.parts) for of_rank in lines.values() for line in of_rank).most_common(1)[0][0]
    votes: Counter[int] = Counter()
    asked: Counter[int] = Counter()
    for of_rank in lines.values():
        gaps = [line.gaps() for line in of_rank if len(line.parts) == usual]
        for place in range(usual):
            ended = [(at - free, at - end) for free, at, end in (gap[place] for gap in gaps) if end is not None]
            if len(ended) >= max(LEAST_STEPS, len(gaps) // 2):
                asked[place] += 1
                votes[place] += _spread([after for _, after in ended]) < _STEADY * _spread([gap for gap, _ in ended])
    return {place for place, count in asked.items() if 2 * votes[place] > count}


def _spread(values: Sequence[float]) -> float:
    middle = median(values)
    return median(abs(value - middle) for value in values)


def _programs(lines: Sequence[_Line], waits: set[int], shared: Sequence[_Shared]) -> Iterable[Program]:
    """Yield the program of each step of a rank."""
    #: Launched, and not waited for: number and end.
    open_ends: dict[int, int] = {}
    for line in lines:
        program: Program = []

        def wait(until_ns: int, program: Program = program) -> None:
            for number in [number for number, end_ns in open_ends.items() if end_ns <= until_ns]:
                program.append(Do(Kind.WAIT, op=number))
                del open_ends[number]

        gaps = line.gaps()
        blocked = _blocked(line, gaps, waits)
        for place, gap in enumerate(gaps):
            free_ns = gap.free_ns
            if gap.end_ns is not None and place in blocked:
                program.append(Do(Kind.COMPUTE, (gap.end_ns - blocked[place] - free_ns) / 1e9))
                wait(gap.end_ns)
                free_ns = gap.end_ns
            program.append(Do(Kind.COMPUTE, max(0, gap.at_ns - free_ns) / 1e9))
            if place == len(line.parts):
                wait(gap.at_ns)
                break
            number, part, _ = line.parts[place]
            program.append(_launch(shared[number], part, number))
            if line.blocks(number):
                program.append(Do(Kind.WAIT, op=number))
            else:
                open_ends[number] = part.end_ns
        yield program


def _budget_ns(line: _Line) -> float:
    """Return how long the thread waited for operations that it did not launch as blocking ones; infinite if that is not known."""
    if line.span.exposed_ns is None:
        return float("inf")
    blocking = sum(part.end_ns - at for number, part, at in line.parts if line.blocks(number))
    return max(0, line.span.exposed_ns - blocking)


def _blocked(line: _Line, gaps: Sequence[_Gap], waits: set[int]) -> dict[int, float]:
    """Return how long the thread waited before each launch, in ns; first where the last operations end, as all frameworks wait for gradients."""
    found: dict[int, float] = {}
    last, left_ns = max(range(len(gaps)), key=lambda place: gaps[place].end_ns or 0), _budget_ns(line)
    #: Ends that were seen because the thread's wait returned.
    seen = {part.end_ns for _, part, _ in line.parts if part.timing == ev.BY_WAIT}
    certain = {place for place, gap in enumerate(gaps) if gap.end_ns in seen}
    for place in (last, *sorted(waits | certain)):
        gap = gaps[place] if place < len(gaps) else None
        if gap is not None and gap.end_ns is not None and place not in found:
            found[place] = min(left_ns, gap.end_ns - gap.free_ns)
            left_ns -= found[place]
    return found


def _launch(shared: _Shared, part: TraceOperation, number: int) -> Do:
    """Return the launch of a part."""
    parts = shared.parts.values()
    if part.op in ev.P2P:
        sends = [each for each in parts if each.op == "send"]
        receives = [each for each in parts if each.op == "recv"]
        if len(sends) == len(receives) == 1 and sends[0].end_ns > receives[0].launch_ns:
            return Do(Kind.LAUNCH, (max(each.end_ns for each in parts) - part.end_ns) / 1e9, number)
        givers = sends
    elif part.op in ev.FROM_ROOT:
        givers = [each for each in parts if each.rank == each.peer]
    elif part.op in ev.TO_ROOT:
        givers = [each for each in parts if each.rank != each.peer]
    else:
        return Do(Kind.LAUNCH, (max(each.end_ns for each in parts) - part.end_ns) / 1e9, number)
    ready_ns = max((each.launch_ns for each in givers), default=part.launch_ns)
    if part in givers:
        return Do(Kind.GIVE, (part.end_ns - part.launch_ns) / 1e9, number)
    return Do(Kind.TAKE, max(0, part.end_ns - max(ready_ns, part.launch_ns)) / 1e9, number)


def _ops(shared: Sequence[_Shared]) -> dict[int, Op]:
    """Return the operations by number."""
    sharded = _sharded(shared)
    last_ns: dict[str, int] = {}
    found = {}
    for number, each in enumerate(shared):
        first, group = each.first, each.first.group
        end_ns, ready_ns = max(p.end_ns for p in each.parts.values()), max(_launched_ns(p) for p in each.parts.values())
        queued = first.op in ev.SYMMETRIC
        begin_ns = max(ready_ns, last_ns.get(group.group_id, 0)) if queued else ready_ns
        if queued:
            last_ns[group.group_id] = max(end_ns, last_ns.get(group.group_id, 0))
        found[number] = Op(
            group=group.label,
            group_id=group.group_id,
            op=first.op,
            size_bytes=first.size or 0,
            n=2 if first.op in ev.P2P else group.size,
            work_s=max(0, end_ns - begin_ns) / 1e9,
            queued=queued,
            carries=_carries(first, sharded),
            dtype=first.dtype,
            backend=group.backend,
            on_device=bool(first.flags & ev.ON_DEVICE),
            part=next((part.part for part in each.parts.values() if part.part is not None), None),
        )
    return found


def _sharded(shared: Sequence[_Shared]) -> bool:
    ops: dict[str, set[str]] = {}
    for each in shared:
        ops.setdefault(each.first.group.label, set()).add(each.first.op)
    return any({"all_gather", "reduce_scatter"} <= kinds for kinds in ops.values())


def _carries(part: TraceOperation, sharded: bool) -> str:
    found = role(part.group.label, part.op, part.size or 0, sharded)
    if found == SHARDED and part.op == "all_gather":
        return "parameters"
    return "gradients" if found in (REPLICATED, SHARDED) and part.op in ("all_reduce", "reduce_scatter") else ""


def _ready(lines: Mapping[int, list[_Line]], shared: Sequence[_Shared]) -> dict[int, tuple[float, float]]:
    """Return for each operation of which all ranks are known when it could begin and when it ended, in seconds."""
    return {
        number: (
            max(_launched_ns(part) for part in each.parts.values()) / 1e9,
            max(part.end_ns for part in each.parts.values()) / 1e9,
        )
        for number, each in enumerate(shared)
        if each.first.op in ev.SYMMETRIC and len(each.parts) == each.first.group.size
    }


def _assumptions(
    shared: Sequence[_Shared], unknown: int, steps: Mapping[int, Sequence[StepSpan]], world_size: int
) -> Iterable[str]:
    """Yield what the replay assumes about these records."""
    if len(steps) < world_size:
        yield f"only {len(steps)} of {world_size} ranks are known here: what they wait for the others counts as transfer"
    if unknown:
        yield f"{unknown} operations without known times count as compute"
    every = [span.exposed_ns for spans in steps.values() for span in spans]
    if not_measured := sum(each is None for each in every):
        of = "" if not_measured == len(every) else f" in {not_measured} of {len(every)} steps of ranks"
        yield f"exposed time was not measured{of}: in these the replay lets a rank wait from its last launch on. All exposed shares here are of the replay"
    if any(each.first.flags & ev.ON_DEVICE for each in shared):
        yield "on a GPU, compute is what lies between the operations on it"
