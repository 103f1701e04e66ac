"""How the ranks of a job that runs waited for each other in their steps of the last minute, from totals in memory alone. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from commwatch.wire.modes import FULL
from commwatch_agent.analysis.advice_facts import LEAST_GAIN
from commwatch_agent.analysis.live_ranks import of_this_run
from commwatch_agent.analysis.pipelines import have_pipeline
from commwatch_agent.analysis.waits.uneven_work import (
    ENOUGH_S,
    ENOUGH_STEPS,
    Beyond,
    Comm,
    StepWaits,
    beyond_usual,
    waited_share,
)
from commwatch_agent.ingest.jobs import Job
from commwatch_agent.ingest.rank_totals import LAST_NS, RankTotals
from commwatch_agent.ingest.why_late import waited_for_core
from commwatch_agent.model.cells import SLOT_NS, StepRecord


class _Waited(NamedTuple):
    """Shares of the usual steps of a rank, 0 to 1."""

    #: For late ranks, and for messages, too.
    late: float
    every: float
    comm: float
    exposed: float | None


def step_waits(job: Job, now_ns: int) -> StepWaits | None:
    """Return how the ranks of a job waited in their steps of the last minute; ``None``: not known, or it has a pipeline.

    Args:
        job: locked by the caller.
        now_ns: the monotonic clock.
    """
    alive = [totals for totals in of_this_run(job) if totals.alive]
    steps = {totals.rank: _steps(totals, now_ns) for totals in alive}
    beyond = beyond_usual(
        {rank: [Comm(step.seq, step.comm_ns, step.long) for step in of_rank] for rank, of_rank in steps.items()}
    )
    waits = {totals.rank: _waited(totals, now_ns, steps[totals.rank], beyond[totals.rank]) for totals in alive}
    known = {rank: waited for rank, waited in waits.items() if waited is not None}
    if len(known) < 2 or have_pipeline(alive):
        return None
    late = fmean(each.late for each in known.values())
    exposed = [each.exposed for each in known.values() if each.exposed is not None]
    return StepWaits(
        {rank: each.every for rank, each in known.items()},
        max(0.0, fmean(each.comm for each in known.values()) - late) if late >= LEAST_GAIN else None,
        fmean(exposed) if exposed else None,
        waited_for_cores(alive),
    )


def waited_for_cores(ranks: Iterable[RankTotals]) -> float | None:
    """Return the share of the latest half minute in which the main threads of ranks were ready to run but had no core, on average."""
    shares = [share for totals in ranks if totals.alive and (share := waited_for_core(totals.samples)) is not None]
    return fmean(shares) if shares else None


def _began_ns(totals: RankTotals, now_ns: int) -> int:
    """Return when the complete slots of the last minute began, by the clock of the rank."""
    return -(-(now_ns + totals.offset_ns - LAST_NS) // SLOT_NS) * SLOT_NS - totals.offset_ns


def _steps(totals: RankTotals, now_ns: int) -> list[StepRecord]:
    """Return the steps of a rank that ended since ``_began_ns``."""
    began_ns = _began_ns(totals, now_ns)
    return [step for step in totals.steps.totals.recent if step.end_ns > began_ns]


def _waited(totals: RankTotals, now_ns: int, steps: Sequence[StepRecord], beyond: Beyond | None) -> _Waited | None:
    """Return how a rank waited in the complete slots of the last minute, and the one in progress; ``steps``: those since then."""
    shares = totals.steps.totals.shares(now_ns)
    if shares is None or not totals.marked or totals.mode != FULL:
        return None
    began_ns = _began_ns(totals, now_ns)
    took = [step.end_ns - max(began_ns, step.start_ns) for step in steps if not step.long]
    cells = [
        cell
        for slot_ns, key, cell in totals.lately(now_ns)
        if slot_ns >= began_ns + totals.offset_ns and not key.startup
    ]
    is_enough = len(took) >= ENOUGH_STEPS or sum(took) >= ENOUGH_S * 1e9
    if not is_enough or not any(cell.joined or cell.p2p_wait_ns for cell in cells):
        return None
    late = waited_share(sum(cell.wait_ns for cell in cells), took, beyond, shares[0])
    every = waited_share(sum(cell.wait_ns + cell.p2p_wait_ns for cell in cells), took, beyond, shares[0])
    return None if late is None or every is None else _Waited(late, every, *shares)
