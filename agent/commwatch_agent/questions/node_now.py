"""What one node contributes to the live view of a job, from totals in memory alone, which takes milliseconds. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from commwatch.wire.events import SYMMETRIC
from commwatch.wire.modes import FULL
from commwatch_agent.analysis import live_ranks
from commwatch_agent.analysis.calls import ended as ended_calls
from commwatch_agent.analysis.nccl_operations import nccl_operations
from commwatch_agent.analysis.rank_state import state
from commwatch_agent.analysis.summary import summarise
from commwatch_agent.analysis.time_buckets import SlotSums
from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.incidents.answers import IncidentView
from commwatch_agent.ingest.jobs import Job
from commwatch_agent.ingest.rank_totals import LAST_NS, RankTotals
from commwatch_agent.ingest.step_accounting import LEAST_STEPS, is_rate_stale, sums_of
from commwatch_agent.model import endings
from commwatch_agent.model.api_views import Row
from commwatch_agent.model.cells import NO_WAITS, SLOT_NS, Cell, StepRecord, WaitSums, added
from commwatch_agent.model.nccl_views import NcclOperations
from commwatch_agent.model.views import RankView, common_source

#: The latest steps are those that ended within this time (ns), and at least the latest three.
LATELY_NS = 10_000_000_000
#: Most rows of what NCCL chose.
_MOST_CHOICES = 40


@dataclass(frozen=True)
class Oldest:
    """The operation that a rank has been in for the longest."""

    op: str
    group: str
    age_s: float


@dataclass(frozen=True)
class RankLine:
    """One rank. Shares are 0 to 1; ``None``: not known."""

    rank: int
    host: str
    #: ``running``, ``stopped``, ``zombie``, ``silent``, ``ended`` or ``gone``.
    state: str
    #: Kind of the verdict that names it; ``None``: none, or not judged yet.
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
    #: ``None``: it is in no operation, or not looked up yet.
    oldest: Oldest | None = None


@dataclass(frozen=True)
class RankNow:
    """What one rank contributes."""

    #: Its verdict and its oldest operation are still missing.
    line: RankLine
    view: RankView
    #: Steps per second; ``None``: not known, or no step has ended for a long time.
    pace: float | None
    #: Shares of the latest 10 to 20 s, 0 to 1, spent waiting for late ranks and for messages; ``None``: not known.
    late: float | None
    messages: float | None
    #: When its latest step ended, in Unix time (s), if that is so long ago that its figures are not of now; else ``None``.
    still_since: float | None = None


@dataclass(frozen=True)
class NodeNow:
    """One job on one node at one moment."""

    job_id: str
    running: bool
    world_size: int
    restarts: int
    started_at: float
    steps_unavailable: str | None
    #: How the job ended; empty while it runs, or if it ended normally.
    ending: str
    ranks: list[RankNow]
    #: What its ranks do wrong, as this node has concluded.
    verdicts: list[Verdict]
    #: The last complete 10 s bucket and the one in progress, where they hold data; and the begin of the former in ns of Unix time.
    slots_from_ns: int
    slots: list[SlotSums]
    #: Incidents of this run in memory.
    incidents: list[IncidentView]
    #: As in ``JobView``.
    step_source: str | None = None


@dataclass(frozen=True)
class OperationsNow:
    """Operations of a job in the last minute by group and op, most time first."""

    job_id: str | None
    #: Seconds that the rows cover.
    covered_s: float
    rows: list[Row]
    #: What NCCL chose on this node since the agent opened the ranks' rings, by its own times; the most time first, and empty without its plugin.
    chosen: list[NcclOperations]


@dataclass(frozen=True)
class Card:
    """The GPU of a rank."""

    index: int
    utilization: float | None


def pick(jobs: Iterable[Job], wanted: str | None) -> Job | None:
    """Return the job named ``wanted``; without a name the latest that runs, else the latest; ``None``: none."""
    known = [job for job in jobs if wanted in (None, job.id) and job.rank_totals]
    return max(
        known, key=lambda job: (running(job), min(map(live_ranks.started_ns, job.rank_totals.values()))), default=None
    )


def running(job: Job) -> bool:
    """Return True if at least one of its ranks is alive."""
    return any(totals.alive for totals in job.rank_totals.values())


def node_now(
    job: Job,
    cards: Mapping[int, Card],
    verdicts: Iterable[Verdict],
    now_ns: int,
    incidents: Iterable[IncidentView] = (),
) -> NodeNow:
    """Return the state of a job on this node at this moment.

    Args:
        job: has at least one rank; the caller holds the lock that guards it.
        cards: GPUs by rank, where they are known.
        verdicts: what its ranks do wrong, as this node has concluded.
        now_ns: the monotonic clock.
        incidents: of this run.
    """
    rank_totals = sorted(live_ranks.of_this_run(job), key=lambda totals: totals.rank)
    latest, sought = max(rank_totals, key=live_ranks.order), ended_calls.sought(job, now_ns)
    return NodeNow(
        job_id=job.id,
        running=running(job),
        world_size=int(latest.identity["world_size"]),
        restarts=int(latest.identity["restart"]),
        started_at=min(live_ranks.started_ns(totals) + totals.offset_ns for totals in rank_totals) / 1e9,
        steps_unavailable=next((totals.steps.unavailable for totals in rank_totals if totals.steps.unavailable), None),
        ending="" if running(job) else endings.says(live_ranks.endings(job)),
        ranks=[_rank(job.id, totals, sought, cards.get(totals.rank), now_ns) for totals in rank_totals],
        verdicts=list(verdicts),
        slots_from_ns=min(_last_slot_ns(totals, now_ns) for totals in rank_totals),
        slots=_slots(rank_totals, now_ns),
        incidents=list(incidents),
        step_source=common_source(totals.steps.source for totals in rank_totals),
    )


def _rank(job_id: str, totals: RankTotals, sought: ended_calls.Sought, card: Card | None, now_ns: int) -> RankNow:
    view, steps = live_ranks.rank(job_id, totals, now_ns, sought), _recent(totals, now_ns)
    late, messages = _waiting(totals, now_ns)
    return RankNow(
        _line(totals, view, steps, card, now_ns),
        view,
        _pace(steps, now_ns),
        late,
        messages,
        _still_since(totals, now_ns),
    )


def _still_since(totals: RankTotals, now_ns: int) -> float | None:
    recent = totals.steps.totals.recent
    if not recent or now_ns - recent[-1].end_ns <= LATELY_NS:
        return None
    usual_ns = median([step.end_ns - step.start_ns for step in recent if not step.long] or [0])
    is_still = is_rate_stale((now_ns - recent[-1].end_ns) / 1e9, usual_ns / 1e9)
    return (recent[-1].end_ns + totals.offset_ns) / 1e9 if is_still else None


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


def _line(totals: RankTotals, view: RankView, steps: list[StepRecord], card: Card | None, now_ns: int) -> RankLine:
    comm, exposed = sums_of(steps).shares() or (None, None)
    step_totals = totals.steps.totals
    return RankLine(
        rank=totals.rank,
        host=view.host,
        state=state(view),
        verdict=None,
        step=step_totals.latest_number,
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
    return max(1e-3, (now_ns - max(begin_ns, min(map(live_ranks.started_ns, rank_totals)))) / 1e9)


def _waiting(totals: RankTotals, now_ns: int) -> tuple[float | None, float | None]:
    """Return two shares of the latest 10 to 20 s, 0 to 1: waiting for late ranks, and for messages; ``None``: not known."""
    if totals.mode != FULL:  # operations that are only counted have no known waits
        return None, None
    begun_ns = (now_ns + totals.offset_ns) // SLOT_NS * SLOT_NS - SLOT_NS
    cells = [cell for slot_ns, _, cell in totals.lately(now_ns) if slot_ns >= begun_ns]
    covered_ns = max(1, now_ns - max(begun_ns - totals.offset_ns, live_ranks.started_ns(totals)))
    late = sum(cell.wait_ns for cell in cells) / covered_ns if any(cell.joined for cell in cells) else None
    return late, sum(cell.p2p_wait_ns for cell in cells) / covered_ns


def _waited(totals: RankTotals, now_ns: int) -> float | None:
    if totals.mode != FULL:  # operations that are only counted have no known waits
        return None
    cells = [cell for _, _, cell in totals.lately(now_ns)]
    waited = [cell.wait_ns + cell.p2p_wait_ns for cell in cells if cell.joined or cell.p2p_wait_ns]
    return sum(waited) / 1e9 / _covered_s([totals], now_ns) if waited else None


def operations_now(job: Job, now_ns: int) -> OperationsNow:
    """Return a job's operations of the last minute; parameters as for ``node_now``."""
    rank_totals = list(live_ranks.of_this_run(job))
    counted = [totals.counted(job.id, key, cell) for totals in rank_totals for _, key, cell in totals.lately(now_ns)]
    rows, chosen = summarise(counted, ["group", "op"]), nccl_operations([job])
    return OperationsNow(job.id, _covered_s(rank_totals, now_ns), rows, chosen[:_MOST_CHOICES])


