"""Polls NCCL's RAS: how many collectives each rank of each communicator has launched, over all nodes.

RAS uses a thread of the trainer that NCCL runs anyway. It is polled only if the settings name it, never in a version of NCCL that a query
can crash, and never while a communicator may be under construction, which is when most of the known crashes happened.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from commwatch_agent.analysis.live_ranks import of_this_run
from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.analysis.waits.wait_graph import HANG_S
from commwatch_agent.ingest.jobs import Job, JobTable
from commwatch_agent.model.cells import GroupInfo
from commwatch_agent.model.witness_views import RasAnswer, RasCommunicator, RasView
from commwatch_agent.sources.nccl_groups import groups_of
from commwatch_agent.text.units import seconds
from commwatch_collectors.nccl import ras
from commwatch_collectors.nccl.ras import Communicator, Member, Status
from commwatch_collectors.registry import Reading
from commwatch_collectors.spans import ranks as named
from commwatch_collectors.spans import spans

log = logging.getLogger("commwatch")
COLLECTOR = "ras"
#: Seconds between two polls of one RAS, and without a new group in any job before RAS is polled.
POLL_S, SETTLED_S = 10.0, 60.0
#: Seconds after which an answer gives no verdict any more.
_STALE_S = 60.0


class Known(NamedTuple):
    """What the probes report of a job."""

    job_id: str
    #: By rank on this node: its pid, as the process sees it.
    pids: dict[int, int]
    groups: list[GroupInfo]


class Joined(NamedTuple):
    """The process group of a communicator."""

    job_id: str
    label: str
    #: ``None``: several groups have these members.
    group_id: str | None
    #: Global ranks, by rank in the communicator.
    members: tuple[int, ...]


def join(comm: Communicator, jobs: Iterable[Known]) -> Joined | None:
    """Return the group whose ranks on this node have the pids that ``comm`` reports; ``None``: none, or ambiguous."""
    pids = {member.rank: member.pid for member in comm.members if member.pid is not None}
    found: list[tuple[str, GroupInfo]] = []
    for job in jobs:
        for group in job.groups:
            if group.ranks is None or len(group.ranks) != group.size or comm.size != group.size:
                continue
            here = [(at, job.pids[rank]) for at, rank in enumerate(group.ranks) if rank in job.pids]
            matches = [pids[at] == pid for at, pid in here if at in pids]
            if matches and all(matches):
                found.append((job.job_id, group))
    members = {(job_id, group.ranks) for job_id, group in found}
    if len(members) != 1:
        return None
    job_id, first = found[0]
    label = " or ".join(sorted({group.label for _, group in found}))
    return Joined(job_id, label, first.group_id if len(found) == 1 else None, first.ranks or ())


# -- verdicts -------------------------------------------------------------------------------------


def judge(comm: Communicator, where: Joined, unchanged_s: float) -> Verdict | None:
    """Return the verdict on a communicator unchanged for ``unchanged_s``; ``None``: nothing is wrong, or not for sure."""
    states = {member.state for member in comm.members}
    if states & {ras.INIT, ras.ENDING, ras.ABSENT} or any(m.rank >= len(where.members) for m in comm.members):
        return None
    by_state = {state: [m for m in comm.members if m.state == state] for state in (ras.DEAD, ras.SILENT)}
    others = [m for m in comm.members if m.state == ras.RUNNING]
    if by_state[ras.DEAD]:
        lost = by_state[ras.DEAD]
        says = f"{_ranks(lost, where)} can no longer be reached and {'count' if len(lost) > 1 else 'counts'} as dead"
        return _verdict("hang", "dead", where, culprits=lost, waiting=others, since_s=unchanged_s, op="", says=says)
    if unchanged_s < HANG_S:
        return None
    if by_state[ras.SILENT]:
        lost = by_state[ras.SILENT]
        says = f"{_ranks(lost, where)} {'do' if len(lost) > 1 else 'does'} not answer"
        return _verdict(
            "stalled", "silent", where, culprits=lost, waiting=others, since_s=unchanged_s, op="", says=says
        )
    return _counts(others, where, unchanged_s)


def _counts(members: Sequence[Member], where: Joined, unchanged_s: float) -> Verdict | None:
    """Return the verdict on ranks that have launched different numbers of collectives, and launch no more."""
    counted = [m for m in members if m.counts is not None]
    ops = sorted({op for m in counted for op in m.counts or {}})
    vectors = {m.rank: tuple((m.counts or {}).get(op, 0) for op in ops) for m in counted}
    if len(set(vectors.values())) < 2:
        return None
    top = tuple(max(vector[at] for vector in vectors.values()) for at in range(len(ops)))
    differing = [op for at, op in enumerate(ops) if len({vector[at] for vector in vectors.values()}) > 1]
    says = "; ".join(_lots(op, [(m, (m.counts or {}).get(op, 0)) for m in counted], where) for op in differing)
    says = f"{says}; no rank has launched anything for {seconds(unchanged_s)}"
    ahead = [m for m in counted if vectors[m.rank] == top]
    if ahead:
        behind = [m for m in counted if vectors[m.rank] != top]
        return _verdict(
            "stalled",
            "not_joined",
            where,
            culprits=behind,
            waiting=ahead,
            since_s=unchanged_s,
            op=differing[0],
            says=says,
        )
    counts = Counter(vectors.values()).most_common()
    tie = counts[0][1] == counts[1][1]
    odd = [m for m in counted if tie or vectors[m.rank] != counts[0][0]]
    rest = [m for m in counted if not tie and vectors[m.rank] == counts[0][0]]
    return _verdict("desync", "ops", where, culprits=odd, waiting=rest, since_s=unchanged_s, op=differing[0], says=says)


def _lots(op: str, counts: list[tuple[Member, int]], where: Joined) -> str:
    """Return the launches of an operation by rank as text, the most first."""
    by_count: dict[int, list[Member]] = {}
    for member, count in counts:
        by_count.setdefault(count, []).append(member)
    parts = [f"{count} times by {_ranks(by_count[count], where)}" for count in sorted(by_count, reverse=True)]
    return f"{op} launched {', '.join(parts)}"


def _ranks(members: Iterable[Member], where: Joined) -> str:
    return named({where.members[member.rank] for member in members})


def _verdict(
    kind: str,
    cause: str,
    where: Joined,
    *,
    culprits: Sequence[Member],
    waiting: Sequence[Member],
    since_s: float,
    op: str,
    says: str,
) -> Verdict:
    return Verdict(
        kind=kind,
        cause=cause,
        job_id=where.job_id,
        group_id=where.group_id or "",
        group=where.label,
        seq=None,
        op=op,
        ranks=sorted(where.members[member.rank] for member in culprits),
        waiting=sorted(where.members[member.rank] for member in waiting),
        since_s=since_s,
        says=f"RAS reports: {says} (group {where.label})",
        source=COLLECTOR,
    )


# -- the poller -----------------------------------------------------------------------------------


@dataclass
class _Endpoint:
    """One RAS and its latest answer."""

    host: str
    port: int
    #: Why it is not polled.
    refused: str | None = None
    due: float = 0.0
    polled_at: float | None = None
    status: Status | None = None
    trouble: str | None = None
    #: By communicator: its ranks as reported, and the Unix time since which they have not changed.
    since: dict[str, tuple[tuple[Member, ...], float]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def take(self, status: Status, now: float) -> None:
        """Store an answer."""
        since = {}
        for comm in status.communicators:
            before = self.since.get(comm.comm)
            since[comm.comm] = before if before is not None and before[0] == comm.members else (comm.members, now)
        self.status, self.since, self.trouble = status, since, None


class Ras:
    """Polls NCCL's RAS at all addresses of the settings. One thread calls ``tick``; any thread may call the other methods.

    Args:
        addresses: host and port of each.
        lock: guards the aggregate.
        clock: Unix time.
        ask: sends the query to host and port, and returns the answer.
    """

    def __init__(
        self,
        addresses: Iterable[tuple[str, int]],
        aggregate: JobTable,
        lock: threading.RLock,
        clock: Callable[[], float] = time.time,
        ask: Callable[[str, int], str] = ras.ask,
    ) -> None:
        self._endpoints = [_Endpoint(host, port) for host, port in addresses]
        self._aggregate, self._jobs_lock, self._clock, self._ask = aggregate, lock, clock, ask
        self._lock = threading.RLock()
        #: Groups that live ranks have used, and the Unix time when the latest one was new.
        self._used: set[tuple[str, int]] = set()
        self._new_at = clock()

    def tick(self) -> None:
        """Poll each RAS that is due."""
        if not self._endpoints:
            return
        refused = self._refused()
        with self._lock:
            for endpoint in self._endpoints:
                endpoint.refused = refused
        if refused is not None or not self._settled():
            with self._lock:  # earlier answers may be of earlier jobs
                self._endpoints = [_Endpoint(endpoint.host, endpoint.port, refused) for endpoint in self._endpoints]
            return
        for endpoint in self._endpoints:
            if self._clock() < endpoint.due:
                continue
            try:
                status = ras.parse(self._ask(endpoint.host, endpoint.port))
            except (OSError, ValueError) as error:
                self._fail(endpoint, f"{endpoint.address}: {getattr(error, 'strerror', None) or error}")
            else:
                with self._lock:
                    endpoint.take(status, self._clock())
            with self._lock:
                endpoint.polled_at = self._clock()
                endpoint.due = endpoint.polled_at + POLL_S

    def _refused(self) -> str | None:
        """Return why RAS is not to be polled, by the NCCL of the live ranks of this node; ``None``: it may be."""
        with self._jobs_lock:
            ranks = [
                totals for job in self._aggregate.jobs.values() for totals in job.rank_totals.values() if totals.alive
            ]
            versions = {str(totals.identity["nccl"]) for totals in ranks if "nccl" in totals.identity}
        return next(filter(None, map(ras.refusal, sorted(versions))), None)

    def _fail(self, endpoint: _Endpoint, trouble: str) -> None:
        with self._lock:
            if endpoint.trouble is None:
                log.warning("NCCL's RAS does not answer: %s", trouble)
            endpoint.trouble, endpoint.status = trouble, None
            endpoint.since.clear()

    def _settled(self) -> bool:
        """Return True if live ranks use groups, none of them new: then no communicator is under construction."""
        with self._jobs_lock:
            jobs = self._aggregate.jobs.values()
            rank_totals = {uid: totals for job in jobs for uid, totals in job.rank_totals.items() if totals.alive}
            used = {(uid, group) for uid, totals in rank_totals.items() for group in totals.last_seq}
            used |= {(uid, record.group) for uid, totals in rank_totals.items() for record in totals.in_flight}
        with self._lock:
            if used - self._used:
                self._new_at = self._clock()
            self._used |= used
            if not rank_totals:
                self._used.clear()
            return bool(used) and self._clock() - self._new_at >= SETTLED_S

    # -- answers ------------------------------------------------------------------------------

    def readings(self) -> list[tuple[str, list[Reading] | None]]:
        """Return readings for ``/metrics``: whether each RAS answers; none where it is off or was not polled yet."""
        with self._lock:
            tried = [endpoint for endpoint in self._endpoints if endpoint.polled_at is not None]
            if not tried:
                return []
            return [(COLLECTOR, [] if all(endpoint.trouble is None for endpoint in tried) else None)]

    def verdicts(self, job: str | None) -> list[Verdict]:
        """Return the verdicts on the latest answers, the longest first."""
        jobs, now, found = self._jobs(), self._clock(), []
        with self._lock:
            for endpoint in self._endpoints:
                if endpoint.status is None or endpoint.polled_at is None or now - endpoint.polled_at > _STALE_S:
                    continue
                for comm in endpoint.status.communicators:
                    where = join(comm, jobs)
                    if where is not None and job in (None, where.job_id):
                        verdict = judge(comm, where, endpoint.polled_at - endpoint.since[comm.comm][1])
                        found += [verdict] if verdict is not None else []
        return sorted(found, key=lambda verdict: -verdict.since_s)

    def view(self, job: str | None) -> RasView:
        """Return the state and the latest answer of each RAS."""
        jobs = self._jobs()
        with self._lock:
            answers = [_answer(endpoint, jobs, job) for endpoint in self._endpoints]
        if not answers:
            return RasView("off", "the setting ras is not set", [])
        states = [answer.state for answer in answers]
        state = next(state for state in ("down", "refused", "works", "found") if state in states)
        return RasView(state, "; ".join(answer.says for answer in answers), answers)

    def _jobs(self) -> list[Known]:
        with self._jobs_lock:
            return [
                _known(job) for job in self._aggregate.jobs.values() if any(b.alive for b in job.rank_totals.values())
            ]


def _known(job: Job) -> Known:
    return Known(
        job.id,
        {totals.rank: int(totals.identity.get("pid", 0)) for totals in of_this_run(job)},
        list(groups_of(job).values()),
    )


def _answer(endpoint: _Endpoint, jobs: list[Known], job: str | None) -> RasAnswer:
    status = endpoint.status
    comms = [] if status is None else [_communicator(endpoint, comm, jobs) for comm in status.communicators]
    if endpoint.refused is not None:
        state, says = "refused", f"{endpoint.address}: not queried: {endpoint.refused}"
    elif endpoint.trouble is not None:
        state, says = "down", endpoint.trouble
    elif status is None:
        state, says = (
            "found",
            f"{endpoint.address}: not queried yet: a job must run for {SETTLED_S:.0f} s without new groups",
        )
    else:
        state, says = (
            "works",
            f"{endpoint.address}: NCCL {status.nccl_version or 'of unknown version'}, in {status.form}",
        )
    return RasAnswer(
        endpoint.address,
        state,
        says,
        endpoint.polled_at,
        None if status is None else status.nccl_version,
        None if status is None else status.form,
        [comm for comm in comms if job in (None, comm.job_id)],
    )


def _communicator(endpoint: _Endpoint, comm: Communicator, jobs: list[Known]) -> RasCommunicator:
    where = join(comm, jobs)
    states: dict[str, list[int]] = {}
    lots: dict[str, dict[str, list[int]]] = {}
    for member in comm.members:
        states.setdefault(member.state, []).append(member.rank)
        for op, count in (member.counts or {}).items():
            lots.setdefault(op, {}).setdefault(str(count), []).append(member.rank)
    return RasCommunicator(
        comm=comm.comm,
        size=comm.size,
        job_id=None if where is None else where.job_id,
        group=None if where is None else where.label,
        ranks={state: spans(ranks) for state, ranks in states.items()},
        counts={op: {count: spans(ranks) for count, ranks in each.items()} for op, each in lots.items()},
        differ=any(len(each) > 1 for each in lots.values()),
        unchanged_s=max(0.0, (endpoint.polled_at or 0.0) - endpoint.since[comm.comm][1]),
    )
