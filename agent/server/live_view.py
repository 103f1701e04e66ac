"""What the live page shows of one moment, from totals in memory alone, which takes milliseconds. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import mean, median

from commwatch.analysis import live_ranks
from commwatch.analysis.headline import bottleneck, of_some, split
from commwatch.analysis.nccl_operations import nccl_operations
from commwatch.analysis.rank_state import begun, culprits, shedding, state, urgency
from commwatch.analysis.summary import summarise
from commwatch.analysis.time_buckets import Slot, slot_of
from commwatch.analysis.verdicts import Verdict, combined, for_others, late_ranks, verdicts, waited_for
from commwatch.analysis.wait_graph import age
from commwatch.collectors.probe.governor import FULL
from commwatch.core import endings
from commwatch.core.api_views import Row
from commwatch.core.cells import SLOT_NS, StepRecord
from commwatch.core.nccl_views import NcclOperations
from commwatch.core.views import RankView
from commwatch.ingest.jobs import Job
from commwatch.ingest.rank_totals import LAST_NS, RankTotals
from commwatch.ingest.step_accounting import LEAST_STEPS, is_rate_stale, of_known, shares_of

#: The latest steps are those that ended within this time (ns), and at least the latest three.
LATELY_NS = 10_000_000_000
#: Operations in flight that are listed, the longest first; the rest are counted.
_MOST_IN_FLIGHT = 50
#: Most rows of what NCCL chose.
_MOST_CHOICES = 40


@dataclass(frozen=True)
class RankLine:
    """One rank. Shares are 0 to 1; ``None``: not known."""

    rank: int
    host: str
    #: ``running``, ``stopped``, ``zombie``, ``silent``, ``ended`` or ``gone``.
    state: str
    #: Kind of the verdict that names it.
    verdict: str | None
    #: Number of its latest step; then median duration and shares of its latest steps.
    step: int | None
    step_s: float | None
    comm: float | None
    exposed: float | None
    #: Share of the last minute that it waited for late ranks or for messages.
    wait: float | None
    gpu: int | None
    gpu_utilization: float | None


@dataclass(frozen=True)
class InFlightLine:
    """One operation in flight."""

    rank: int
    op: str
    group: str
    seq: int
    size_bytes: int | None
    age_s: float
    usual_s: float | None


@dataclass(frozen=True)
class Operations:
    """Operations of a job in the last minute by group and op, most time first."""

    job_id: str | None
    #: Seconds that the rows cover.
    covered_s: float
    rows: list[Row]
    #: What NCCL chose since the agent opened the ranks' rings, by its own times; the most time first, and empty without its plugin.
    chosen: list[NcclOperations]


@dataclass(frozen=True)
class JobNow:
    """One job at one moment."""

    job_id: str
    #: ``running`` while at least one of its ranks is alive, else ``ended``.
    state: str
    world_size: int
    restarts: int
    started_at: float
    #: Steps per second; ``None``: not known, or no step has ended for a long time. This field and the next four cover the latest steps on this node.
    steps_per_s: float | None
    step_s: float | None
    steps_unavailable: str | None
    comm: float | None
    exposed: float | None
    #: For how many ranks ``comm`` and ``exposed`` are known: ``(3 of 4 ranks)``; empty if for all or for none.
    comm_of: str
    exposed_of: str
    #: Parts of ``comm``, such as ``8 % transfer, 44 % waiting for rank 2``; empty: no part is known to be waiting.
    split: str
    #: Names the ranks whose operations are not all recorded; ``None``: there are none.
    sheds: str | None
    #: Whether communication is the bottleneck, in words; empty if ``comm`` is at most 30 % or not known.
    says: str
    #: How the job ended; empty while it runs, or if it ended normally.
    ending: str
    #: The last complete 10 s bucket and the one in progress.
    slots: list[Slot]
    ranks: list[RankLine]
    in_flight: list[InFlightLine]
    #: Number of further operations in flight.
    in_flight_more: int
    verdicts: list[Verdict]


@dataclass(frozen=True)
class Card:
    """The GPU of a rank."""

    index: int
    utilization: float | None


def pick(jobs: Iterable[Job], wanted: str | None) -> Job | None:
    """Return the job named ``wanted``; without a name the latest that runs, else the latest; ``None``: none."""
    known = [job for job in jobs if wanted in (None, job.id) and job.rank_totals]
    return max(known, key=lambda job: (running(job), min(map(_started_ns, job.rank_totals.values()))), default=None)


def running(job: Job) -> bool:
    """Return True if at least one of its ranks is alive."""
    return any(totals.alive for totals in job.rank_totals.values())


def _started_ns(totals: RankTotals) -> int:
    return int(totals.identity.get("started_ns", 0))


def job_now(job: Job, cards: Mapping[int, Card], more_verdicts: Iterable[Verdict], now_ns: int) -> JobNow:
    """Return the state of a job at this moment.

    Args:
        job: has at least one rank; the caller holds the lock that guards it.
        cards: GPUs by rank, where they are known.
        more_verdicts: further verdicts, which do not follow from operations in flight.
        now_ns: the monotonic clock.
    """
    rank_totals = sorted(live_ranks.of_this_run(job), key=lambda totals: totals.rank)
    views = [live_ranks.rank(job.id, totals, now_ns) for totals in rank_totals]
    found = combined(verdicts(views, live_ranks.groups([job])), more_verdicts)
    measured, messages = _waiting(rank_totals, now_ns)
    recent = {totals.rank: _recent(totals, now_ns) for totals in rank_totals}
    of_ranks = [of_rank for of_rank in recent.values() if of_rank]
    steps = [step for of_rank in of_ranks for step in of_rank]
    comm, comm_ranks = of_known(of_ranks, lambda steps: (shares_of(steps) or (None, None))[0])
    exposed, exposed_ranks = of_known(of_ranks, lambda steps: (shares_of(steps) or (None, None))[1])
    waiting = waited_for(found, measured, len(rank_totals))
    messages = for_others(messages, waiting, measured)
    paces = [pace for of_rank in recent.values() if (pace := _pace(of_rank, now_ns)) is not None]
    late = late_ranks(found, waiting)
    in_flight = _in_flight(views)
    latest = max(rank_totals, key=lambda totals: int(totals.identity["restart"]))
    return JobNow(
        job_id=job.id,
        state="running" if running(job) else "ended",
        world_size=int(latest.identity["world_size"]),
        restarts=int(latest.identity["restart"]),
        started_at=min(_started_ns(totals) + totals.offset_ns for totals in rank_totals) / 1e9,
        steps_per_s=median(paces) if paces else None,
        step_s=median(step.end_ns - step.start_ns for step in steps) / 1e9 if steps else None,
        steps_unavailable=next((totals.steps.unavailable for totals in rank_totals if totals.steps.unavailable), None),
        sheds=shedding((view.rank, view.probe_mode) for view in views if view.state == "running"),
        comm=comm,
        exposed=exposed,
        comm_of=of_some(comm_ranks, len(of_ranks)).strip(),
        exposed_of=of_some(exposed_ranks, len(of_ranks)).strip(),
        split=split(comm, waiting, messages, late),
        says=bottleneck(comm, exposed, waiting, messages, late),
        ending="" if running(job) else endings.says(live_ranks.endings(job)),
        slots=_slots(rank_totals, now_ns),
        ranks=[
            _line(
                totals,
                view,
                recent[totals.rank],
                blamed=culprits(found).get(totals.rank),
                card=cards.get(totals.rank),
                now_ns=now_ns,
            )
            for totals, view in zip(rank_totals, views, strict=True)
        ],
        in_flight=in_flight[:_MOST_IN_FLIGHT],
        in_flight_more=max(0, len(in_flight) - _MOST_IN_FLIGHT),
        verdicts=found,
    )


# -- steps ------------------------------------------------------------------------------------


def _recent(totals: RankTotals, now_ns: int) -> list[StepRecord]:
    steps = totals.steps.totals.usual(now_ns)
    lately = [step for step in steps if step.end_ns > now_ns - LATELY_NS]
    return lately if len(lately) >= LEAST_STEPS else steps[-LEAST_STEPS:]


def _pace(steps: list[StepRecord], now_ns: int) -> float | None:
    """Return steps per second; ``None`` where no step has ended for long."""
    usual_s = median(step.end_ns - step.start_ns for step in steps) / 1e9 if steps else 0.0
    if steps and is_rate_stale((now_ns - steps[-1].end_ns) / 1e9, usual_s):
        return None
    length_ns = steps[-1].end_ns - steps[0].start_ns if steps else 0
    return len(steps) * 1e9 / length_ns if length_ns else None


def _line(
    totals: RankTotals, view: RankView, steps: list[StepRecord], *, blamed: str | None, card: Card | None, now_ns: int
) -> RankLine:
    comm, exposed = shares_of(steps) or (None, None)
    step_totals = totals.steps.totals
    return RankLine(
        rank=totals.rank,
        host=view.host,
        state=state(view),
        verdict=blamed,
        step=step_totals.recent[-1].seq if step_totals.recent else None,
        step_s=median(step.end_ns - step.start_ns for step in steps) / 1e9 if steps else None,
        comm=comm,
        exposed=exposed,
        wait=_waited(totals, now_ns),
        gpu=None if card is None else card.index,
        gpu_utilization=None if card is None else card.utilization,
    )


# -- operations -------------------------------------------------------------------------------


def _covered_s(rank_totals: list[RankTotals], now_ns: int) -> float:
    """Return the seconds that the last minute's cells cover, empty or not: complete slots and the one in progress."""
    begin_ns = min(
        -(-(now_ns + totals.offset_ns - LAST_NS) // SLOT_NS) * SLOT_NS - totals.offset_ns for totals in rank_totals
    )
    return max(1e-3, (now_ns - max(begin_ns, min(map(_started_ns, rank_totals)))) / 1e9)


def _waiting(rank_totals: list[RankTotals], now_ns: int) -> tuple[float | None, float | None]:
    """Return two shares of the latest 10 to 20 s, 0 to 1, means over ranks: waiting for late ranks, and for messages.

    ``None``: not known, or no waits.
    """
    late, messages = [], []
    for totals in rank_totals:
        if totals.mode != FULL:  # operations that are only counted have no known waits
            continue
        begun_ns = (now_ns + totals.offset_ns) // SLOT_NS * SLOT_NS - SLOT_NS
        cells = [cell for slot_ns, _, cell in totals.lately(now_ns) if slot_ns >= begun_ns]
        covered_ns = max(1, now_ns - max(begun_ns - totals.offset_ns, _started_ns(totals)))
        if any(cell.joined for cell in cells):
            late.append(sum(cell.wait_ns for cell in cells) / covered_ns)
        messages.append(sum(cell.p2p_wait_ns for cell in cells) / covered_ns)
    return mean(late) if late else None, mean(messages) if any(messages) else None


def _waited(totals: RankTotals, now_ns: int) -> float | None:
    if totals.mode != FULL:  # operations that are only counted have no known waits
        return None
    cells = [cell for _, _, cell in totals.lately(now_ns)]
    waited = [cell.wait_ns + cell.p2p_wait_ns for cell in cells if cell.joined or cell.p2p_wait_ns]
    return sum(waited) / 1e9 / _covered_s([totals], now_ns) if waited else None


def operations(job: Job, now_ns: int) -> Operations:
    """Return a job's operations of the last minute; parameters as for ``job_now``."""
    rank_totals = list(live_ranks.of_this_run(job))
    counted = [totals.counted(job.id, key, cell) for totals in rank_totals for _, key, cell in totals.lately(now_ns)]
    rows, chosen = summarise(counted, ["group", "op"]), nccl_operations([job])
    return Operations(job.id, _covered_s(rank_totals, now_ns), rows, chosen[:_MOST_CHOICES])


def _in_flight(views: list[RankView]) -> list[InFlightLine]:
    """Return the operations in flight of all ranks that have begun, the most urgent first."""
    ops = sorted(
        ((view.rank, op) for view in views for op in begun(view)), key=lambda each: urgency(each[1]), reverse=True
    )
    return [InFlightLine(rank, op.op, op.group, op.seq, op.size_bytes, age(op), op.usual_s) for rank, op in ops]


def _slots(rank_totals: list[RankTotals], now_ns: int) -> list[Slot]:
    """Return the last complete slot and the one in progress, where they hold data."""
    steps: dict[int, list[StepRecord]] = {}
    sums: dict[int, dict[str, tuple[float, int]]] = {}
    begun = {totals.rank: (now_ns + totals.offset_ns) // SLOT_NS * SLOT_NS for totals in rank_totals}
    for totals in rank_totals:
        since = begun[totals.rank] - SLOT_NS
        for step in totals.steps.totals.recent:
            slot = (step.end_ns + totals.offset_ns) // SLOT_NS * SLOT_NS
            if slot >= since and not step.long:
                steps.setdefault(slot, []).append(step)
        for slot, key, cell in totals.lately(now_ns):
            if slot >= since:
                by_op, op = sums.setdefault(slot, {}), totals.op_name(key.op)
                bus_bytes, busy_ns = by_op.get(op, (0.0, 0))
                by_op[op] = bus_bytes + cell.bus_bytes, busy_ns + cell.busy_ns
    return [slot_of(at, shares_of(steps.get(at, ())), sums.get(at, {})) for at in sorted(steps.keys() | sums.keys())]
