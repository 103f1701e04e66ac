"""Rules on the shares of the step time: communication, communication that compute waits for, and GPUs that wait for it. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import fmean
from typing import NamedTuple

from commwatch_agent.analysis.headline import awaited, split, with_late
from commwatch_agent.incidents.incident import Condition
from commwatch_agent.incidents.link_rules import idle_links
from commwatch_agent.incidents.metric_conditions import GPU, RANK, Name, condition, of_jobs, shares
from commwatch_agent.incidents.metric_window import MetricWindow, Vector, by, labels_of, only, where
from commwatch_agent.model.cells import SHARE_WINDOW_NS
from commwatch_agent.text.units import counted, percent


class _Shares(NamedTuple):
    """Shares of the step time of a job's ranks on this node, 0 to 1; ``None``: not known."""

    job_id: str
    ranks: float
    comm: float
    exposed: float | None
    #: Waiting for late ranks, the mean over the ranks; ``None`` also where it is too little to matter. What stragglers cost is of a shorter time
    #: than ``comm``, so it may be more.
    waiting: float | None
    #: The stragglers, if ``waiting`` is for them.
    late: list[int]

    @property
    def numbers(self) -> dict[str, float]:
        waiting = None if self.waiting is None else min(self.waiting, self.comm)
        known = {"exposed": self.exposed, "waiting": waiting}
        return {name: value for name, value in known.items() if value is not None}

    @property
    def figures(self) -> str:
        return ", ".join(
            f"{name} {percent(value)}" for name, value in {"communication": self.comm, **self.numbers}.items()
        )

    @property
    def says(self) -> str:
        parts = split(self.comm, self.waiting, late=self.late)
        exposed = "" if self.exposed is None else f"; compute waits for it {percent(self.exposed)} of the time"
        return f"communication takes {percent(self.comm)} of the step time{f': {parts}' if parts else ''}{exposed}"


def comm_bound(window: MetricWindow, thresholds: Mapping[str, float], now_s: float) -> Iterator[Condition]:
    """Jobs that spend much of their step time in communication, and nodes whose links are idle meanwhile.

    The variant ``quiet`` needs no warning: in the last five minutes at least half of the share was waiting for late ranks, on the mean as
    measured, or at some time for a straggler; or at some time compute did not wait. Over five minutes, because a job that changes between
    these would satisfy none for long enough.
    """
    exposed = _over((of_jobs(each, fmean) for each in window.snapshots(Name.EXPOSED_SHARE)), min)
    late = _over(
        (
            _waits(window, window.rate(Name.WAIT_S)),
            *(of_jobs(each, max) for each in window.snapshots(Name.STRAGGLER_WAIT)),
        ),
        max,
    )
    for job in _shares(window, thresholds):
        if job.comm > thresholds["comm_share"]:
            hidden = exposed.get(job.job_id, math.inf) < thresholds["exposed_share_quiet"]
            quiet = hidden or late.get(job.job_id, -math.inf) >= job.comm / 2
            yield _bound(job, "quiet" if quiet else "", now_s)
    yield from idle_links(window, thresholds, now_s)


def _bound(job: _Shares, variant: str, now_s: float) -> Condition:
    return condition(
        "comm_bound",
        (),
        {"job_id": job.job_id},
        now_s=now_s,
        value=job.comm,
        variant=variant,
        says=job.says,
        numbers=job.numbers,
        # Only what compute waits for is lost. If that is not known, all of it may be, but nothing is known of idle ranks.
        share=job.comm if job.exposed is None else job.exposed,
        idle_ranks=None if job.exposed is None else job.exposed * job.ranks,
        source="metrics",
        metric=Name.COMM_SHARE,
        measured=f"{job.figures}: means of {_counted(job.ranks)} over the steps of a minute",
    )


def exposed_comm(window: MetricWindow, thresholds: Mapping[str, float], now_s: float) -> Iterator[Condition]:
    """Jobs whose compute waits for communication for much of the step time."""
    comm = shares(window, Name.COMM_SHARE)
    ranks = _ranks(window, Name.EXPOSED_SHARE)
    for job_id, exposed in shares(window, Name.EXPOSED_SHARE).items():
        if exposed > thresholds["exposed_share"]:
            of_all = f"; all communication takes {percent(comm[job_id])}" if job_id in comm else ""
            share = {"share": comm[job_id]} if job_id in comm else {}
            yield condition(
                "exposed_comm",
                (),
                {"job_id": job_id},
                now_s=now_s,
                value=exposed,
                says=f"compute waits for communication {percent(exposed)} of the step time{of_all}",
                numbers=share,
                share=exposed,
                idle_ranks=exposed * ranks[job_id],
                source="metrics",
                metric=Name.EXPOSED_SHARE,
                measured=f"exposed {percent(exposed)}: mean of {_counted(ranks[job_id])} over the steps of a minute",
            )


