"""The report of a job after its run, as text or JSON; ``report_page`` makes an HTML page of it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

from commwatch.wire.events import SYMMETRIC
from commwatch_agent.analysis.advice_input import LAST_S, count, facts, sums, usual_steps, waiting_share
from commwatch_agent.analysis.framework_settings import GLOO
from commwatch_agent.analysis.headline import mean_core_wait
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.incidents.answers import IncidentDetails, whys_of
from commwatch_agent.ingest.step_accounting import comm_share, exposed_share, of_known, p95, part_of, total
from commwatch_agent.job.merging import Nodes
from commwatch_agent.model.api_views import Advice, Row
from commwatch_agent.model.views import GroupView, JobView, RankView, StepTotals, StepView
from commwatch_agent.report.job_advice import Recorded, advice_on_end, of_last_life
from commwatch_agent.report.parts import ReportParts
from commwatch_agent.report.recorded_steps import known_steps
from commwatch_agent.report.slowest_parts import MOST_OPERATIONS, MOST_ROWS, PartFigures, slowest
from commwatch_agent.report.what_happened import happened, last_at, late_within, standstill_s
from commwatch_collectors.nccl.views import Finding

#: Largest share of symmetric operations with unknown waits for which the rest is taken for all.
MOST_UNJOINED = 0.1


@dataclass(frozen=True)
class RankLine:
    """One rank of the report; its shares (0 to 1) leave long steps out."""

    rank: int
    state: str
    steps: int
    step_p50_s: float | None
    comm_share: float | None
    exposed_share: float | None
    #: Seconds of waiting for late ranks in collectives; ``None``: not known, as for ``Report.wait_hours``.
    wait_s: float | None
    p2p_wait_s: float | None
    #: Type of the exception that ended it; ``None``: none, or not known.
    raised: str | None = None


@dataclass(frozen=True)
class LongSteps:
    """Steps that took over three times as long as those before them: checkpoints, evaluations, the first one."""

    #: Number and total seconds, for the rank that has the most of them: ``Report.steps`` is for one rank too.
    count: int
    seconds: float
    #: The longest of all ranks: seconds, rank and step number.
    longest_s: float
    longest_rank: int
    longest_seq: int


@dataclass(frozen=True)
class Report:
    """The contents of the report."""

    job: JobView
    hosts: list[str]
    #: All ranks of the job are known to use Gloo on one node, so no link connects them.
    on_one_cpu: bool
    hooks: list[str]
    duration_s: float
    #: Of the rank with the most.
    steps: int
    #: So many of these, the latest, are those of which the medians, the percentile and the shares are; ``None``: of all.
    latest_steps: int | None
    step_p50_s: float | None
    step_p95_s: float | None
    #: Shares of the time of all steps but the long ones, which are not typical of training.
    comm_share: float | None
    exposed_share: float | None
    #: Number of ranks for which these are known.
    comm_ranks: int
    exposed_ranks: int
    #: How exposed time was measured (``RankView.exposed_source``), of all ranks for which it is known.
    exposed_sources: list[str]
    #: Share of the time of these steps spent waiting for late ranks; ``None``: not known.
    wait_share: float | None
    #: Share of the time (0 to 1) that main threads waited for a CPU core (``Facts.for_cores``); ``None``: not known.
    core_wait_share: float | None
    #: Share of the time of these steps that the other ranks waited for each late rank (``Facts.late``).
    late: dict[int, float]
    #: Share of each group's operations, by label; groups may overlap.
    group_shares: dict[str, float]
    #: Share in which a thread waited for sends and receives; ``None``: there were none.
    p2p_wait_share: float | None
    long_steps: LongSteps | None
    #: Hours of these nodes' ranks, which are GPU-hours if each rank has a GPU: all, with exposed communication (``None``:
    #: not known), and waiting for late ranks (``None``: not known for more than one in ten symmetric operations, as
    #: ``unjoined_share`` has it).
    rank_hours: float
    exposed_hours: float | None
    wait_hours: float | None
    #: Hours of ranks that passed in hangs, stalls and disagreements; waits in operations that ended count above, too.
    standstill_hours: float
    #: Share of the symmetric operations of which it is not known how long they waited: they have no times, or their groups span nodes
    #: whose data are not complete. ``None``: there are no symmetric operations.
    unjoined_share: float | None
    ranks: list[RankLine]
    operations: list[Row]
    #: The buckets or units of the model with the most time in collectives; empty: none has a known name.
    slowest_parts: list[PartFigures]
    records: int
    lost: int
    history: str
    #: Command that shows this report again.
    command: str
    #: Late ranks first, then the largest gain; based on this many seconds at the job's end (``None``: on the whole job).
    advice: list[Advice]
    advice_last_s: float | None
    #: From NCCL's logs, the worst first.
    findings: list[Finding]
    #: What was wrong, and is: causes before their consequences (``what_happened.happened``).
    incidents: list[IncidentDetails] = field(default_factory=list)
    #: The nodes that it covers; ``None``: only the node of the history.
    nodes: Nodes | None = None
    #: Parts that it lacks because they failed, by name, with the reason.
    missing: dict[str, str] = field(default_factory=dict)


def build(
    agent: QueryService,
    job_id: str,
    history: Path,
    command: str,
    findings: Iterable[Finding] = (),
    *,
    incidents: Iterable[IncidentDetails] = (),
    watched: bool = False,
    last_s: float | None = LAST_S,
    nodes: Nodes | None = None,
    recorded: Recorded | None = None,
    parts: ReportParts | None = None,
) -> Report | None:
    """Build the report of a job; return ``None`` if the job is not in the history.

    Args:
        incidents: of its run, in any order.
        watched: an agent watches the job now, so no other ranks are late than those of its incidents.
        last_s: base the advice on this many seconds at the job's end; ``None``: on the whole job.
        nodes: the nodes whose data ``agent`` has; ``None``: only that of its history.
        recorded: as in ``job_advice.lately``; ``None``: those in the history of ``agent``.
        parts: has those that failed already, and gets those that fail later.
    """
    job = agent.job(job_id)
    if job is None:
        return None
    findings, ranks, counts = list(findings), agent.ranks(job_id), count(agent, job_id)
    steps, usual = counts.steps, counts.usual
    durations = sorted(step.duration_s for step in usual)
    of_ranks = list(counts.usual_of.values())
    (comm, comm_ranks), (exposed, exposed_ranks) = of_known(of_ranks, comm_share), of_known(of_ranks, exposed_share)
    # ``counts`` covers only the steps that can be read; all sums and numbers cover the whole job.
    made, exposed_s = _all_steps(agent.step_totals(job_id), ranks)
    operations, by_rank = sums(agent, job_id)[0] if counts.since_ns else counts.every
    waits = {row.by["rank"]: row for row in by_rank}
    parts = parts or ReportParts()
    found = happened(incidents)
    every = [each for one in found for each in one.every]
    duration_s = max(job.last_seen_at, last_at(found)) - job.started_at

    def late(since: float) -> dict[int, float] | None:
        return late_within(every, since, job.started_at + duration_s) or ({} if watched else None)

    whys, of_life = whys_of(every), of_last_life(findings, every, ranks)
    facts_of = partial(facts, agent, job, counts, of_life, late=late(job.started_at), whys=whys)
    known = parts.part("advice", facts_of, None)
    recorded = recorded or partial(known_steps, agent.path, job, last_s)
    of_end = partial(advice_on_end, agent, job, of_life, known, last_s, late=late, whys=whys)
    advised = partial(of_end, recorded=recorded, parts=parts)
    nothing: tuple[list[Advice], float | None] = ([], None)
    advice, advice_last_s = parts.part("advice", advised, nothing)
    lines = [
        _rank_line(rank, made[rank.rank], counts.steps_of.get(rank.rank, []), waits.get(rank.rank)) for rank in ranks
    ]
    waited, unjoined = None, _unjoined_share(operations)
    if unjoined is None or unjoined <= MOST_UNJOINED:
        waited = total([line.wait_s for line in lines if line.wait_s is not None])
    else:  # what is known is only a part of the waiting
        lines = [replace(line, wait_s=None) for line in lines]
    waiting = None if waited is None else waiting_share(agent, job_id, counts) if known is None else known.waiting
    hosts = sorted({rank.host for rank in ranks})
    return Report(
        job=job,
        hosts=hosts,
        on_one_cpu=len(hosts) == 1 and len(ranks) >= job.world_size and _use_gloo(agent.groups(job_id)),
        hooks=sorted({rank.hook for rank in ranks}),
        duration_s=duration_s,
        steps=max((line.steps for line in lines), default=0),
        latest_steps=max(map(len, counts.steps_of.values()), default=0) if counts.since_ns else None,
        step_p50_s=median(durations) if durations else None,
        step_p95_s=p95(durations) if durations else None,
        comm_share=comm,
        exposed_share=exposed,
        comm_ranks=comm_ranks,
        exposed_ranks=exposed_ranks,
        exposed_sources=sorted({rank.exposed_source for rank in ranks if rank.exposed_source}),
        wait_share=waiting,
        core_wait_share=mean_core_wait(ranks),
        late={} if known is None else dict(known.late),
        group_shares=dict(counts.group_shares),
        p2p_wait_share=part_of([step.p2p_wait_s for step in usual], usual),
        long_steps=_long([step for step in steps if step.long]),
        rank_hours=duration_s * len(ranks) / 3600,
        exposed_hours=_hours(exposed_s),
        wait_hours=_hours(waited),
        standstill_hours=standstill_s(found) / 3600,
        unjoined_share=unjoined,
        ranks=lines,
        operations=operations,
        slowest_parts=parts.part("parts of the model", partial(_slowest, agent, job_id), []),
        records=job.records,
        lost=job.lost,
        history=str(history),
        command=command,
        advice=advice,
        advice_last_s=advice_last_s,
        findings=findings,
        incidents=every,
        nodes=nodes,
        missing=parts.missing,
    )


def _use_gloo(groups: Collection[GroupView]) -> bool:
    """Return whether all groups are known to use Gloo."""
    return bool(groups) and all(group.backend == GLOO for group in groups)


def _slowest(agent: QueryService, job_id: str) -> list[PartFigures]:
    if not agent.has_parts(job_id):
        return []
    operations = agent.operations(0, 1 << 62, None, lambda _: True, MOST_OPERATIONS, job=job_id)
    return slowest(operations, agent.totals(job_id, []).references)[:MOST_ROWS]


def _unjoined_share(operations: list[Row]) -> float | None:
    """Return the share of symmetric operations with unknown waits, as in ``Report``."""
    rows = [row for row in operations if row.by["op"] in SYMMETRIC and row.group_size != 1]
    unknown = sum(row.count if row.wait_s is None else row.untimed for row in rows)
    every = sum(row.count for row in rows)
    return unknown / every if every else None


def _long(steps: list[StepView]) -> LongSteps | None:
    if not steps:
        return None
    longest = max(steps, key=lambda step: step.duration_s)
    by_rank: dict[int, list[float]] = {}
    for step in steps:
        by_rank.setdefault(step.rank, []).append(step.duration_s)
    most = max(by_rank.values(), key=lambda durations: (len(durations), sum(durations)))
    return LongSteps(len(most), sum(most), longest.duration_s, longest.rank, longest.seq)


def _all_steps(totals: Iterable[StepTotals], ranks: Iterable[RankView]) -> tuple[dict[int, int], float | None]:
    """Return the number of all steps by rank, and the exposed communication in them in s; ``None``: as ``total``."""
    made = {view.rank: 0 for view in ranks}
    known, exposed_ns = 0, 0.0
    for of in totals:
        if of.rank in made:
            made[of.rank] += of.steps
            known, exposed_ns = known + of.exposed_known, exposed_ns + of.exposed
    every = sum(made.values())
    return made, exposed_ns / 1e9 if known and 100 * (every - known) <= every else None


def _rank_line(rank: RankView, made: int, steps: list[StepView], waits: Row | None) -> RankLine:
    """Return the line of a rank with ``made`` steps, of which only the latest may have been read."""
    usual = usual_steps(steps)
    return RankLine(
        rank=rank.rank,
        state=rank.state,
        steps=made,
        step_p50_s=median(step.duration_s for step in usual) if usual else None,
        comm_share=comm_share(usual),
        exposed_share=exposed_share(usual),
        wait_s=None if waits is None else waits.wait_s,
        p2p_wait_s=None if waits is None else waits.p2p_wait_s,
        raised=rank.raised,
    )


def _hours(spent_s: float | None) -> float | None:
    return None if spent_s is None else spent_s / 3600


def as_json(report: Report) -> str:
    """Return the report as JSON; bandwidths in bytes per second, times in seconds."""
    return json.dumps(asdict(report), indent=2)
