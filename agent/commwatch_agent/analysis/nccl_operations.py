"""Operations by what NCCL chose for them, with NCCL's own times. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from commwatch.wire import events as ev
from commwatch.wire.events import NcclChoice
from commwatch_agent.history.operations import Operation
from commwatch_agent.ingest.jobs import Job
from commwatch_agent.model.bandwidth import bus_factor
from commwatch_agent.model.cells import Ran
from commwatch_agent.model.nccl_views import NcclOperations

#: From this size class on (S above 8 MiB), if each rank's part of S is at least a MiB, LL is far slower than Simple: half of what it
#: sends are flags (NCCL, src/device/prims_ll.h). NCCL itself may choose LL for small parts, where latency counts: large groups.
_LARGE_LOG2, _LARGE_PART_LOG2 = 24, 20
#: Fewer operations are no habit. Another protocol is faster only if busbw with LL is below this part of its own.
_ENOUGH, _FASTER = 10, 0.8
WHY_SLOW = "half of what LL sends are flags, so it reaches at most half of the bandwidth"
_SLOW = f"{WHY_SLOW}; NCCL usually chooses Simple for this size: check NCCL_PROTO, NCCL_ALGO and tuner plugins"


class _Kind(NamedTuple):
    job_id: str
    group_id: str
    group: str
    group_size: int
    op: str
    size_log2: int
    choice: NcclChoice


class SlowChoice(NamedTuple):
    """Large operations for which NCCL chose LL."""

    chosen: NcclOperations
    #: Operations of this group, op and about this size with another protocol and more busbw; ``None``: there are none.
    faster: NcclOperations | None


def nccl_operations(jobs: Iterable[Job]) -> list[NcclOperations]:
    """Return the operations of live jobs that NCCL timed, those with the most time first."""
    found: dict[_Kind, tuple[Ran, set[int]]] = {}
    for job in jobs:
        for totals in job.rank_totals.values():
            for (key, aux), ran in totals.ran.items():
                choice = ev.nccl_choice(ev.BY_NCCL, aux)
                group, op = totals.group(key.group), totals.op_name(key.op)
                kind = _Kind(job.id, group.group_id, group.label, group.size, op, key.size_log2, choice)
                sums, ranks = found.setdefault(kind, (Ran(), set()))
                sums.add(ran.bytes, ran.bus_bytes, ran.duration_ns, ran.queued_ns, ran.count)
                for last, number in ran.last.items():
                    sums.add_ends(last, 0, number)
                sums.apart_us += ran.apart_us
                ranks.add(totals.rank)
    return _views(found)


def nccl_operations_of(operations: Iterable[Operation]) -> list[NcclOperations]:
    """Return those of these operations that NCCL timed, as ``nccl_operations`` does."""
    found: dict[_Kind, tuple[Ran, set[int]]] = {}
    for each in operations:
        if each.timing != ev.TIMING[ev.BY_NCCL] or each.duration_s is None or each.shared_kernel:
            continue
        choice, size = NcclChoice(each.algorithm, each.protocol, each.channels), each.size_bytes or 0
        kind = _Kind(each.job_id, each.group_id, each.group, each.group_size, each.op, ev.size_log2(size), choice)
        sums, ranks = found.setdefault(kind, (Ran(), set()))
        queued_ns = max(0, round((each.start_at - each.launch_at) * 1e9))
        sums.add(size, size * (bus_factor(each.op, each.group_size) or 0), round(each.duration_s * 1e9), queued_ns)
        if each.last_channel is not None:
            sums.add_ends(each.last_channel, round((each.channels_apart_s or 0) * 1e6))
        ranks.add(each.rank)
    return _views(found)


def slow_choices(found: Sequence[NcclOperations]) -> Iterator[SlowChoice]:
    """Yield the remarkable choices, for each group and op that with the most time, unless the measured busbw contradicts the remark."""
    seen = set()
    for chosen in found:
        if not chosen.remark or chosen.count < _ENOUGH or (chosen.group_id, chosen.op) in seen:
            continue
        seen.add((chosen.group_id, chosen.op))
        others = [each for each in found if _is_other_protocol(each, chosen)]
        best = max(others, key=lambda each: each.busbw or 0.0, default=None)
        if best is None or chosen.busbw is None or chosen.busbw < _FASTER * (best.busbw or 0.0):
            yield SlowChoice(chosen, best)


def _is_other_protocol(each: NcclOperations, chosen: NcclOperations) -> bool:
    alike = (each.group_id, each.op) == (chosen.group_id, chosen.op) and abs(each.size_log2 - chosen.size_log2) <= 1
    other = each.protocol not in (None, chosen.protocol)
    return alike and other and each.count >= _ENOUGH and each.busbw is not None


def _views(found: dict[_Kind, tuple[Ran, set[int]]]) -> list[NcclOperations]:
    ordered = sorted(found.items(), key=lambda item: -item[1][0].duration_ns)
    return [_view(kind, sums, ranks) for kind, (sums, ranks) in ordered]


def _view(kind: _Kind, sums: Ran, ranks: set[int]) -> NcclOperations:
    known = sums.duration_ns > 0 and sums.bus_bytes > 0
    ended = sum(sums.last.values())
    last = max(sums.last, key=lambda channel: (sums.last[channel], -channel), default=None)
    return NcclOperations(
        job_id=kind.job_id,
        group_id=kind.group_id,
        group=kind.group,
        op=kind.op,
        size_log2=kind.size_log2,
        **kind.choice._asdict(),
        ranks=sorted(ranks),
        count=sums.count,
        bytes=sums.bytes,
        mean_s=sums.duration_ns / sums.count / 1e9,
        queued_s=sums.queued_ns / sums.count / 1e9,
        busbw=sums.bus_bytes / sums.duration_ns * 1e9 if known else None,
        last_channel=last,
        last_share=None if last is None else sums.last[last] / ended,
        apart_s=sums.apart_us / ended / 1e6 if ended else None,
        remark=_SLOW if _is_slow(kind) else "",
    )


def _is_slow(kind: _Kind) -> bool:
    least = 1 << max(0, kind.size_log2 - 1)  # smaller sizes are of another class
    large = kind.size_log2 >= _LARGE_LOG2 and least >= kind.group_size << _LARGE_PART_LOG2
    return large and kind.choice.protocol == "LL"
