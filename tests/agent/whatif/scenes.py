"""Jobs that do not exist: steps of data parallelism whose times are known."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from commwatch.wire import events as ev
from commwatch_agent.model.alpha_beta import Curve
from commwatch_agent.model.cells import GroupInfo
from commwatch_agent.model.views import TraceOperation
from commwatch_agent.whatif.build import StepSpan, build
from commwatch_agent.whatif.model import Do, Kind, Model, Op, Program

MS = 1_000_000


def group(size: int, label: str = "dp") -> GroupInfo:
    """A group of the first ranks."""
    return GroupInfo(f"{label}-id", label, "0", label, tuple(range(size)), size, aligned=True, backend="gloo")


def ddp(
    ranks: int = 2,
    steps: int = 6,
    sizes: Sequence[int] = (1 << 20, 4 << 20, 4 << 20),
    *,
    compute_ms: int = 20,
    tail_ms: int = 5,
    late_ms: int = 0,
    alpha_ms: float = 1.0,
    ms_per_mib: float = 10.0,
    names: Sequence[str] = (),
) -> tuple[list[TraceOperation], dict[int, list[StepSpan]]]:
    """Operations and steps of DDP: each rank computes before each bucket, and waits for all of them before its optimizer.

    Args:
        late_ms: more compute of the last rank in each step.
        alpha_ms: α of the link; a bucket of S bytes among n ranks takes 2(n-1)(α + β·S/n).
        ms_per_mib: β.
        names: what the buckets carry; empty: not known.
    """
    parts: list[TraceOperation] = []
    spans: dict[int, list[StepSpan]] = {rank: [] for rank in range(ranks)}
    begin, of = 10**9, group(ranks)
    for step in range(steps):
        launches = {rank: [begin + (at + 1) * compute_ms * MS for at in range(len(sizes))] for rank in range(ranks)}
        launches[ranks - 1] = [at + late_ms * MS for at in launches[ranks - 1]]
        free, seq = 0, step * len(sizes)
        for at, size in enumerate(sizes):
            ready = max(of_rank[at] for of_rank in launches.values())
            took = 2 * (ranks - 1) * (alpha_ms + ms_per_mib * size / ranks / (1 << 20))
            end = max(ready, free) + int(took * MS)
            parts += [
                TraceOperation(
                    rank,
                    "all_reduce",
                    of,
                    seq + at,
                    -1,
                    0,
                    size,
                    "float32",
                    launch,
                    max(launch, free),
                    end,
                    ev.ASYNC,
                    ev.BY_FUTURE,
                    names[at] if names else None,
                )
                for rank, launch in ((rank, launches[rank][at]) for rank in range(ranks))
            ]
            free = end
        done = free + tail_ms * MS
        for rank, of_rank in spans.items():
            of_rank.append(StepSpan(begin, done, free - launches[rank][-1]))
        begin = done
    return parts, spans


def model(ranks: int = 2, **more: object) -> Model:
    """The model of such a job."""
    parts, spans = ddp(ranks, **more)  # type: ignore[arg-type]
    return build(parts, spans, dict.fromkeys(range(ranks), "host"), ranks)


def hybrid(replicas: int, shards: int = 2, size: int = 4 << 20) -> Model:
    """The model of hybrid sharding: all parameters are gathered in the shard group, gradients are scattered there, and each shard is reduced over
    the replicas; all of it blocks. 1 MiB takes 10 ms on a link.
    """
    ranks, begin, seq = replicas * shards, 10**9, 0
    of_shards = [_group("mesh_dp_shard", tuple(range(at * shards, (at + 1) * shards))) for at in range(replicas)]
    of_replicas = [_group("mesh_dp_replicate", tuple(range(at, ranks, shards))) for at in range(shards)]
    parts: list[TraceOperation] = []
    spans: dict[int, list[StepSpan]] = {rank: [] for rank in range(ranks)}
    for _ in range(6):
        at = begin + 50 * MS
        for op, groups, of_op, n, messages in (
            ("all_gather", of_shards, size, shards, shards - 1),
            ("reduce_scatter", of_shards, size, shards, 2 * (shards - 1)),  # as Gloo makes it
            ("all_reduce", of_replicas, size // shards, replicas, 2 * (replicas - 1)),
        ):
            end = at + int(messages * 10 * of_op / n / (1 << 20) * MS)
            for of in groups:
                about = (op, of, seq, -1, 0, of_op, "float32", at, at, end, 0, ev.BY_WAIT)
                parts += [TraceOperation(rank, *about) for rank in of.ranks or ()]
            at, seq = end + 20 * MS, seq + 1
        for of_rank in spans.values():
            of_rank.append(StepSpan(begin, at, None))
        begin = at
    return build(parts, spans, dict.fromkeys(range(ranks), "host"), ranks)


def _group(label: str, ranks: tuple[int, ...]) -> GroupInfo:
    return GroupInfo(f"{label}-{ranks[0]}", label, "0", label, ranks, len(ranks), aligned=True, backend="gloo")


def large(ranks: int, count: int) -> Model:
    """A step in which ranks launch so many operations, and wait for each fourth of them."""
    ops = {at: Op("dp", "dp", "all_reduce", 1e6, ranks, 1e-3) for at in range(count)}
    program: Program = [
        do
        for at in range(count)
        for do in (Do(Kind.COMPUTE, 1e-3), Do(Kind.LAUNCH, op=at), *((Do(Kind.WAIT, op=at),) if at % 4 == 3 else ()))
    ]
    programs = {rank: [list(program)] for rank in range(ranks)}
    begins = dict.fromkeys(range(ranks), 0.0)
    return Model(ops, programs, begins, {"dp": Curve(0.0, 1.0)}, {}, frozenset(), ranks, (1.0,))


def grid(tensor: int, stages: int, copies: int, size: int = 16 << 20) -> Model:
    """The model of copies of a model that is split over tensor parallel ranks and stages, with 20 ms of compute; all of it blocks. In groups of one
    rank nothing is exchanged.
    """
    ranks, begin = tensor * stages * copies, 10**9
    of_copy = [range(at, at + tensor * stages) for at in range(0, ranks, tensor * stages)]
    tp = [_group("tp", tuple(range(at, at + tensor))) for at in range(0, ranks, tensor)] if tensor > 1 else []
    pp = [_group("pp", tuple(copy[at::tensor])) for copy in of_copy for at in range(tensor)] if stages > 1 else []
    dp = [_group("dp", tuple(copy[at] for copy in of_copy)) for at in range(tensor * stages)] if copies > 1 else []
    parts: list[TraceOperation] = []
    spans: dict[int, list[StepSpan]] = {rank: [] for rank in range(ranks)}
    for seq in range(6):
        at = begin + 20 * MS

        def part(
            op: str, rank: int, of: GroupInfo, peer: int, of_op: int, at: int = at, seq: int = seq
        ) -> TraceOperation:
            return TraceOperation(rank, op, of, seq, peer, 0, of_op, "float32", at, at, at + 5 * MS, 0, ev.BY_WAIT)

        parts += [part("all_reduce", rank, of, -1, 4 << 20) for of in tp for rank in of.ranks or ()]
        for of in pp:
            for one, other in pairwise(of.ranks or ()):
                parts += [
                    part("send", one, of, other, 1 << 20, at + 5 * MS),
                    part("recv", other, of, one, 1 << 20, at + 5 * MS),
                ]
        parts += [part("all_reduce", rank, of, -1, size, at + 10 * MS) for of in dp for rank in of.ranks or ()]
        for of_rank in spans.values():
            of_rank.append(StepSpan(begin, at + 20 * MS, None))
        begin = at + 20 * MS
    return build(parts, spans, dict.fromkeys(range(ranks), "host"), ranks)
