"""What ranks do for which others wait. While no rank waits, no process is looked at."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from commwatch.wire import events as ev
from commwatch_agent.analysis import live_ranks
from commwatch_agent.analysis.waits.outside_waits import outside_waits
from commwatch_agent.analysis.waits.wait_graph import waits
from commwatch_agent.incidents.incident import WAITED_FOR, Incident
from commwatch_agent.ingest.jobs import Job, JobTable
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_collectors.node.activity import GpuUse, Parents, Sample, sample
from commwatch_collectors.node.gpu import GpuPlace
from commwatch_collectors.node.judged_activity import WINDOW_S, judged

#: A rank is looked at when another one has waited for it for the first time; in a job with ranks on other nodes, whose waits are not seen here,
#: also when it has been in no operation for the second time.
_WAITED_NS, _QUIET_NS = 1_000_000_000, 5_000_000_000
#: Samples that are kept of a rank, one a second.
_MOST_SAMPLES = int(WINDOW_S) + 1


class _Look(NamedTuple):
    """A rank to look at."""

    totals: RankTotals
    pid: int
    gpu: GpuPlace | None
    #: As in ``GpuUse``.
    is_own: bool


class Activities:
    """Samples the processes of ranks for which others wait, and keeps in their totals what they do; one thread calls ``tick``.

    Args:
        lock: guards the totals.
        incidents: returns those in memory.
        gpu_busy: returns the share of time in which a GPU is busy; ``None``: not known.
        now_ns: returns the monotonic time.
    """

    def __init__(
        self,
        aggregate: JobTable,
        lock: threading.RLock,
        *,
        incidents: Callable[[], Iterable[Incident]] = tuple,
        gpu_busy: Callable[[GpuPlace], float | None] = lambda place: None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._aggregate, self._lock, self._incidents = aggregate, lock, incidents
        self._gpu_busy, self._now_ns = gpu_busy, now_ns
        self._parents = Parents()
        self._samples: dict[RankTotals, deque[Sample]] = {}

    def tick(self) -> None:
        """Take a sample of each rank for which others wait."""
        blamed = {
            (each.job_id, rank)
            for each in self._incidents()
            if each.state == "open" and each.kind in WAITED_FOR
            for rank in each.ranks
        }
        with self._lock:
            looks = [look for job in self._aggregate.jobs.values() for look in _looks(job, blamed, self._now_ns())]
            ranks = {totals.pid for totals in self._aggregate.rank_totals() if looks and totals.alive and totals.pid}
        ranks.add(os.getpid())  # a rank may have begun this agent
        samples = {look.totals: self._samples.get(look.totals, deque(maxlen=_MOST_SAMPLES)) for look in looks}
        self._take(looks, ranks, samples)
        with self._lock:
            for totals in self._samples.keys() - samples.keys():
                totals.activity = None
            for totals, taken in samples.items():
                before = None if totals.activity is None else totals.activity[1]
                found = judged(taken, before)
                totals.activity = None if found is None else (taken[-1].now_ns, found)
        self._samples = samples

    def _take(self, looks: Iterable[_Look], ranks: Collection[int], samples: dict[RankTotals, deque[Sample]]) -> None:
        """Add a sample of each rank; the samples of a process that has ended are removed."""
        if not samples:
            self._parents.forget()
            return
        parents = self._parents.read()
        for totals, pid, place, is_own in looks:
            gpu = None if place is None else GpuUse(self._gpu_busy(place), is_own)
            before = samples[totals][-1] if samples[totals] else None
            taken = sample(pid, self._now_ns(), parents, before=before, others=ranks, gpu=gpu)
            if taken is None:
                samples[totals].clear()
            else:
                samples[totals].append(taken)


def _looks(job: Job, blamed: Collection[tuple[str, int]], now_ns: int) -> Iterator[_Look]:
    """Yield the ranks of a job to look at: for which others wait, or that are blamed."""
    alive = [totals for totals in live_ranks.of_this_run(job) if totals.alive]
    wanted = {rank for name, rank in blamed if name == job.id} | _waited_for(job, alive, now_ns)
    if not wanted:
        return
    on_gpu = Counter(totals.gpu for totals in alive if totals.gpu is not None)
    for totals in alive:
        if totals.rank in wanted and totals.pid is not None:
            is_own = totals.gpu is not None and on_gpu[totals.gpu] == 1 and not totals.unseen and not _is_on_gpu(totals)
            yield _Look(totals, totals.pid, totals.gpu, is_own)


def _is_on_gpu(totals: RankTotals) -> bool:
    """Return whether an operation of a rank has begun on its GPU: NCCL's kernel waits there."""
    return any(record.flags & ev.ON_DEVICE for record in totals.pending())


def _waited_for(job: Job, alive: Collection[RankTotals], now_ns: int) -> set[int]:
    """Return the ranks for which others have waited for some time, as far as this node sees that."""
    begun = {totals.rank: [record.launch_ns for record in totals.pending()] for totals in alive}
    since_ns = [
        *(launch_ns for of_rank in begun.values() for launch_ns in of_rank),
        *(totals.outside.since_ns or now_ns for totals in alive),
    ]
    found = set()
    if any(now_ns - each >= _WAITED_NS for each in since_ns):
        views = live_ranks.ranks([job], now_ns)
        known = {(view.job_id, view.rank): view for view in views}
        found = {rank for wait in outside_waits(known) for rank in wait.culprits}
        under_way = {op.group_id for view in views for op in view.in_flight}
        for group in live_ranks.groups([job]):
            for wait in waits(group, views, known) if group.aligned and group.group_id in under_way else ():
                found |= set(wait.missing) if wait.since_s >= _WAITED_NS / 1e9 else set()
    if alive and int(next(iter(alive)).identity["world_size"]) > len(begun):
        found |= {
            totals.rank
            for totals in alive
            if not begun[totals.rank]
            and not totals.outside.since_ns
            and now_ns - (totals.recorded_ns or live_ranks.started_ns(totals)) >= _QUIET_NS
        }
    return found
