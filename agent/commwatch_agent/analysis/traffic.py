"""Bytes that this node's collectives should have sent to other nodes, and the bytes that its devices counted. Pure.

In a ring every rank sends the bus bytes of an operation to its neighbour (nccl-tests, doc/PERFORMANCE.md). Only bytes on
edges of the ring to another node leave a node. NCCL's ring goes through all ranks of a node before the next node: one edge
per node, whatever the number of ranks. Gloo's ring keeps the order of the group: one edge per neighbour on another node.
Gloo's reduce_scatter is an all_reduce of which each rank keeps its part: twice the bytes. In an all_to_all each rank sends
its part to every rank on other nodes. For messages the peer is known. The bytes of rooted operations (such as broadcast)
depend on the place in a tree: they are listed, not counted. ``tests/e2e/test_wire.py`` checks this on a real network.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import StatisticsError, correlation
from types import MappingProxyType
from typing import NamedTuple

from commwatch.wire import events as ev
from commwatch_agent.analysis.live_ranks import of_this_run
from commwatch_agent.ingest.jobs import Job
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.model.bandwidth import bus_factor
from commwatch_agent.model.cells import GroupInfo
from commwatch_agent.model.host_views import GroupTraffic, TrafficView

#: Most likely the agent runs in another network namespace than the trainer.
NOT_COUNTED = "not counted by any device of this network namespace"
_RING = ("all_reduce", "all_gather", "reduce_scatter")
#: A device with less than this share of the expected bytes does not carry the traffic.
_LEAST_SHARE = 0.05
#: Devices carry the traffic if they sent together between these shares of it, headers and retransmissions included.
_BETWEEN = (0.7, 1.3)
#: The busiest devices that sent this share of it together are enough; the others carry other traffic.
_ENOUGH = 0.95
#: Samples added up before two series are compared, because operations count when they end, but bytes when they are sent.
_TOGETHER = 3
_LEAST_POINTS, _ALIKE = 6, 0.8


class Key(NamedTuple):
    """One rank's part in one group."""

    job_id: str
    group_id: str
    ring: str


class Part(NamedTuple):
    """Bytes since the agent opened the rank's ring, and how many of them leave the node."""

    group: GroupInfo
    #: Of ring operations and all_to_all: S times the bus factor. Of messages to ranks on other nodes: S.
    ring: float
    exchange: float
    messages: float
    #: Shares (0 to 1) of ``ring`` and of ``exchange`` that leave this node.
    ring_share: float
    exchange_share: float
    #: Operations with a size that are not counted.
    left_out: frozenset[str]
    #: Begin of the rank on the monotonic clock.
    began_ns: int

    def sent_since(self, earlier: Part | None, latest: Part) -> float:
        """Return the bytes that should have left this node since an earlier look.

        Args:
            latest: has the shares. Those of an earlier look may lack a rank of this node whose ring was not found yet.
        """
        ring, exchange, messages = (earlier.ring, earlier.exchange, earlier.messages) if earlier else (0.0, 0.0, 0.0)
        collectives = (self.ring - ring) * latest.ring_share + (self.exchange - exchange) * latest.exchange_share
        return max(0.0, collectives) + max(0.0, self.messages - messages)


def parts(jobs: Iterable[Job]) -> dict[Key, Part]:
    """Return the part of every rank in every group that has ranks on other nodes."""
    found = {}
    for job in jobs:
        latest = set(of_this_run(job))
        now = {totals.rank for totals in latest}
        lives: dict[tuple[str, int], set[int]] = {}
        for totals in job.rank_totals.values():
            lives.setdefault(_life(totals), set()).add(totals.rank)
        for uid, totals in job.rank_totals.items():
            for group_id, part in _of_rank(totals, now if totals in latest else lives[_life(totals)]).items():
                found[Key(job.id, group_id, uid)] = part
    return found


def _life(totals: RankTotals) -> tuple[str, int]:
    return totals.run_key, int(totals.identity["restart"])


