"""The headline figures of jobs: on one node from its history, and on all nodes from the parts of each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.history.history import History
from commwatch_agent.incidents.stored import details_of_run
from commwatch_agent.ingest.step_accounting import LEAST_STEPS, of_known
from commwatch_agent.job.merging import by_run, merged_jobs
from commwatch_agent.job.packed import packed, unpacked
from commwatch_agent.model.cells import StepSums
from commwatch_agent.model.views import JobFigures, JobView
from commwatch_agent.report.what_happened import ending

#: Most durations of a job's steps that a node sends; and most of all jobs and nodes together.
MOST_DURATIONS, MOST_OF_ALL = 100_000, 2_000_000
_LEAST_DURATIONS = 64
_NOTHING = StepSums(0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class RankSteps:
    """The steps of one rank: all, and sums over those that were not long."""

    rank: int
    restart: int
    steps: int
    usual: StepSums

    @property
    def enough(self) -> bool:
        """Whether there are enough steps for its figures."""
        return self.usual.steps >= LEAST_STEPS


@dataclass(frozen=True)
class Durations:
    """How long the usual steps of ranks with enough of them took: ``number`` steps of one life of the job.

    ``sorted_ns`` has all of them, packed; of too many, some at equal distances in that order.
    """

    restart: int
    number: int
    sorted_ns: str

    def __post_init__(self) -> None:
        values = unpacked(self.sorted_ns, MOST_DURATIONS)
        if not 0 < len(values) <= self.number:
            raise ValueError("numbers out of range")


@dataclass(frozen=True)
class FiguresPart:
    """What the figures of a job need of one node."""

    job: JobView
    ranks: list[RankSteps]
    durations: list[Durations]


def job_figures(agent: QueryService, most: int | None = None) -> list[JobFigures]:
    """Return the jobs of this node, the latest started first; at most ``most``, ``None``: all."""
    found = []
    for job in agent.jobs()[:most]:
        with History(agent.path) as history:
            ranks, rings = _steps(history, agent, job)
            median_ns = history.median_step_ns([ring for of_life in rings.values() for ring in of_life])
        found.append(_figures(_ended(agent, job), ranks, median_ns))
    return found


def figures_parts(agent: QueryService, most: int, durations: int) -> list[FiguresPart]:
    """Return what the figures of the latest ``most`` jobs need of this node; ``durations``: most of one job."""
    found = []
    for job in agent.jobs()[:most]:
        with History(agent.path) as history:
            ranks, rings = _steps(history, agent, job)
            known = [(restart, *history.step_durations(of_life, durations)) for restart, of_life in rings.items()]
        found.append(FiguresPart(_ended(agent, job), ranks, [_durations(*each) for each in known if each[1]]))
    return found


def _ended(agent: QueryService, job: JobView) -> JobView:
    """Return a job with how it ended as its report has it."""
    return replace(job, ending=ending(job, details_of_run(agent.path, agent.stored(job.job_id)))) if job.failed else job


def figures_of_nodes(parts: Iterable[FiguresPart], most: int) -> list[JobFigures]:
    """Return the jobs of all nodes, the latest started first; at most ``most``."""
    runs = by_run(parts, lambda part: part.job)
    jobs = merged_jobs(replace(part.job, job_id=name) for name, of_run in runs.items() for part in of_run)[:most]
    return [_of_nodes(job, runs[job.job_id]) for job in jobs]


def most_durations(jobs: int, others: int) -> int:
    """Return how many durations of one job a node should send; ``others``: number of the other nodes."""
    return max(_LEAST_DURATIONS, min(MOST_DURATIONS, MOST_OF_ALL // (max(1, jobs) * (others + 1))))


def _of_nodes(job: JobView, parts: Sequence[FiguresPart]) -> JobFigures:
    every = [rank for part in parts for rank in part.ranks]
    latest = max((rank.restart for rank in every), default=0)
    ranks: dict[int, RankSteps] = {}
    for each in every:
        if each.restart == latest:  # as ``merged_ranks`` returns them
            known = ranks.get(each.rank, RankSteps(each.rank, latest, 0, _NOTHING))
            usual = _together([known.usual, each.usual])
            ranks[each.rank] = RankSteps(each.rank, latest, known.steps + each.steps, usual)
    durations = [each for part in parts for each in part.durations if each.restart == latest]
    return _figures(job, ranks.values(), _median(durations))


def _steps(history: History, agent: QueryService, job: JobView) -> tuple[list[RankSteps], dict[int, list[int]]]:
    """Return the ranks of a job's latest run, and the rings of those with enough steps, by the rank's life of the job."""
    restarts = {view.rank: view.restart for view in agent.ranks(job.job_id)}
    rank_of = {ring.id: ring.rank for ring in history.rings(job.job_id) if ring.rank in restarts}
    steps, usual = dict.fromkeys(restarts, 0), dict.fromkeys(restarts, _NOTHING)
    for (ring, long), sums in history.step_sums(list(rank_of)).items():
        rank = rank_of[ring]
        steps[rank] += int(sums.steps)
        if not long:
            usual[rank] = _together([usual[rank], sums])
    ranks = {rank: RankSteps(rank, restart, steps[rank], usual[rank]) for rank, restart in restarts.items()}
    rings: dict[int, list[int]] = {}
    for ring, rank in rank_of.items():
        if ranks[rank].enough:
            rings.setdefault(restarts[rank], []).append(ring)
    return list(ranks.values()), rings


def _figures(job: JobView, ranks: Collection[RankSteps], median_ns: float | None) -> JobFigures:
    of_ranks = [[each.usual] for each in ranks if each.enough]
    return JobFigures(
        **vars(job),
        duration_s=job.last_seen_at - job.started_at,
        steps=max((each.steps for each in ranks), default=0),
        step_p50_s=None if median_ns is None else median_ns / 1e9,
        comm_share=of_known(of_ranks, lambda sums: _shares(sums)[0])[0],
        exposed_share=of_known(of_ranks, lambda sums: _shares(sums)[1])[0],
    )


def _durations(restart: int, number: int, sorted_ns: list[int]) -> Durations:
    import numpy as np

    return Durations(restart, number, packed(np.array(sorted_ns, np.int64)))


def _median(durations: Sequence[Durations]) -> float | None:
    """Return the median in ns of all steps, each value of a node counted for as many steps as it is one of."""
    if not durations:
        return None
    import numpy as np

    values = [unpacked(each.sorted_ns, MOST_DURATIONS) for each in durations]
    weights = [
        np.full(len(of_node), each.number / len(of_node)) for of_node, each in zip(values, durations, strict=True)
    ]
    every = np.concatenate(values)
    order = every.argsort()
    below = np.cumsum(np.concatenate(weights)[order])
    low, high = (np.searchsorted(below, below[-1] / 2, side=side) for side in ("left", "right"))
    return float(every[order[low]] + every[order[min(high, len(order) - 1)]]) / 2


def _together(sums: Iterable[StepSums]) -> StepSums:
    return StepSums(*map(sum, zip(*sums, strict=True)))


def _shares(sums: Collection[StepSums]) -> tuple[float | None, float | None]:
    return (_together(sums).shares() or (None, None)) if sums else (None, None)
