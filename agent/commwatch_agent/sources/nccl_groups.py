"""Which process group of a job a communicator of its NCCL log is: by the processes of its ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Set

from commwatch_agent.analysis.live_ranks import of_this_run
from commwatch_agent.ingest.jobs import Job
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.model.cells import GroupInfo
from commwatch_collectors.nccl.communicators import Communicator


def ranks_of(job: Job) -> dict[tuple[str, int], int]:
    """Return the global rank by host (as NCCL writes it) and pid."""
    return {_process(totals): totals.rank for totals in job.rank_totals.values()}


def past(job: Job) -> Set[tuple[str, int]]:
    """Return host and pid of the processes of earlier runs."""
    return ranks_of(job).keys() - {_process(totals) for totals in of_this_run(job)}


def _process(totals: RankTotals) -> tuple[str, int]:
    return str(totals.identity.get("host", "")).partition(".")[0], int(totals.identity.get("pid", 0))


def groups_of(job: Job) -> dict[str, GroupInfo]:
    """Return the job's process groups by their id."""
    return {group.group_id: group for totals in job.rank_totals.values() for group in totals.groups.values()}


def matching(comm: Communicator, ranks: dict[tuple[str, int], int], groups: Iterable[GroupInfo]) -> list[GroupInfo]:
    """Return the process groups that a communicator may belong to: of its size, with its processes at its ranks."""
    seen = {
        (member.init.rank, ranks.get((member.process.host, member.process.pid)))
        for member in comm.members
        if member.init.rank is not None
    }
    several = comm.pooled and len(comm.members) > len(comm.ranks)
    places = {(at, rank) for at, rank in seen if at is not None and rank is not None}
    return [] if several or len(places) < len(seen) else fitting(comm.nranks, places, groups)


def fitting(size: int, places: Set[tuple[int, int]], groups: Iterable[GroupInfo]) -> list[GroupInfo]:
    """Return the groups of that size that match all ``places``: pairs of rank in the communicator and global rank."""
    return [
        group
        for group in groups
        if group.ranks is not None
        and group.size == size == len(group.ranks)
        and places
        and all(at < size and group.ranks[at] == rank for at, rank in places)
    ]
