"""Operations by what NCCL chose for them, with NCCL's own times. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from commwatch.collectors.wire import events as ev
from commwatch.collectors.wire.events import NcclChoice
from commwatch.core.cells import GroupInfo, Ran
from commwatch.core.nccl_views import NcclOperations
from commwatch.ingest.jobs import Job

#: From this size class on (S above 8 MiB), LL is far slower than Simple: half of what it sends are flags (NCCL, src/device/prims_ll.h).
_LARGE_LOG2 = 24
_SLOW = (
    "half of what LL sends are flags, so it reaches at most half of the bandwidth; NCCL usually chooses Simple for this size: "
    "check NCCL_PROTO, NCCL_ALGO and tuner plugins"
)


class _Kind(NamedTuple):
    job_id: str
    group: GroupInfo
    op: str
    size_log2: int
    choice: NcclChoice


def nccl_operations(jobs: Iterable[Job]) -> list[NcclOperations]:
    """Return the operations that NCCL timed, those with the most time first."""
    found: dict[_Kind, tuple[Ran, set[int]]] = {}
    for job in jobs:
        for totals in job.rank_totals.values():
            for (key, aux), ran in totals.ran.items():
                choice = ev.nccl_choice(ev.BY_NCCL, aux)
                kind = _Kind(job.id, totals.group(key.group), totals.op_name(key.op), key.size_log2, choice)
                sums, ranks = found.setdefault(kind, (Ran(), set()))
                sums.add(ran.bytes, ran.bus_bytes, ran.duration_ns, ran.queued_ns, ran.count)
                ranks.add(totals.rank)
    ordered = sorted(found.items(), key=lambda item: -item[1][0].duration_ns)
    return [_view(kind, sums, ranks) for kind, (sums, ranks) in ordered]


def _view(kind: _Kind, sums: Ran, ranks: set[int]) -> NcclOperations:
    known = sums.duration_ns > 0 and sums.bus_bytes > 0
    return NcclOperations(
        job_id=kind.job_id,
        group_id=kind.group.group_id,
        group=kind.group.label,
        op=kind.op,
        size_log2=kind.size_log2,
        **kind.choice._asdict(),
        ranks=sorted(ranks),
        count=sums.count,
        bytes=sums.bytes,
        mean_s=sums.duration_ns / sums.count / 1e9,
        queued_s=sums.queued_ns / sums.count / 1e9,
        busbw=sums.bus_bytes / sums.duration_ns * 1e9 if known else None,
        remark=_SLOW if kind.choice.protocol == "LL" and kind.size_log2 >= _LARGE_LOG2 else "",
    )