def _of_rank(totals: RankTotals, here: set[int]) -> dict[str, Part]:
    sums: dict[int, list[float]] = {}
    left_out: dict[int, set[str]] = {}
    for key, cell in totals.sums():
        info, op = totals.group(key.group), totals.op_name(key.op)
        if not _spans(info, here):
            continue
        of = sums.setdefault(key.group, [0.0, 0.0, 0.0])
        size = cell.bytes * (bus_factor(op, info.size) or 0.0)
        if op == "reduce_scatter" and _gloo(info):
            size *= 2
        if op in _RING:
            of[0] += size
        elif op == "all_to_all":
            of[1] += size
        elif op not in ev.P2P and cell.bytes:
            left_out.setdefault(key.group, set()).add(op)
    for (group, code, peer), messages in totals.messages.items():
        if totals.op_name(code) == "send" and group in sums:
            if peer >= 0 and peer not in here:
                sums[group][2] += messages.bytes
            elif peer < 0:
                left_out.setdefault(group, set()).add("send")
    began = int(totals.identity.get("started_ns", 0))
    found = {}
    for group, (ring, exchange, sent) in sums.items():
        info = totals.group(group)
        of_ring, of_exchange = _shares(info, here)
        unknown = frozenset(left_out.get(group, ()))
        found[info.group_id] = Part(info, ring, exchange, sent, of_ring, of_exchange, unknown, began)
    return found


def _spans(group: GroupInfo, here: set[int]) -> bool:
    return group.ranks is not None and any(rank in here for rank in group.ranks) and not here.issuperset(group.ranks)


def _gloo(group: GroupInfo) -> bool:
    """Return whether Gloo runs the operations; if a group has NCCL too, large tensors are assumed to be on GPUs."""
    return group.backend is not None and "gloo" in group.backend and "nccl" not in group.backend


def _shares(group: GroupInfo, here: set[int]) -> tuple[float, float]:
    """Return the shares of a rank's bus bytes that leave the node: in a ring (edges per local rank), in an all_to_all."""
    ranks = group.ranks or ()
    local = sum(rank in here for rank in ranks)
    edges = 1
    if "nccl" not in (group.backend or ""):
        edges = sum(a in here and b not in here for a, b in zip(ranks, (*ranks[1:], *ranks[:1]), strict=True))
    return edges / local, (len(ranks) - local) / (len(ranks) - 1)


# -- over a window ------------------------------------------------------------------------------


class Sample(NamedTuple):
    """Bytes sent by devices, and parts of ranks, at one monotonic time."""

    at_ns: int
    #: Bytes sent, by device.
    sent: Mapping[str, int]
    parts: Mapping[Key, Part]


def traffic(
    samples: Sequence[Sample],
    watched_ns: int,
    job: str | None,
    beside: Iterable[str],
    ports: Mapping[str, str] | None = None,
) -> TrafficView:
    """Return the traffic between the first and the last sample.

    Args:
        watched_ns: when the agent began to watch; what ranks sent before that does not count.
        job: return the groups of this job only; the carriers depend on all jobs.
        beside: devices that count the bytes of other devices again.
        ports: the RDMA port by network device.
    """
    if not samples:
        return TrafficView(0.0, [], 0.0, {}, None, "no samples yet")
    first, last = samples[0], samples[-1]
    steps = [_expected(before, after, watched_ns, last.parts) for before, after in pairwise(samples)]
    names = [name for name in last.sent if name in first.sent and name not in set(beside)]
    sent = {name: last.sent[name] - first.sent[name] for name in names if last.sent[name] >= first.sent[name]}
    series = {
        name: [max(0.0, after.sent.get(name, 0) - before.sent.get(name, 0)) for before, after in pairwise(samples)]
        for name in sent
    }
    carried, why = carriers(sent, series, [sum(step.values()) for step in steps], ports or {})
    groups = _groups(steps, last, job)
    return TrafficView(
        seconds=(last.at_ns - first.at_ns) / 1e9,
        groups=groups,
        expected_sent_bytes=sum(group.expected_sent_bytes for group in groups),
        sent_bytes=sent,
        carriers=carried,
        says=why,
    )


