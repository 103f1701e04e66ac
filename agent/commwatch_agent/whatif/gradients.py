"""The exchanges of gradients in recorded steps, and why a change of them has no answer. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from commwatch_agent.whatif.model import CannotAnswer, Kind, Model, Op

#: The operations that reduce gradients whole, as DDP does, and sharded, as FSDP does.
WHOLE, SHARDED = "all_reduce", "reduce_scatter"
#: Why a change of gradients of one form has no answer where those of the job have the other form.
NO_BUCKETS = "buckets are DDP's; the job shards its gradients, as FSDP does"
SHARDED_ALREADY = "the job shards its gradients already, as FSDP does"
WHOLE_ALREADY = "the job exchanges whole gradients already, as DDP does"


#: Begins the name of the bucket that DDP reduces first in each backward pass.
_FIRST_BUCKET = "bucket 0:"
#: How large DDP makes buckets by default, in bytes, and the first one.
_DEFAULT_BYTES, _DEFAULT_FIRST_BYTES = 25 << 20, 1 << 20


@dataclass
class Exchange:
    """The exchange of gradients of one group in one backward pass, as all its ranks made it."""

    numbers: list[int]
    ops: list[Op]
    #: Ranks that take part.
    ranks: list[int]
    #: Numbers of the operations of the pass before it in the step.
    after: list[int] = field(default_factory=list)

    @property
    def size_bytes(self) -> float:
        return sum(op.size_bytes for op in self.ops)

    @property
    def ends_bytes(self) -> list[float]:
        """Return the bytes exchanged up to each operation."""
        return list(accumulate(op.size_bytes for op in self.ops))


def exchanges_of(
    model: Model, step: int, what: str, kinds: Sequence[str] = (WHOLE, SHARDED), others: str = ""
) -> list[Exchange]:
    """Return the exchanges of a step by group and backward pass, as far as the names of buckets and units show the passes.

    Args:
        what: the change, for the text of the error.
        others: what to say there of a job that exchanges gradients, but not by these operations.

    Raises:
        CannotAnswer: no step has any.
    """
    found: dict[str, Exchange] = {}
    for rank, steps in model.programs.items():
        by_group: dict[str, list[int]] = {}
        for do in steps[step]:
            op = model.ops[do.op] if do.kind == Kind.LAUNCH else None
            if op is not None and op.carries == "gradients" and op.op in kinds:
                by_group.setdefault(op.group_id, []).append(do.op)
        for group_id, numbers in by_group.items():
            of_group = found.setdefault(group_id, Exchange(numbers, [model.ops[number] for number in numbers], []))
            of_group.ranks.append(rank)
            if of_group.numbers != numbers:
                raise CannotAnswer(f"{what}: the ranks of a group do not exchange the same gradients in each step")
    if not found and step == 0:
        is_other = others and any(op.carries == "gradients" for op in model.ops.values())
        raise CannotAnswer(
            f"{what}: {others if is_other else 'the recorded steps have no exchange of gradients that it could change'}"
        )
    return [each for whole in found.values() for each in _by_pass(model, whole)]


def _by_pass(model: Model, whole: Exchange) -> list[Exchange]:
    """Return the parts of an exchange of a step that belong to one backward pass each."""
    passes: list[list[int]] = [[]]
    names: set[str] = set()
    for number in whole.numbers:
        name = model.ops[number].part
        if name is not None and names and (name in names or name.startswith(_FIRST_BUCKET)):
            passes.append([])
            names = set()
        passes[-1].append(number)
        names |= set() if name is None else {name}
    return [
        Exchange(numbers, [model.ops[number] for number in numbers], whole.ranks, before)
        for before, numbers in zip([[], *passes], passes, strict=False)
    ]


def has_buckets_of(ops: Sequence[Op], bucket_bytes: float) -> bool:
    """Return whether DDP makes these buckets of a backward pass with a ``bucket_cap_mb`` of so many bytes.

    DDP ends a bucket with the gradient that makes it large enough, and the last one has what is left.
    """
    if len(ops) < 2 or not (ops[0].part or "").startswith(_FIRST_BUCKET):
        return False
    first, *middle, last = ops
    is_default = bucket_bytes == _DEFAULT_BYTES
    return (
        (_is_full(first, bucket_bytes) or (is_default and _is_full(first, _DEFAULT_FIRST_BYTES)))
        and all(_is_full(op, bucket_bytes) for op in middle)
        and (bool(middle) or last.size_bytes <= bucket_bytes or _is_full(last, bucket_bytes))
    )


def _is_full(bucket: Op, least_bytes: float) -> bool:
    """Return whether it is as large as it has to be, and no larger than its last gradient explains: gradients are not divided."""
    is_single = bucket.part is not None and not any(mark in bucket.part for mark in (", ", " … "))
    return bucket.size_bytes >= least_bytes and (is_single or bucket.size_bytes < 2 * least_bytes)


def is_repeated(model: Model, numbers: Iterable[int]) -> bool:
    """Return whether operations of one step exchange a bucket or unit more than once."""
    parts = [(op.group_id, op.op, op.part) for op in map(model.ops.__getitem__, numbers) if op.part is not None]
    return len(parts) > len(set(parts))
