"""Exports the totals in memory as Prometheus families."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import NamedTuple

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from commwatch import __version__
from commwatch.wire import events as ev
from commwatch.wire.modes import FULL, RECORDED
from commwatch_agent.analysis import live_ranks
from commwatch_agent.analysis.pipelines import directions
from commwatch_agent.ingest.jobs import Job, JobTable
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.model.cells import DURATION_BOUNDS_NS, OTHER, SIZE_BOUNDS_LOG2, Cell, Counted
from commwatch_agent.model.views import ITERATIONS
from commwatch_agent.prometheus.families import Families, Labels
from commwatch_agent.prometheus.metrics import NAMED
from commwatch_agent.reference.efficiency import Find, Yardstick, by_kind, conclusive, finder
from commwatch_agent.reference.references import References
from commwatch_collectors.node.gpu import GpuPlace
from commwatch_collectors.registry import Reading

#: Most distinct group labels of one job; further ones share ``other``.
MOST_GROUPS = 32
#: Most groups of one rank that have series of their own, in the order of their first operation.
MOST_GROUP_IDS = 64
_EFFICIENCY_NS = 5_000_000_000


class _Sums(NamedTuple):
    """Cells of one job, added up."""

    by_rank: dict[Labels, Cell]  # rank, group, op
    by_op: dict[Labels, Cell]  # group, op
    sizes: dict[Labels, list[int]]
    lateness_ns: dict[Labels, int]  # rank, group


class Exporter(Collector):
    """Reads the aggregate once per scrape; the series of forgotten jobs disappear.

    Args:
        now_ns: the monotonic clock in ns.
        readings: returns the node's collectors as (name, readings or ``None`` if it failed).
        references: expected durations of operations.
        gpu_of: returns the index of the GPU that a rank computes on, as a label.
        labels: additional labels of every ``job_info``.
        owner_of: returns who runs a job, and its script; empty: not known, or not to be named.
        node: this node's name; empty: not to be named.
    """

    def __init__(
        self,
        aggregate: JobTable,
        lock: threading.RLock,
        now_ns: Callable[[], int],
        readings: Callable[[], Iterable[tuple[str, list[Reading] | None]]],
        *,
        references: References | None = None,
        gpu_of: Callable[[GpuPlace | None], str] = lambda where: "",
        labels: Mapping[str, str] | None = None,
        owner_of: Callable[[Job], tuple[str, str]] = lambda job: ("", ""),
        node: str = "",
    ) -> None:
        self._of_jobs, self._owner_of, self._node = labels or {}, owner_of, node
        self._gpu_of = gpu_of
        self._aggregate, self._lock, self._now_ns, self._readings = aggregate, lock, now_ns, readings
        self._references = references
        self._efficiency: dict[tuple[str, str, str, str], float] = {}
        self._efficiency_at: int | None = None
        self._labels: dict[str, dict[str, str]] = {}
        #: By job and rank: number of groups without series of their own.
        self._beyond: dict[str, dict[str, int]] = {}
        self._dropped = 0

    def relabel(self, labels: Mapping[str, str], node: str) -> None:
        """Replace the additional labels of every ``job_info``, and the node's name."""
        with self._lock:
            self._of_jobs, self._node = labels, node

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that the registry does not collect at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all families that have samples."""
        due = self._efficiency_at is None or self._now_ns() - self._efficiency_at > _EFFICIENCY_NS
        find = conclusive(finder(self._references)) if due else None  # outside the lock: it may read files
        with self._lock:
            families = Families({"job_info": tuple(name for name in self._of_jobs if name not in NAMED)})
            for job in self._aggregate.jobs.values():
                self._job(families, job)
            self._efficiencies(families, find)
            _ups(families, self._aggregate.jobs.values())
            self._labels = {job: labels for job, labels in self._labels.items() if job in self._aggregate.jobs}
            self._beyond = {job: ranks for job, ranks in self._beyond.items() if job in self._aggregate.jobs}
        for name, readings in self._readings():
            families.add("collector_up", (name,), float(readings is not None))
            for reading in readings or ():
                families.add(reading.metric, reading.labels, reading.value)
        families.add("build_info", (__version__,), 1)
        families.add("series_dropped_total", (), self._dropped)
        families.add("memory_refused_total", (), self._aggregate.refused)
        yield from families.values()

    def _group_label(self, job: str, label: str) -> str:
        known = self._labels.setdefault(job, {})
        if label not in known:
            known[label] = label if len(known) < MOST_GROUPS else OTHER
            self._dropped += known[label] != label
        return known[label]

    def _count_beyond(self, job: str, rank: str, beyond: int) -> None:
        known = self._beyond.setdefault(job, {})
        self._dropped += max(0, beyond - known.get(rank, 0))
        known[rank] = max(beyond, known.get(rank, 0))

    def _efficiencies(self, families: Families, find: Find | None) -> None:
        """Add the efficiency of the last minute; compute it only with ``find``, because that costs more than the rest of a scrape."""
        if find is not None:
            self._efficiency_at = now = self._now_ns()
            rank_totals = [
                (job.id, totals) for job in self._aggregate.jobs.values() for totals in job.rank_totals.values()
            ]
            known = (totals.counted(job, key, cell) for job, totals in rank_totals for key, cell in totals.cells())
            yardstick = Yardstick(known, find)
            kinds: dict[tuple[str, str, str], list[Counted]] = {}
            for job, totals in rank_totals:
                for _, key, cell in totals.lately(now):
                    one = totals.counted(job, key, cell)
                    kinds.setdefault((job, one.group, one.op), []).append(one)
            self._efficiency = {
                (*kind, reference): value
                for kind, lately in kinds.items()
                for reference, value in by_kind(yardstick.efficiencies(lately)).items()
            }
        for (job, group, op, reference), value in self._efficiency.items():
            label = self._group_label(job, group)
            if label != OTHER:
                families.add("collective_efficiency_ratio", (job, label, op, reference), value)

    # -- one job ------------------------------------------------------------------------------

    def _job(self, families: Families, job: Job) -> None:
        sums = self._sum(job)
        _operations(families, job.id, sums)
        latest = max(live_ranks.of_this_run(job), key=live_ranks.order)
        size, restart = (str(latest.identity[name]) for name in ("world_size", "restart"))
        named = dict(zip(NAMED, (*self._owner_of(job), self._node), strict=True)) | dict(self._of_jobs)
        families.add("job_info", (job.id, size, restart, *named.values()), 1)
        if checks := sum(join.checks for join in job.replicas.values()):
            families.count("replica_checks_total", (job.id,), checks)
        if compared := sum(checks.compared for checks in job.checked.values()):
            families.count("collective_checks_total", (job.id,), compared)
        # A counter covers all lives of a rank, or is absent: without one of them it would go back, or stand still.
        lives = [(totals.rank, totals.steps.totals) for totals in job.rank_totals.values() if totals.steps.totals.count]
        unknown = {rank for rank, steps in lives if steps.comm_ns is None}
        not_exposed = unknown.union(rank for rank, steps in lives if steps.exposed_ns is None)
        for totals in job.rank_totals.values():
            families.count("events_total", (job.id,), totals.read)
            families.count("events_dropped_total", (job.id,), totals.lost + totals.dropped + totals.nonsense)
            families.count("probe_seconds_total", (job.id, str(totals.rank)), totals.probe_ns / 1e9)
            for (group, direction), messages in directions(totals).items():
                labels = (job.id, str(totals.rank), self._group_label(job.id, group), direction)
                families.count("pipeline_wait_seconds_total", labels, messages.waited_us / 1e6)
            known = totals.rank not in unknown, totals.rank not in not_exposed
            _steps(families, job.id, totals, partial(self._group_label, job.id), self._now_ns(), known=known)
            _choices(families, job.id, totals)
        self._present(families, job)

    def _sum(self, job: Job) -> _Sums:
        sums = _Sums(defaultdict(Cell), defaultdict(Cell), {}, defaultdict(int))
        for totals in job.rank_totals.values():
            rank = str(totals.rank)
            for key, cell in totals.sums():
                group, op = self._group_label(job.id, totals.group(key.group).label), totals.op_name(key.op)
                sums.by_rank[rank, group, op].add_sums(cell)
                if key.size_log2 >= 0:
                    at = bisect_left(SIZE_BOUNDS_LOG2, key.size_log2)
                    sums.sizes.setdefault((group, op), [0] * (len(SIZE_BOUNDS_LOG2) + 1))[at] += cell.count
            for small_id, late_ns in totals.lateness_ns.items():
                sums.lateness_ns[rank, self._group_label(job.id, totals.group(small_id).label)] += late_ns
        for (_, group, op), cell in sums.by_rank.items():
            sums.by_op[group, op].add_sums(cell)
        return sums

    def _present(self, families: Families, job: Job) -> None:
        """Add what only live ranks have: infos, operations in flight, durations to compare within one group."""
        now = self._now_ns()
        for totals in job.rank_totals.values():
            if not totals.alive:
                continue
            rank, local_rank = str(totals.rank), totals.identity.get("local_rank")
            place = (self._gpu_of(totals.gpu), "" if local_rank is None else str(local_rank))
            families.add("rank_info", (job.id, rank, *place, str(totals.identity.get("hook", ""))), 1)
            families.add("probe_recorded_ratio", (job.id, rank), RECORDED[totals.mode])
            oldest: dict[int, int] = {}
            for record in totals.pending():
                since = record.start_ns if totals.op_name(record.op) in ev.P2P else record.begun_ns
                oldest[record.group] = min(since, oldest.get(record.group, since))
            self._count_beyond(job.id, rank, totals.groups_announced - MOST_GROUP_IDS)
            for small_id, group in islice(totals.groups.items(), MOST_GROUP_IDS):
                label = self._group_label(job.id, group.label)
                if label == OTHER:
                    continue
                labels = (job.id, rank, label, group.group_id)
                families.add("group_info", (*labels, str(group.size)), 1)
                if small_id in oldest:
                    families.add("collective_in_flight_seconds", labels, max(0, now - oldest[small_id]) / 1e9)
                elif totals.mode == FULL:  # otherwise an operation that is only counted may be in flight
                    families.add("collective_in_flight_seconds", labels, 0.0)
                compared = totals.compared.get(small_id)
                if compared is not None and compared.count:
                    families.count("symmetric_collectives_total", labels, compared.count)
                    families.count("symmetric_collective_seconds_total", labels, compared.duration_ns / 1e9)
                if small_id in totals.last_seq:
                    families.add("collective_last_seq", labels, totals.last_seq[small_id])


def _operations(families: Families, job: str, sums: _Sums) -> None:
    for (rank, group, op), cell in sums.by_rank.items():
        labels = (job, rank, group, op)
        families.add("collectives_total", labels, cell.count)
        if (group, op) in sums.sizes:
            families.add("collective_bytes_total", labels, cell.bytes)
        if cell.bus_bytes:
            families.add("collective_bus_bytes_total", labels, cell.bus_bytes)
        if cell.busy_ns:
            families.add("collective_seconds_total", labels, cell.busy_ns / 1e9)
        if cell.joined:
            families.count("collective_wait_seconds_total", (job, rank, group), cell.wait_ns / 1e9)
            families.count("rank_lateness_seconds_total", (job, rank, group), 0.0)
        if op in ev.P2P and cell.p2p_wait_ns:
            families.count("p2p_wait_seconds_total", (job, rank, group), cell.p2p_wait_ns / 1e9)
    for (rank, group), late_ns in sums.lateness_ns.items():
        families.count("rank_lateness_seconds_total", (job, rank, group), late_ns / 1e9)
    for (group, op), cell in sums.by_op.items():
        if cell.duration_ns:
            families.histogram(
                "collective_duration_seconds",
                (job, group, op),
                [b / 1e9 for b in DURATION_BOUNDS_NS],
                cell.durations,
                cell.duration_ns / 1e9,
            )
    for (group, op), counts in sums.sizes.items():
        bounds = [float(1 << b) for b in SIZE_BOUNDS_LOG2]
        families.histogram("collective_size_bytes", (job, group, op), bounds, counts, sums.by_op[group, op].bytes)


def _steps(
    families: Families,
    job: str,
    totals: RankTotals,
    label: Callable[[str], str],
    now_ns: int,
    *,
    known: tuple[bool, bool],
) -> None:
    """Add the steps of one life of a rank; ``known``: whether communication time, and exposed time, are known for all its lives."""
    steps, periods, labels = totals.steps.totals, totals.steps.periods, (job, str(totals.rank))
    source = totals.steps.exposed_source or ""
    if periods.count:
        families.count("periods_total", labels, periods.count)
        families.count("period_seconds_total", labels, periods.duration_ns / 1e9)
        families.count("period_comm_seconds_total", labels, periods.comm_ns / 1e9)
        families.count("period_comm_square_seconds_total", labels, periods.comm_squares)
    if not steps.count:
        return
    families.count("steps_total", labels, steps.count)
    if totals.alive and totals.steps.source is not None:
        families.add("steps_info", (*labels, totals.steps.source), 1)
    families.count("long_steps_total", labels, steps.long)
    families.count("step_seconds_total", labels, steps.duration_ns / 1e9)
    if known[0] and steps.comm_ns is not None:
        families.count("step_comm_seconds_total", labels, steps.comm_ns / 1e9)
        if known[1] and steps.exposed_ns is not None:
            families.count("step_exposed_comm_seconds_total", (*labels, source), steps.exposed_ns / 1e9)
        for group, comm_ns in steps.groups_ns.items():
            families.count("step_group_comm_seconds_total", (*labels, label(group)), comm_ns / 1e9)
    if steps.p2p_wait_ns is not None:
        families.count("step_p2p_wait_seconds_total", labels, steps.p2p_wait_ns / 1e9)
    shares = steps.shares(now_ns) if totals.alive and not _may_be_idle(totals, now_ns) else None
    if shares is not None:
        families.add("comm_share_ratio", labels, shares[0])
        if shares[1] is not None:
            families.add("exposed_comm_share_ratio", (*labels, source), shares[1])


def _may_be_idle(totals: RankTotals, now_ns: int) -> bool:
    """Return whether communication may only be waiting for something to do, as in a server without requests: no reason for an alert.

    In iterations, that is: at least half of it was waiting in the last minute, or may have been.
    """
    if totals.steps.source != ITERATIONS:
        return False
    busy_ns = waited_ns = 0
    for _, key, cell in totals.lately(now_ns):
        op = totals.op_name(key.op)
        busy_ns += cell.p2p_wait_ns if op in ev.P2P else cell.duration_ns
        waited_ns += cell.p2p_wait_ns if op in ev.P2P else cell.wait_ns if cell.joined else cell.duration_ns
    return 2 * waited_ns >= busy_ns


def _choices(families: Families, job: str, totals: RankTotals) -> None:
    for (_, aux), ran in totals.ran.items():
        choice = ev.nccl_choice(ev.BY_NCCL, aux)
        if choice.algorithm is None or choice.protocol is None:  # as for messages
            continue
        labels = (job, str(totals.rank), choice.algorithm, choice.protocol)
        families.count("nccl_operations_total", labels, ran.count)
        families.count("nccl_operation_seconds_total", labels, ran.duration_ns / 1e9)
        if ran.bus_bytes:
            families.count("nccl_operation_bus_bytes_total", labels, ran.bus_bytes)


def _ups(families: Families, jobs: Iterable[Job]) -> None:
    for job in jobs:
        for totals in live_ranks.of_this_run(job):
            if totals.alive or not totals.closed_properly:
                families.add("rank_up", (job.id, str(totals.rank)), float(totals.alive))
