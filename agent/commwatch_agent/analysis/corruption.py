"""Puts into words which rank has other bits than the rest: in its replicated parameters, or in the data of a collective. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.analysis.waits.wait_graph import RECENT_S
from commwatch_agent.ingest.jobs import Job
from commwatch_agent.model.views import GroupView
from commwatch_collectors.spans import ranks as named

if TYPE_CHECKING:
    from commwatch_agent.model.corruption.collectives import Episode as CollectiveEpisode
    from commwatch_agent.model.corruption.collectives import GroupChecks
    from commwatch_agent.model.corruption.replicas import Episode

#: Names of parameters in one verdict.
_MOST_NAMES = 3
_SAYS = {
    "rank": "corruption: the weights of {} differ from those of {}",
    "one_of": "corruption: the weights of one of {} are wrong",
    "all": "corruption: no two of {} have the same weights",
}
#: Of collectives, by cause. The ranks at fault; the others that were compared; the rank that gave the data.
_IN_COLLECTIVES = {
    "received": "corruption: {0} received other data than rank {2} sent",
    "sent": "corruption: other ranks received other data than {0} was to send",
    "result": "corruption: the result of {0} differs from that of {1}",
    "one_of": "corruption: the data of one of {0} are wrong, or become wrong between them",
    "diverged": "corruption: no two of {0} have the same data",
}
_CAUSES = {"rank": "weights", "one_of": "one_of", "all": "diverged"}


def corruptions(jobs: Iterable[Job], groups: Mapping[tuple[str, str], GroupView], now_ns: int) -> Iterator[Verdict]:
    """Yield the verdicts on the ranks of this node: on replicas while the latest check finds a difference, and for a minute at least; on
    collectives for a minute after the latest one with wrong data.

    Args:
        groups: by job and ``group_id``.
    """
    for job in jobs:
        for join in job.replicas.values():
            group = groups.get((job.id, join.group_id))
            if group is None or not join.runs:
                continue
            for episode in join.episodes:
                if episode.latest_ns >= join.judged_ns or now_ns - episode.latest_ns < RECENT_S * 1e9:
                    yield corruption(episode, join.names, sorted(join.ranks), group, now_ns)
        for checks in job.checked.values():
            group = groups.get((job.id, checks.group_id))
            if group is not None:
                yield from _in_collectives(checks, group, now_ns)


def _in_collectives(checks: GroupChecks, group: GroupView, now_ns: int) -> Iterator[Verdict]:
    for episode in checks.episodes:
        if now_ns - episode.latest_ns < RECENT_S * 1e9:
            yield _in_collective(episode, sorted(checks.ranks), group, now_ns)


def _in_collective(episode: CollectiveEpisode, compared: list[int], group: GroupView, now_ns: int) -> Verdict:
    op, cause, ranks, source = episode.fault
    others = [rank for rank in compared if rank not in ranks]
    right = "" if episode.right is None else f", not in operation {episode.right}"
    more = "" if episode.number == 1 else f"; {episode.number} times"
    says = f"{_IN_COLLECTIVES[cause].format(named(ranks), named(others), source)}: {op} {episode.first} of group {group.group}{right}{more}"
    about = (group.job_id, group.group_id, group.group, episode.first, op)
    return Verdict("corruption", cause, *about, list(ranks), others, max(0, now_ns - episode.since_ns) / 1e9, says)


def corruption(episode: Episode, names: tuple[str, ...], compared: list[int], group: GroupView, now_ns: int) -> Verdict:
    """Return the verdict on ranks that differ.

    Args:
        names: of the parameters.
        compared: the ranks that were compared.
        now_ns: on the clock of the episode.
    """
    ranks, which, places = episode.odd
    others = [rank for rank in compared if rank not in ranks]
    first, more = names[places[0]], len(places) - _MOST_NAMES
    parameters = ", ".join(names[place] for place in places[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
    right = "" if episode.right is None else f", not at step {episode.right}"
    says = (
        f"{_SAYS[which].format(named(ranks), named(others))}: {parameters} "
        f"(group {group.group}, seen at step {episode.first}{right})"
    )
    about = (group.job_id, group.group_id, group.group, None, "")
    since_s = max(0, now_ns - episode.since_ns) / 1e9
    return Verdict(
        "corruption", _CAUSES[which], *about, list(ranks), others, since_s, says, parameter=first, step=episode.first
    )
