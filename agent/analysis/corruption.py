"""Puts into words which rank has other bits in its replicated parameters than the rest. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from commwatch.analysis.verdicts import Verdict
from commwatch.analysis.wait_graph import RECENT_S
from commwatch.collectors.spans import spans
from commwatch.core.views import GroupView
from commwatch.ingest.jobs import Job

if TYPE_CHECKING:
    from commwatch.core.replicas import Episode

#: Names of parameters in one verdict.
_MOST_NAMES = 3
_SAYS = {
    "rank": "corruption: the weights of rank {} differ from those of rank {}",
    "one_of": "corruption: the weights of one of the ranks {} are wrong",
    "all": "corruption: no two of the ranks {} have the same weights",
}
_CAUSES = {"rank": "weights", "one_of": "one_of", "all": "diverged"}


def corruptions(jobs: Iterable[Job], groups: Mapping[tuple[str, str], GroupView], now_ns: int) -> Iterator[Verdict]:
    """Yield the verdicts on the replicas of this node: while the latest check finds a difference, and for a minute at least.

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
        f"{_SAYS[which].format(spans(ranks), spans(others))}: {parameters} "
        f"(group {group.group}, seen at step {episode.first}{right})"
    )
    about = (group.job_id, group.group_id, group.group, None, "")
    since_s = max(0, now_ns - episode.since_ns) / 1e9
    return Verdict(
        "corruption", _CAUSES[which], *about, list(ranks), others, since_s, says, parameter=first, step=episode.first
    )