def _last_slot_ns(totals: RankTotals, now_ns: int) -> int:
    """Return the begin of the last complete slot in ns of Unix time."""
    return (now_ns + totals.offset_ns) // SLOT_NS * SLOT_NS - SLOT_NS


def _slots(rank_totals: list[RankTotals], now_ns: int) -> list[SlotSums]:
    """Return the last complete slot and the one in progress, where they hold data."""
    steps: dict[int, list[StepRecord]] = {}
    sums: dict[int, dict[str, tuple[float, float]]] = {}
    waits: dict[int, list[WaitSums]] = {}
    for totals in rank_totals:
        since, cells = _last_slot_ns(totals, now_ns), dict[int, list[tuple[str, Cell]]]()
        long: list[StepRecord] = []
        for step in totals.steps.totals.recent:
            slot = (step.end_ns + totals.offset_ns) // SLOT_NS * SLOT_NS
            if slot >= since:
                (long if step.long else steps.setdefault(slot, [])).append(step)
        for slot, key, cell in totals.lately(now_ns):
            if slot >= since:
                if key.startup and totals.begun:
                    continue
                cells.setdefault(slot, []).append((totals.op_name(key.op), cell))
                by_op, op = sums.setdefault(slot, {}), totals.op_name(key.op)
                bus_bytes, busy_ns = by_op.get(op, (0.0, 0))
                by_op[op] = bus_bytes + cell.bus_bytes, busy_ns + cell.busy_ns
        for slot, found in cells.items():
            waits.setdefault(slot, []).append(_waits_in(totals, slot, found, long, since))
    return [
        SlotSums(at, sums_of(steps.get(at, ())), sums.get(at, {}), added(waits.get(at, ()), NO_WAITS))
        for at in sorted(steps.keys() | sums.keys())
    ]


def _waits_in(
    totals: RankTotals, slot_ns: int, cells: list[tuple[str, Cell]], long: list[StepRecord], complete_ns: int
) -> WaitSums:
    """Return the sums over a rank's waits in a slot.

    Args:
        long: its long steps that have ended since ``complete_ns``, the begin of the last complete slot.
    """
    symmetric = [cell for op, cell in cells if op in SYMMETRIC and cell.bus_bytes]
    began_ns, end_ns = slot_ns - totals.offset_ns, slot_ns - totals.offset_ns + SLOT_NS
    in_it = sum(step.end_ns >= began_ns and step.start_ns < end_ns for step in long)
    part = slot_ns > complete_ns or not totals.alive or live_ranks.started_ns(totals) > began_ns
    return WaitSums(
        covered=SLOT_NS,
        waited=sum(cell.wait_ns + cell.p2p_wait_ns for _, cell in cells),
        symmetric=sum(cell.count for cell in symmetric),
        joined=sum(cell.joined for cell in symmetric),
        broken=in_it + part,
    )
