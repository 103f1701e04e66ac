"""All jobs of this node, with the totals of their ranks. Pure: no clock, no file; times are parameters."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from commwatch_agent.ingest.collective_join import GroupJoin
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.ingest.tables.weights import ALL_BYTES, ENDED_BYTES, MOST_ENDED, OF_JOB_BYTES, OWN_BYTES
from commwatch_agent.model.shares import NO_OWNER, Account, Room, fair

if TYPE_CHECKING:
    from commwatch_agent.model.corruption.collectives import GroupChecks
    from commwatch_agent.model.corruption.replicas import SetJoin


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class _Shared(Protocol):
    """What the ranks of a group share."""

    @property
    def bytes(self) -> int:
        """About how many bytes it takes."""

    def halve(self) -> None:
        """Drop the older half of what waits for a rank."""


def _remove(table: dict[_Key, _Value], part: object) -> None:
    for key in [key for key, each in table.items() if each is part]:
        del table[key]


class Job:
    """The ranks of one name on this node, over all restarts: those of its latest run, and for a time those of one that has ended.

    Args:
        account: of the memory of what its ranks share, in bytes; default: room of its own.
    """

    def __init__(self, job_id: str, account: Account | None = None) -> None:
        self.id, self.account = job_id, Room(ALL_BYTES).account() if account is None else account
        self.joins: dict[str, GroupJoin] = {}
        #: Sets of replicated parameters, by ``group_id`` and key.
        self.replicas: dict[tuple[str, str], SetJoin] = {}
        #: Checked collectives, by ``group_id``.
        self.checked: dict[str, GroupChecks] = {}
        self.rank_totals: dict[str, RankTotals] = {}
        #: Monotonic time when its last rank was found ended; ``None`` while one runs.
        self.ended_ns: int | None = None
        #: How often collectives that wait for a rank were dropped, because the job had too many.
        self.dropped = 0

    def settle(self) -> None:
        """Drop the oldest of what waits for a rank until all of it has room."""
        parts: list[_Shared] = [*self.joins.values(), *self.replicas.values(), *self.checked.values()]
        sizes = [part.bytes for part in parts]
        while not self._has_room(sum(sizes)):
            at = max(range(len(parts)), key=sizes.__getitem__)
            parts[at].halve()
            self.dropped += 1
            if parts[at].bytes >= sizes[at]:  # nothing in it waits: it is too large by itself
                part = parts.pop(at)
                del sizes[at]
                _remove(self.joins, part)
                _remove(self.replicas, part)
                _remove(self.checked, part)
            else:
                sizes[at] = parts[at].bytes

    def _has_room(self, size: int) -> bool:
        if size > OF_JOB_BYTES:
            self.account.refuse()
            return False
        return self.account.change(self.account.used, size)

    def forget(self, uid: str) -> None:
        """Forget a rank."""
        self.rank_totals.pop(uid).account.close()

    def close(self) -> None:
        """Forget all ranks, and what they share."""
        for uid in list(self.rank_totals):
            self.forget(uid)
        self.account.close()

    @property
    def watched(self) -> set[str]:
        """What ``commwatch run`` has named, of the ranks that it has started."""
        return {str(totals.identity["run"]) for totals in self.rank_totals.values() if totals.identity.get("run")}

    @property
    def owners(self) -> set[int]:
        """The users who wrote its rings."""
        return {totals.owner_uid for totals in self.rank_totals.values() if totals.owner_uid is not None}


class JobTable:
    """All jobs of this node.

    Args:
        keep_ended_ns: how long the series of an ended job stay in ``/metrics``.
    """

    def __init__(self, keep_ended_ns: int = 300_000_000_000) -> None:
        self.jobs: dict[str, Job] = {}
        self._keep_ended_ns = keep_ended_ns
        #: The memory that all tables share, in bytes.
        self.memory = Room(ALL_BYTES, OWN_BYTES)
        #: Number of ended ranks that were forgotten because there were too many.
        self.forgotten = 0

    def open(
        self, uid: str, identity: dict[str, Any], owner: Hashable = NO_OWNER, *, name: str | None = None, run: str = ""
    ) -> RankTotals:
        """Create the totals of a new ring and return them; raises ``KeyError`` or ``TypeError`` for a damaged identity.

        Args:
            uid: of the ring.
            owner: of the ring; the owners share the memory.
            name: of its run; default: the job's name.
            run: key of its run.
        """
        job_id = str(identity["job"]) if name is None else name
        job = self.jobs.get(job_id) or Job(job_id, self.memory.account(owner))
        account = self.memory.account(owner)
        totals = RankTotals(identity, job.joins, job.replicas, job.checked, account=account, settle=job.settle)
        totals.owner_uid, totals.run_key = owner if isinstance(owner, int) else None, run
        if any(other.rank == totals.rank for other in job.rank_totals.values()):
            for join in job.joins.values():
                join.restart()
            job.replicas.clear()
            job.checked.clear()
        self.jobs[job_id] = job
        job.rank_totals[uid] = totals
        job.ended_ns = None
        return totals

    def name_job(self, old: str, new: str) -> None:
        """Give a job a name that no other has."""
        job = self.jobs.pop(old)
        job.id = new
        self.jobs[new] = job

    def retire(self, now_ns: int) -> None:
        """Drop the jobs that ended more than ``keep_ended_ns`` ago, and the oldest ended ranks if there are too many."""
        for job in list(self.jobs.values()):
            if any(totals.alive for totals in job.rank_totals.values()):
                job.ended_ns = None
            elif job.ended_ns is None:
                job.ended_ns = now_ns
            elif now_ns - job.ended_ns > self._keep_ended_ns:
                del self.jobs[job.id]
                job.close()
        self._forget_ended()

    def _forget_ended(self) -> None:
        """Forget the oldest ended ranks of those owners that have the most."""
        ended: dict[Hashable, list[tuple[Job, str, int]]] = {}
        for job in self.jobs.values():
            for uid, totals in job.rank_totals.items():
                if totals.is_over:
                    ended.setdefault(totals.account.owner, []).append((job, uid, totals.account.used))
        sizes = {owner: sum(used for *_, used in of_owner) for owner, of_owner in ended.items()}
        while sum(map(len, ended.values())) > MOST_ENDED or sum(sizes.values()) > ENDED_BYTES:
            owner = max(ended, key=lambda each: (len(ended[each]) * ENDED_BYTES // MOST_ENDED, sizes[each]))
            job, uid, used = ended[owner].pop(0)
            sizes[owner] -= used
            job.forget(uid)
            self.forgotten += 1

    @property
    def refused(self) -> int:
        """How often something was not kept, or was dropped, because there was no room for it in memory."""
        return self.memory.refused + self.forgotten

    def rank_totals(self) -> Iterator[RankTotals]:
        """Yield the totals of every rank of every job."""
        for job in self.jobs.values():
            yield from job.rank_totals.values()

    def peers(self) -> list[str]:
        """Return the addresses of agents of other nodes that ranks have reported, for jobs that are in memory.

        The owners of the rings take turns, and the lists of an owner: who takes the first of them takes some of everyone's.
        """
        lists: dict[Hashable, dict[tuple[str, ...], None]] = {}
        for totals in self.rank_totals():
            if totals.peers:
                lists.setdefault(totals.account.owner, {})[totals.peers] = None
        of_owners = {owner: fair(dict(enumerate(of_owner))) for owner, of_owner in lists.items()}
        return list(dict.fromkeys(fair(of_owners)))
