"""A verdict on a job's communication, and what follows from several: who is late, and how long the others wait. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from commwatch_agent.analysis import headline
from commwatch_agent.ingest.stragglers import Late
from commwatch_agent.ingest.why_late import Why, common_why
from commwatch_agent.model.views import GroupView
from commwatch_agent.text.units import counted, percent, seconds

#: Kinds that say nothing about whether a rank is late.
_BESIDE = frozenset({"straggler", "corruption", "waiting"})


@dataclass(frozen=True)
class Verdict:
    """One fault, and the ranks that seem to cause it."""

    #: ``hang``, ``stalled`` (a rank is far too late but alive), ``waiting`` (it may be: no fault), ``init_incomplete`` (a wait outside operations),
    #: ``desync``, ``corruption`` or ``straggler``.
    kind: str
    #: ``dead``, ``gone``, ``destroyed``, ``stopped``, ``unseen``, ``silent``, ``not_joined``, ``not_come``, ``stuck``, ``ops``, ``root``, ``sizes``,
    #: ``splits``, ``order``, ``weights``, ``received``, ``sent``, ``result``, ``one_of``, ``diverged`` or ``late``.
    cause: str
    job_id: str
    group_id: str
    group: str
    seq: int | None
    op: str
    #: The culprits; all ranks inside if none differs.
    ranks: list[int]
    #: The ranks that wait; for a corruption those that agree.
    waiting: list[int]
    since_s: float
    says: str
    #: Source of the evidence: ``probe``, ``ras`` (NCCL's) or ``flight_recorder`` (PyTorch's).
    source: str = "probe"
    #: For a straggler: the share of time that the others waited for it, and why it is late, in words and as a code of
    #: ``ingest.why_late``; ``None``: not known.
    cost_share: float | None = None
    why: str | None = None
    why_code: str | None = None
    #: For a straggler: how many ranks do nothing because of it, on average over time and in all groups in which it is late; ``None``: not known.
    idle_ranks: float | None = None
    #: For a straggler: how long ago it was last late, in s.
    ago_s: float = 0.0
    #: For a corruption of weights: the first parameter that differs, and the step of the optimizer, from 1, after which that was first seen.
    parameter: str | None = None
    #: For a wait or a disagreement: the training step, from 1, in which the ranks are that wait. ``None``: not known.
    step: int | None = None
    #: For a disagreement: the ranks by what they have, the most frequent first; ``None``: not known.
    sides: list[list[int]] | None = None

    @property
    def idles(self) -> float | None:
        """How many ranks do nothing because of a straggler, on average; ``None``: not known."""
        if self.idle_ranks is None and self.cost_share is not None:
            return self.cost_share * len(self.waiting)
        return self.idle_ranks


def combined(*found: Iterable[Verdict]) -> list[Verdict]:
    """Combine verdicts of several sources; a rank that hangs or disagrees is no straggler."""
    every = [verdict for each in found for verdict in each]
    hang = {(verdict.job_id, rank) for verdict in every if verdict.kind not in _BESIDE for rank in verdict.ranks}
    return [
        verdict
        for verdict in every
        if verdict.kind != "straggler" or not any((verdict.job_id, rank) in hang for rank in verdict.ranks)
    ]


def waited_for(found: Iterable[Verdict], waiting: float | None, ranks: int) -> float | None:
    """Return the share of time (0 to 1) that ranks wait for late ones, the mean over all ranks; ``None``: not known.

    Args:
        waiting: this share as measured, perhaps over a longer time than a straggler was late; ``None``: not known.
        ranks: number of ranks.
    """
    late = (min(1.0, (each.idles or 0.0) / ranks) for each in found if each.cost_share and ranks)
    return headline.with_late(late, waiting)


def for_others(messages: float | None, waiting: float | None, measured: float | None) -> float | None:
    """Return the share of time spent waiting for messages but not for a straggler; ``None``: not known, or no messages.

    Args:
        messages: share of time spent waiting for messages.
        waiting: the result of ``waited_for(..., measured, ...)``; its excess over ``measured`` is for a straggler among senders.
        measured: share of time spent waiting in collectives.
    """
    return None if messages is None else max(0.0, messages - max(0.0, (waiting or 0.0) - (measured or 0.0)))


def awaited_ranks(found: Iterable[Verdict], waiting: float | None) -> list[int]:
    """Return the stragglers if at least half of the waiting is for them, else none; ``waiting``: the result of ``waited_for``."""
    late = [each for each in found if each.kind == "straggler"]
    return headline.awaited({rank: each.cost_share or 0.0 for each in late for rank in each.ranks}, waiting)


def stragglers(found: Iterable[Verdict]) -> list[int]:
    """Return the late ranks, whatever they cost."""
    return sorted({rank for each in found if each.kind == "straggler" for rank in each.ranks})


def why_late(found: Iterable[Verdict], late: Collection[int]) -> str:
    """Return why the ranks ``late`` are late, as ``common_why``."""
    whys = {rank: each.why_code for each in found if each.kind == "straggler" for rank in each.ranks}
    return common_why(whys, late)


def straggler_verdict(
    late: Late, groups: Mapping[tuple[str, str], GroupView], at: tuple[str, str], why: Why | None = None
) -> Verdict:
    """Return the verdict on a straggler.

    A rank that waits for it in several groups counts with the group in which it waits most: waits in others may be at the same time.

    Args:
        groups: by job and ``group_id``.
        at: those of the group in which it costs most.
        why: why the rank is late; ``None``: not known.
    """
    group, waits = groups[at], dict[int, float]()
    for group_id, share in ((group.group_id, late.cost_share), *late.also):
        other = groups.get((group.job_id, group_id))
        for rank in () if other is None else other.members or other.ranks:
            waits[rank] = max(share, waits.get(rank, 0.0))
    waits.pop(late.rank, None)
    further = [
        f"{groups[at[0], each].group} ({percent(share)})" for each, share in late.also if (at[0], each) in groups
    ]
    window_s, cost_s, ago_s = late.window_ns / 1e9, late.cost_ns / 1e9, late.ago_ns / 1e9
    by = "late"
    if late.steps and late.late_steps:
        by = f"late in {late.late_steps} of {counted(late.steps, 'step')}, by {seconds(cost_s / late.late_steps)} each"
    elif late.steps:
        by = f"late by {seconds(cost_s / late.steps)} a step (mean of {counted(late.steps, 'step')})"
    says = (
        f"straggler: rank {late.rank} is {by} in group {group.group}; "
        f"in {seconds(window_s)} the others waited {percent(cost_s / window_s)} of the time for it"
        + (f", and in {', '.join(further)}" if further else "")
        + (f"; {why.says}" if why else "")
    )
    about = (group.job_id, group.group_id, group.group, None, "")
    late_by = Verdict(
        "straggler",
        "late",
        *about,
        [late.rank],
        sorted(waits),
        window_s + ago_s,
        says,
        cost_share=cost_s / window_s,
        idle_ranks=sum(waits.values()),
        ago_s=ago_s,
    )
    return late_by if why is None else replace(late_by, why=why.says, why_code=why.code)
