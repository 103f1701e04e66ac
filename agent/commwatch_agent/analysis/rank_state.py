"""The state of a rank in one word, for every view of ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from commwatch.wire import events as ev
from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.analysis.waits.wait_graph import SILENT_S, age
from commwatch_agent.model.views import InFlight, RankView
from commwatch_collectors.spans import ranks as named

#: Verdicts after which training makes no progress.
WORST = frozenset({"hang", "desync"})
#: What probes record one by one, by mode, if not all operations.
_RECORDED = {"sampling": "one in sixteen operations", "counters": "no operation"}


def state(rank: RankView) -> str:
    """Return ``running``, ``stopped``, ``zombie``, ``silent`` (its probe sends no heartbeat), ``ended`` or ``gone``."""
    if rank.state != "running":
        return rank.state
    if rank.process in ("stopped", "zombie"):
        return rank.process
    silent = rank.heartbeat_age_s is not None and rank.heartbeat_age_s > SILENT_S
    return "silent" if silent else rank.state


def urgency(op: InFlight) -> tuple[bool, float, float]:
    """Return a key that orders operations in flight: a message that no thread waits for before all others, then by ``age``."""
    return op.op not in ev.P2P or op.waited_s is not None, age(op), op.age_s


def begun(rank: RankView) -> list[InFlight]:
    """Return the operations in flight without those that the rank's GPU has not reached."""
    return [op for op in rank.in_flight if not op.queued]


def oldest(rank: RankView) -> InFlight | None:
    """Return the operation in flight of the greatest ``urgency``; ``None``: none has begun."""
    return max(begun(rank), key=urgency, default=None)


def shedding(modes: Iterable[tuple[int, str | None]]) -> str | None:
    """Return as text the ranks whose operations are not all recorded; ``None``: there are none.

    Args:
        modes: ranks with the modes of their probes.
    """
    known = list(modes)
    who = {part: [rank for rank, of_rank in known if of_rank == mode] for mode, part in _RECORDED.items()}
    parts = [f"{part} of {named(ranks)}" for part, ranks in who.items() if ranks]
    if not parts:
        return None
    return f"recorded in part: {', '.join(parts)}; the rest is only counted, because the probe was above its budget"


def culprits(verdicts: Iterable[Verdict]) -> dict[int, str]:
    """Return the ranks that verdicts name, with the kind of the verdict; the worst kind if there are several."""
    found: dict[int, str] = {}
    for verdict in sorted(verdicts, key=lambda verdict: verdict.kind in WORST):
        found.update(dict.fromkeys(verdict.ranks, verdict.kind))
    return found
