"""What the live page shows of one moment, from the parts of all nodes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

from commwatch.wire.numbers import latest
from commwatch_agent.analysis.headline import bottleneck, mean_core_wait, of_some, split
from commwatch_agent.analysis.rank_state import begun, culprits, oldest, shedding, urgency
from commwatch_agent.analysis.time_buckets import Slot, slots_of
from commwatch_agent.analysis.timeline import MOST_RANKS
from commwatch_agent.analysis.verdict import Verdict, awaited_ranks, for_others, stragglers, waited_for, why_late
from commwatch_agent.analysis.waits.wait_graph import age
from commwatch_agent.incidents.verdict_views import merged_verdicts
from commwatch_agent.job.merging import merged_ranks
from commwatch_agent.model.views import ITERATIONS, InFlight, RankView, common_source
from commwatch_agent.questions.node_now import NodeNow, Oldest, RankLine, RankNow

#: Operations in flight that are listed, the longest first; the rest are counted, as are the ranks beyond ``MOST_RANKS``.
_MOST_IN_FLIGHT = 50


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
class JobNow:
    """One job at one moment."""

    job_id: str
    #: ``running`` while at least one of its ranks is alive, else ``ended``.
    state: str
    world_size: int
    restarts: int
    started_at: float
    #: Steps per second; ``None``: not known, or no step has ended for a long time. This field and the next four cover the latest steps.
    steps_per_s: float | None
    step_s: float | None
    steps_unavailable: str | None
    #: As in ``JobView``.
    step_source: str | None
    comm: float | None
    exposed: float | None
    #: When the latest step of any rank ended, in Unix time (s), if the job runs and none has ended for a long time since: these figures,
    #: as far as they are known, are of then. ``None``: they are of now, or not known.
    figures_at: float | None
    #: For how many ranks ``comm`` and ``exposed`` are known: ``(3 of 4 ranks)``; empty if for all or for none.
    comm_of: str
    exposed_of: str
    #: Parts of ``comm``, such as ``8% transfer, 44% waiting for rank 2``; empty: no part is known to be waiting.
    split: str
    #: Names the ranks whose operations are not all recorded; ``None``: there are none.
    sheds: str | None
    #: Whether communication is the bottleneck, in words; empty if ``comm`` is at most 30% or not known.
    says: str
    #: How the job ended; empty while it runs, or if it ended normally.
    ending: str
    #: The last complete 10 s bucket and the one in progress.
    slots: list[Slot]
    #: At most 64, the worst first if there are more, else by number; and the number of all known ranks, by state.
    ranks: list[RankLine]
    states: dict[str, int]
    #: The latest step of any rank; ``None``: not known.
    step: int | None
    in_flight: list[InFlightLine]
    #: Number of further operations in flight.
    in_flight_more: int
    verdicts: list[Verdict]


def job_now(nodes: Sequence[NodeNow]) -> JobNow:
    """Return the state of a job at this moment.

    Args:
        nodes: the parts of its nodes; at least one has ranks.
    """
    views = merged_ranks(one.view for node in nodes for one in node.ranks)
    counted = {id(view) for view in views}
    nodes = [node for node in nodes if node.running or any(id(one.view) in counted for one in node.ranks)]
    ranks = [one for node in nodes for one in node.ranks if id(one.view) in counted]
    ranks.sort(key=lambda one: one.line.rank)
    found = merged_verdicts((node.verdicts for node in nodes), nodes[0].job_id, (view.rank for view in views))
    stepping = [one.line for one in ranks if one.line.step_s is not None]
    comm, comm_ranks = _mean_of_known([line.comm for line in stepping])
    exposed, exposed_ranks = _mean_of_known([line.exposed for line in stepping])
    measured, messages = _waiting(ranks)
    waiting = waited_for(found, measured, len(ranks))
    messages = for_others(messages, waiting, measured)
    late = awaited_ranks(found, waiting)
    in_flight = _in_flight(views)
    running = any(node.running for node in nodes)
    steps = [one.line.step for one in ranks if one.line.step is not None]
    source = common_source(node.step_source for node in nodes)
    still_since = [one.still_since for one in ranks if one.line.step is not None]
    return JobNow(
        job_id=nodes[0].job_id,
        state="running" if running else "ended",
        world_size=max(node.world_size for node in nodes),
        restarts=max(node.restarts for node in nodes),
        started_at=min(node.started_at for node in nodes),
        steps_per_s=_median(one.pace for one in ranks),
        step_s=_median(one.line.step_s for one in ranks),
        steps_unavailable=next((node.steps_unavailable for node in nodes if node.steps_unavailable), None),
        step_source=source,
        sheds=shedding((view.rank, view.probe_mode) for view in views if view.state == "running"),
        comm=comm,
        exposed=exposed,
        figures_at=_latest(still_since) if running else None,
        comm_of=of_some(comm_ranks, len(stepping)).strip(),
        exposed_of=of_some(exposed_ranks, len(stepping)).strip(),
        split=split(comm, waiting, messages, late),
        says=bottleneck(
            comm,
            exposed,
            waiting,
            messages,
            late,
            why=why_late(found, late),
            cores=mean_core_wait(views),
            iterations=source == ITERATIONS,
            stragglers=stragglers(found),
        ),
        ending="" if running else "; ".join(dict.fromkeys(node.ending for node in nodes if node.ending)),
        slots=_slots(nodes),
        ranks=_lines(ranks, culprits(found)),
        states=dict(Counter(one.line.state for one in ranks)),
        step=latest(steps) if steps else None,
        in_flight=in_flight[:_MOST_IN_FLIGHT],
        in_flight_more=max(0, len(in_flight) - _MOST_IN_FLIGHT),
        verdicts=found,
    )


def _slots(nodes: Sequence[NodeNow]) -> list[Slot]:
    """Return the buckets that all nodes report: a part that is a second older may begin one bucket earlier."""
    begin_ns = max(node.slots_from_ns for node in nodes)
    return slots_of(slot for node in nodes for slot in node.slots if slot.at_ns >= begin_ns)


def _mean_of_known(shares: Sequence[float | None]) -> tuple[float | None, int]:
    """Return the mean share of the ranks for which it is known, and their number.

    Each rank counts as much as any other, as the latest steps of two nodes are not of exactly the same time.
    """
    known = [share for share in shares if share is not None]
    return mean(known) if known else None, len(known)


def _median(values: Iterable[float | None]) -> float | None:
    return median(known) if (known := [value for value in values if value is not None]) else None


def _latest(times: Sequence[float | None]) -> float | None:
    """Return the latest of the times; ``None``: there are none, or one is not known."""
    known = [at for at in times if at is not None]
    return max(known) if known and len(known) == len(times) else None


def _waiting(ranks: Iterable[RankNow]) -> tuple[float | None, float | None]:
    """Return the means over ranks of ``late`` and ``messages``; ``None``: not known, or no rank waited for messages."""
    every = list(ranks)
    late = [one.late for one in every if one.late is not None]
    messages = [one.messages for one in every if one.messages is not None]
    return mean(late) if late else None, mean(messages) if any(messages) else None


def _lines(ranks: list[RankNow], blamed: Mapping[int, str]) -> list[RankLine]:
    """Return the lines of the ranks with their verdicts and oldest operations; of many ranks only the worst."""
    lines = [replace(one.line, verdict=blamed.get(one.line.rank), oldest=_oldest(one.view)) for one in ranks]
    if len(lines) <= MOST_RANKS:
        return lines
    return sorted(
        lines, key=lambda line: (line.verdict is None, line.state in ("running", "left", "ended"), -(line.wait or 0.0))
    )[:MOST_RANKS]


def _oldest(view: RankView) -> Oldest | None:
    op = oldest(view)
    return None if op is None else Oldest(op.op, op.group, age(op))


def _in_flight(views: list[RankView]) -> list[InFlightLine]:
    """Return the operations in flight of all ranks that have begun, the most urgent first."""
    ops = sorted(
        ((view.rank, op) for view in views for op in begun(view)), key=lambda each: urgency(each[1]), reverse=True
    )
    return [InFlightLine(rank, op.op, op.group, op.seq, op.size_bytes, age(op), _usual_s(op)) for rank, op in ops]


def _usual_s(op: InFlight) -> float | None:
    """Return how long such operations usually take; the longest that ended at this place of the rank's work, if that is longer."""
    longest_s = None if op.place is None else op.place.longest_s
    return max((each for each in (op.usual_s, longest_s) if each is not None), default=None)