def _expected(before: Sample, after: Sample, watched_ns: int, latest: Mapping[Key, Part]) -> dict[Key, float]:
    """Return the bytes that should have been sent between two samples, with the shares of the ``latest``.

    A group that the latest lacks turned out to be within the node.
    """
    found = {}
    for key, part in after.parts.items():
        known = before.parts.get(key)
        if key in latest and (known is not None or part.began_ns >= watched_ns):
            found[key] = part.sent_since(known, latest[key])
    return found


def _groups(steps: list[dict[Key, float]], last: Sample, job: str | None) -> list[GroupTraffic]:
    sums: dict[tuple[str, str], float] = {}
    for step in steps:
        for key, size in step.items():
            at = (key.job_id, key.group_id)
            sums[at] = sums.get(at, 0.0) + size
    about: dict[tuple[str, str], tuple[str, set[str]]] = {}
    for key, part in last.parts.items():
        about.setdefault((key.job_id, key.group_id), (part.group.label, set()))[1].update(part.left_out)
    return [
        GroupTraffic(job_id, about[job_id, group_id][0], group_id, size, sorted(about[job_id, group_id][1]))
        for (job_id, group_id), size in sums.items()
        if job in (None, job_id) and (job_id, group_id) in about
    ]


def carriers(
    sent: Mapping[str, float],
    series: Mapping[str, Sequence[float]],
    expected: Sequence[float],
    ports: Mapping[str, str] = MappingProxyType({}),
) -> tuple[list[str] | None, str | None]:
    """Return the devices that carry the expected bytes, the busiest first; or ``None`` and the reason.

    Their bytes add up to the expected bytes or, if there is other traffic, rise and fall with them.

    Args:
        sent: bytes by device over the whole window.
        series: bytes by device and sample.
        expected: bytes that should have been sent, by sample.
        ports: the RDMA port by network device. The device may count the port's bytes again, or only bytes that the port does not.
    """
    total = sum(expected)
    if total <= 0:
        return None, None
    busy = sorted((name for name in sent if sent[name] >= _LEAST_SHARE * total), key=lambda name: -sent[name])
    if _adds_up(busy, sent, total):
        return _enough(busy, sent, total), None
    busy = [name for name in busy if ports.get(name) not in busy]
    if _adds_up(busy, sent, total):
        return _enough(busy, sent, total), None
    alike = [name for name in busy if _alike(series[name], expected)]
    if alike and sum(sent[name] for name in alike) >= _BETWEEN[0] * total:
        return alike, None
    if not busy:
        return None, NOT_COUNTED
    return None, "no device's bytes match the expected bytes, in total or over time"


def _adds_up(names: list[str], sent: Mapping[str, float], total: float) -> bool:
    return bool(names) and _BETWEEN[0] * total <= sum(sent[name] for name in names) <= _BETWEEN[1] * total


def _enough(names: list[str], sent: Mapping[str, float], total: float) -> list[str]:
    """Return the first of the names that together sent enough; ``names`` has the busiest first."""
    sums = accumulate(sent[name] for name in names)
    needed = next((at for at, so_far in enumerate(sums, start=1) if so_far >= _ENOUGH * total), len(names))
    return names[:needed]


def _alike(one: Sequence[float], other: Sequence[float]) -> bool:
    pairs = [
        [sum(series[at : at + _TOGETHER]) for at in range(0, len(series) - _TOGETHER + 1, _TOGETHER)]
        for series in (one, other)
    ]
    if len(pairs[0]) < _LEAST_POINTS:
        return False
    try:
        return correlation(*pairs) >= _ALIKE
    except StatisticsError:  # one of them never changes
        return False
