"""Questions about jobs, their ranks, groups, steps and pipelines, and about what the live page shows of the past."""

from __future__ import annotations

from dataclasses import dataclass

from commwatch_agent.analysis.pipelines import Pipeline
from commwatch_agent.analysis.pipelines import over_nodes as pipelines_over_nodes
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.analysis.time_buckets import FINE, Lengths, Slot, SlotSums, slots_of
from commwatch_agent.analysis.timeline import MOST_RANKS, NodeBars, Timeline, past_bars, timeline
from commwatch_agent.history.history import History
from commwatch_agent.history.operations import Reader
from commwatch_agent.job.merging import Heard, merged_jobs
from commwatch_agent.job.queries import NodePart
from commwatch_agent.model.views import GroupView, JobFigures, JobView, RankView, StepView
from commwatch_agent.questions.answer import Scoped, job_exists
from commwatch_agent.questions.heard import over_nodes, read
from commwatch_agent.questions.operations import deadline
from commwatch_agent.report.job_figures import FiguresPart, figures_of_nodes, figures_parts


def jobs(agent: QueryService, *, most: int | None, heard: Heard | None = None) -> Scoped[list[JobView]]:
    """Return the jobs, the latest started first; ``most``: only so many."""
    found, nodes = read(heard, list[JobView])
    own = agent.jobs()
    every = own if heard is None else merged_jobs([*own, *(job for (views,) in found for job in views)])
    return Scoped(nodes, every[:most])


def figures_of_all(agent: QueryService, *, most: int, durations: int, heard: Heard) -> Scoped[list[JobFigures]]:
    """Return all jobs with their headline figures, the latest started first; arguments as the other agents were asked."""
    found, nodes = read(heard, list[FiguresPart])
    own = figures_parts(agent, most, durations)
    return Scoped(nodes, figures_of_nodes([*own, *(part for (parts,) in found for part in parts)], most))


def ranks(agent: QueryService, job: str | None, *, heard: Heard | None = None) -> Scoped[list[RankView]]:
    """Return the ranks, sorted by job and number."""
    every, nodes = over_nodes(agent, heard, list[RankView], lambda views: NodePart(ranks=tuple(views)))
    return Scoped(nodes, every.ranks(job))


def groups(agent: QueryService, job: str | None, *, heard: Heard | None = None) -> Scoped[list[GroupView]]:
    """Return the process groups."""
    every, nodes = over_nodes(agent, heard, list[GroupView], lambda views: NodePart(groups=tuple(views)))
    return Scoped(nodes, every.groups(job))


def steps(
    agent: QueryService,
    from_ns: int,
    until_ns: int,
    job: str | None,
    *,
    rank: int | None,
    limit: int,
    heard: Heard | None = None,
) -> Scoped[list[StepView]]:
    """Return training steps, newest first."""
    if heard is None:
        job_exists(agent, job)
    every, nodes = over_nodes(agent, heard, list[StepView], lambda views: NodePart(steps=tuple(views)))
    return Scoped(nodes, every.steps(from_ns, until_ns, job, rank, limit))


def pipelines(agent: QueryService, *, own: list[Pipeline], heard: Heard) -> Scoped[list[Pipeline]]:
    """Return the pipelines; ``own``: their parts on this node."""
    found, nodes = read(heard, list[Pipeline])
    return Scoped(nodes, pipelines_over_nodes([*own, *(each for (parts,) in found for each in parts)]))


def slots(agent: QueryService, from_ns: int, until_ns: int, job: str, *, of: Lengths = FINE) -> list[SlotSums]:
    """Return the sums of a job's buckets for another agent."""
    job_exists(agent, job)
    return agent.slots(from_ns, until_ns, job, of)


def bars(agent: QueryService, from_ns: int, until_ns: int, job: str) -> NodeBars:
    """Return the latest operations of a job that ended in a window."""
    job_exists(agent, job)
    with History(agent.path) as history:
        reader = Reader(history, {ring.id: ring for ring in history.rings(job)})
        return past_bars(reader.records(from_ns, until_ns, go_on=deadline()), reader.names, reader.parts.of)


def slots_elsewhere(agent: QueryService, *, heard: Heard) -> list[SlotSums]:
    """Return the sums of the other nodes' buckets of 10 s."""
    found, _ = read(heard, list[SlotSums])
    return [each for (sums,) in found for each in sums]


@dataclass(frozen=True)
class Past:
    """What the live page shows of a time range."""

    #: Lengths in s of the slots with shares, and of those with bus bandwidth. Where they differ, a slot has one or the other.
    length_s: float
    busbw_length_s: float
    slots: list[Slot]
    #: The latest operations that ended in the range; ``None``: none is stored.
    timeline: Timeline | None


def past(agent: QueryService, from_ns: int, until_ns: int, job: str, *, of: Lengths, heard: Heard) -> Scoped[Past]:
    """Return what the live page shows of a time range."""
    found, nodes = read(heard, list[SlotSums], NodeBars)
    sums = slots(agent, from_ns, until_ns, job, of=of)
    own = bars(agent, from_ns, until_ns, job)
    every = slots_of([*sums, *(each for (of_node, _) in found for each in of_node)], of)
    parts = [own, *(part for _, part in found)]
    few = sum(len(part.ranks) for part in parts) <= MOST_RANKS
    data = Past(of.steps_ns / 1e9, of.busbw_ns / 1e9, every, timeline(parts if few else [own]))
    return Scoped(nodes, data)