def gpu_underused(window: MetricWindow, thresholds: Mapping[str, float], now_s: float) -> Iterator[Condition]:
    """Jobs whose GPUs run few kernels while communication is the bottleneck. A mean, because one sample covers only a moment."""
    used = by(window.mean(Name.GPU_UTILIZATION), GPU, max)
    computing = by(where(window.latest(Name.RANK_INFO), "gpu", bool), [*GPU, "job_id", "rank"], max)
    of_ranks = {labels: used[only(labels, GPU)] for labels in computing if only(labels, GPU) in used}
    comm_shares, ranks = shares(window, Name.COMM_SHARE), of_jobs(of_ranks, len)
    for job_id, busy in of_jobs(of_ranks, fmean).items():
        comm = comm_shares.get(job_id, 0.0)
        if busy < thresholds["gpu_utilization"] and comm > thresholds["comm_share"]:
            yield condition(
                "gpu_underused",
                (),
                {"job_id": job_id},
                now_s=now_s,
                value=busy,
                says=f"the GPUs run kernels {percent(busy)} of the time, while communication takes {percent(comm)} of the step time",
                numbers={"share": comm},
                source="gpu",
                metric=Name.GPU_UTILIZATION,
                measured=f"utilization {percent(busy)}: mean of the GPUs of {_counted(ranks[job_id])} over five minutes",
            )


def _shares(window: MetricWindow, thresholds: Mapping[str, float]) -> Iterator[_Shares]:
    exposed, stragglers = shares(window, Name.EXPOSED_SHARE), _stragglers(window)
    # Of the same time as the shares.
    waits = _waits(window, window.own_rate(Name.WAIT_S, SHARE_WINDOW_NS / 1e9))
    here = by(window.latest(Name.COMM_SHARE), ["job_id", "rank"], max)
    ranks = of_jobs(here, len)
    for job_id, comm in shares(window, Name.COMM_SHARE).items():
        late = stragglers.get(job_id, {})
        # The late rank itself does not wait, so it lowers the mean, if it is one of those with a share.
        is_here = {rank: labels_of({"job_id": job_id, "rank": str(rank)}) in here for rank in late}
        costs = [share * (1 - is_here[rank] / ranks[job_id]) for rank, share in late.items()]
        measured = waits.get(job_id)
        # As measured if that explains the share; else it may lack waits for messages, and in groups that span nodes.
        explains = measured is not None and 2 * measured >= comm
        waiting = measured if explains else with_late(costs, measured)
        is_much = waiting is not None and waiting >= thresholds["straggler_share"]
        yield _Shares(
            job_id,
            ranks[job_id],
            comm,
            exposed.get(job_id),
            waiting if is_much else None,
            awaited(late, waiting),
        )


def _counted(ranks: float) -> str:
    return counted(round(ranks), "rank")


def _ranks(window: MetricWindow, name: Name) -> dict[str, float]:
    """Return the number of ranks of each job that have a metric."""
    return of_jobs(by(window.latest(name), ["job_id", "rank"], max), len)


def _waits(window: MetricWindow, rates: Vector) -> dict[str, float]:
    """Return the share of time that ranks wait for late ones, by job: the mean of its live ranks in groups on one node.

    Args:
        rates: of ``Name.WAIT_S``.
    """
    alive = by(window.latest(Name.RANK_INFO), RANK, max)
    waits = {labels: rate for labels, rate in rates.items() if only(labels, RANK) in alive}
    of_groups = by(waits, ["job_id", "rank", "group"], max)
    return of_jobs(by(of_groups, ["job_id", "rank"], math.fsum), fmean)


def _stragglers(window: MetricWindow) -> dict[str, dict[int, float]]:
    """Return the share of time that the others wait for each straggler, by job."""
    found: dict[str, dict[int, float]] = {}
    for labels, share in by(window.latest(Name.STRAGGLER_WAIT), ["job_id", "rank"], max).items():
        of_job, rank = found.setdefault(dict(labels).get("job_id", ""), {}), dict(labels).get("rank", "")
        if rank.isdecimal():
            of_job[int(rank)] = share
    return found


def _over(each: Iterable[Mapping[str, float]], chosen: Callable[[float, float], float]) -> dict[str, float]:
    """Return the least or the largest share by job."""
    found: dict[str, float] = {}
    for by_job in each:
        for job_id, share in by_job.items():
            found[job_id] = chosen(share, found.get(job_id, share))
    return found
