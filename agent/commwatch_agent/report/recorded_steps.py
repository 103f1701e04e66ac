"""The latest steps of a job, from the timelines of its nodes, for the replay of ``whatif``."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, takewhile
from pathlib import Path

from commwatch_agent.model.clocks import FIRST, Clock, compare
from commwatch_agent.model.views import JobView, TraceOperation
from commwatch_agent.report.chrome_trace import TraceStep
from commwatch_agent.report.timeline_export import NodeTrace, Window, own_trace
from commwatch_agent.whatif.answers import Study, study
from commwatch_agent.whatif.build import StepSpan, build
from commwatch_agent.whatif.model import CannotAnswer, Model

#: Most steps that are replayed, and most operations of all ranks together: the latest. For a page or an answer of an agent there are fewer,
#: because they are made in little memory, and others wait for them; and for advice, which is requested often.
MOST_STEPS, MOST_PARTS, FEW_PARTS, ADVICE_PARTS = 50, 200_000, 40_000, 10_000


def model_of(nodes: Sequence[NodeTrace], world_size: int, most_parts: int = MOST_PARTS) -> Model:
    """Return the model of a job's latest steps that are not long.

    Args:
        nodes: the timelines of its nodes, this one first.
        world_size: ranks of the job.
        most_parts: most operations of all ranks together.

    Raises:
        CannotAnswer: too few steps of all ranks are recorded.
    """
    latest = max(node.restart for node in nodes)
    nodes = [node for node in nodes if node.restart == latest]
    clocks = compare([node.ends for node in nodes])
    operations: list[TraceOperation] = []
    steps: dict[int, list[TraceStep]] = {}
    complete_ns = 0
    for node, clock in zip(nodes, clocks, strict=True):
        if clock is None:
            raise CannotAnswer("the clocks of the nodes cannot be compared: too few of their collectives are shared")
        if node.complete_ns:
            complete_ns = max(complete_ns, clock.of_first(node.complete_ns))
        known = list(node.steps)
        from_ns = _begin_of_last(known) if clock is FIRST else 0
        complete_ns = max(complete_ns, from_ns)
        found = list(islice(takewhile(lambda one: one.end_ns >= from_ns, node.operations), most_parts // len(nodes)))  # noqa: B023
        if found and len(found) == most_parts // len(nodes):
            complete_ns = max(complete_ns, clock.of_first(found[-1].end_ns))
        operations += (_operation(clock, one) for one in found)
        for step in (*known, *node.arriving):
            times = clock.of_first(step.start_ns), clock.of_first(step.end_ns)
            steps.setdefault(step.rank, []).append(step._replace(start_ns=times[0], end_ns=times[1]))
    hosts = {rank: host for node in nodes for rank, host in node.ranks.items()}
    spans = _common(steps, complete_ns)
    return build(operations, spans, hosts, max(world_size, len(spans)))


def known_steps(
    path: Path, job: JobView, last_s: float | None, others: Sequence[NodeTrace] = (), most_parts: int = FEW_PARTS
) -> Model | None:
    """Return the model of a job's latest steps on the node of a history and on others; ``None``: they cannot be replayed.

    Args:
        last_s: as in ``timeline_export.Window``.
        others: the timelines of other nodes.
        most_parts: as in ``model_of``.
    """
    try:
        with own_trace(path, job.job_id, Window(last_s), (), alone=not others) as own:
            return model_of([own, *others], job.world_size, most_parts)
    except CannotAnswer:
        return None


def study_of(job_id: str, model: Model | None, cores: float | None) -> Study | None:
    """Return the answers to the usual questions about a job; ``None``: its steps cannot be replayed; ``cores``: as for ``study``."""
    try:
        return None if model is None else study(job_id, model, {}, cores=cores)
    except CannotAnswer:
        return None


def _operation(clock: Clock, one: TraceOperation) -> TraceOperation:
    """Return an operation by the clock of the first node."""
    if clock is FIRST:
        return one
    launch_ns, start_ns, end_ns = map(clock.of_first, (one.launch_ns, one.start_ns, one.end_ns))
    return one._replace(launch_ns=launch_ns, start_ns=start_ns, end_ns=end_ns)


def _begin_of_last(steps: Iterable[TraceStep]) -> int:
    """Return the begin of the earliest of the latest steps that all ranks of a node have."""
    by_rank: dict[int, list[TraceStep]] = {}
    for step in steps:
        by_rank.setdefault(step.rank, []).append(step)
    return min((spans[0].start_ns for spans in _common(by_rank, 0).values() if spans), default=0)


def _common(steps: dict[int, list[TraceStep]], complete_ns: int) -> dict[int, list[StepSpan]]:
    """Return the latest steps that all ranks have, oldest first; steps of two ranks are the same if each has the end nearest to the other's, and if
    their numbers differ by as much as in most steps: late marks can bring the ends of different steps together.

    Args:
        complete_ns: earlier operations are not known.
    """
    by_rank = {
        rank: sorted((s for s in of_rank if not s.long), key=lambda s: s.end_ns) for rank, of_rank in steps.items()
    }
    if not by_rank:
        return {}
    first = min(by_rank)
    ends = {rank: [step.end_ns for step in of_rank] for rank, of_rank in by_rank.items()}
    found: list[dict[int, TraceStep]] = []
    for step in by_rank[first]:
        same = {rank: of_rank[_nearest(ends[rank], step.end_ns)] for rank, of_rank in by_rank.items() if of_rank}
        paired = {
            rank: s
            for rank, s in same.items()
            if by_rank[first][_nearest(ends[first], s.end_ns)] is step
            and 2 * abs(s.end_ns - step.end_ns) < step.end_ns - step.start_ns
        }
        if len(paired) == len(by_rank) and min(s.start_ns for s in paired.values()) >= complete_ns:
            found.append(paired)
    usual = Counter(_apart(paired) for paired in found).most_common(1)
    latest = [paired for paired in found if _apart(paired) == usual[0][0]][-MOST_STEPS:]
    return {
        rank: [StepSpan(s.start_ns, s.end_ns, s.exposed_ns) for s in (paired[rank] for paired in latest)]
        for rank in by_rank
    }


def _apart(steps: Mapping[int, TraceStep]) -> tuple[tuple[int, int], ...]:
    """Return by how much the numbers of steps are above the lowest, by rank."""
    least = min(step.seq for step in steps.values())
    return tuple(sorted((rank, step.seq - least) for rank, step in steps.items()))


def _nearest(ends: Sequence[int], end_ns: int) -> int:
    """Return the place of the nearest of some sorted ends."""
    at = bisect_left(ends, end_ns)
    return min(range(max(0, at - 1), min(len(ends), at + 1)), key=lambda place: abs(ends[place] - end_ns))
