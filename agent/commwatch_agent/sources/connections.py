"""What the TCP connections of ranks do whose communication takes much of their time. While it does not, no connection is looked at."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from commwatch.wire.identity import network_namespace
from commwatch_agent.analysis import live_ranks
from commwatch_agent.ingest.jobs import Job, JobTable
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.model.views import RankTraffic
from commwatch_collectors.node.tcp_connections import Lister, Sockets, Unknown
from commwatch_collectors.node.tcp_peers import peers

#: Part of the time in communication from which on connections are looked at, and over how many ticks; an operation that has begun so long ago
#: counts, too.
_SHARE, _TICKS, _LONG_NS = 0.2, 8, 1_000_000_000
#: Between two samples, taken at ticks, and the time that the first and the last sample cover.
_EVERY_NS, _LEAST_NS, _WINDOW_NS = 1_500_000_000, 3_500_000_000, 10_500_000_000


class _Look(NamedTuple):
    """A rank to look at."""

    totals: RankTotals
    pid: int
    #: ``RankTraffic`` without its connections.
    shares: RankTraffic


class Connections:
    """Samples the connections of ranks that communicate much over a network, and keeps in their totals what they do; one thread calls ``tick``.

    Args:
        lock: guards the totals.
        listed: returns the connections of processes; default: those that the kernel lists.
        now_ns: returns the monotonic time.
    """

    def __init__(
        self,
        aggregate: JobTable,
        lock: threading.RLock,
        *,
        listed: Callable[[Iterable[int]], dict[int, Sockets | Unknown]] | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._aggregate, self._lock, self._listed, self._now_ns = aggregate, lock, listed or Lister(), now_ns
        #: Time in periods and in communication, by tick.
        self._periods: dict[RankTotals, deque[tuple[int, int]]] = {}
        self._samples: dict[RankTotals, deque[tuple[int, Sockets]]] = {}
        self._sampled_ns = now_ns() - _EVERY_NS

    def tick(self) -> None:
        """Take a sample of each rank that communicates much, every other second."""
        now_ns = self._now_ns()
        with self._lock:
            looks = list(self._looks(now_ns))
            for totals in self._samples.keys() - {look.totals for look in looks}:
                if totals.alive:  # of an ended rank, a report still needs it
                    totals.traffic = None
        self._samples = {look.totals: self._samples.get(look.totals, deque()) for look in looks}
        if not looks or now_ns - self._sampled_ns < _EVERY_NS:
            return
        self._sampled_ns = now_ns
        found = self._listed([look.pid for look in looks])
        now_ns = self._now_ns()
        traffic = {look.totals: self._traffic(look, found[look.pid], now_ns) for look in looks}
        with self._lock:
            for totals, known in traffic.items():
                totals.traffic = None if known is None else (now_ns, known)

    def _looks(self, now_ns: int) -> Iterator[_Look]:
        """Yield the ranks to look at: of jobs whose ranks are not all in one network."""
        before, self._periods = self._periods, {}
        for job in self._aggregate.jobs.values():
            for totals in _spanning(job):
                periods = totals.steps.periods
                past = self._periods[totals] = before.get(totals, deque(maxlen=_TICKS))
                past.append((periods.duration_ns, periods.comm_ns))
                if totals.pid is not None and (_is_inside_long(totals, now_ns) or _share(past) >= _SHARE):
                    yield _Look(totals, totals.pid, _shares(totals, now_ns))

    def _traffic(self, look: _Look, found: Sockets | Unknown, now_ns: int) -> RankTraffic | None:
        """Return what the connections of a rank do; ``None``: it is looked at for too short a time."""
        samples = self._samples[look.totals]
        if isinstance(found, Unknown):
            samples.clear()
            return RankTraffic(unknown=found.reason)
        samples.append((now_ns, found))
        while now_ns - samples[0][0] > _WINDOW_NS:
            samples.popleft()
        since_ns = samples[0][0]
        if now_ns - since_ns < _LEAST_NS:
            return None
        return replace(look.shares, peers=peers([each for _, each in samples], (now_ns - since_ns) / 1e9))


def _spanning(job: Job) -> Collection[RankTotals]:
    """Return the live ranks of a job that has ranks on other nodes or in other networks of this one, as pods have, else none."""
    alive = [totals for totals in live_ranks.of_this_run(job) if totals.alive]
    networks = {network_namespace(totals.identity) for totals in alive}
    is_wide = bool(alive) and (len(networks) > 1 or int(alive[0].identity["world_size"]) > len(alive))
    return alive if is_wide else ()


def _is_inside_long(totals: RankTotals, now_ns: int) -> bool:
    return any(record.size_bytes and now_ns - record.launch_ns >= _LONG_NS for record in totals.pending())


def _share(past: deque[tuple[int, int]]) -> float:
    """Return the part of the latest periods in communication."""
    (duration_ns, comm_ns), (until_ns, until_comm_ns) = past[0], past[-1]
    return (until_comm_ns - comm_ns) / (until_ns - duration_ns) if until_ns > duration_ns else 0.0


def _shares(totals: RankTotals, now_ns: int) -> RankTraffic:
    steps = totals.steps.totals
    comm, exposed = steps.shares(now_ns) or (None, None)
    usual = [step.end_ns - step.start_ns for step in steps.usual(now_ns)]
    return RankTraffic([], comm, exposed, median(usual) / 1e9 if usual else None)
