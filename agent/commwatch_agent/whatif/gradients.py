"""The exchanges of gradients in recorded steps, and why a change of them has no answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from commwatch_agent.whatif.model import CannotAnswer, Kind, Model, Op

#: The operations that reduce gradients whole, as DDP does, and sharded, as FSDP does.
WHOLE, SHARDED = "all_reduce", "reduce_scatter"
#: Why a change of gradients of one form has no answer where those of the job have the other form.
NO_BUCKETS = "buckets are DDP's; the job shards its gradients, as FSDP does"
SHARDED_ALREADY = "the job shards its gradients already, as FSDP does"
WHOLE_ALREADY = "the job exchanges whole gradients already, as DDP does"


@dataclass
class Exchange:
    """The exchange of gradients of one group in one step, as all its ranks made it."""

    numbers: list[int]
    ops: list[Op]
    #: Ranks that take part.
    ranks: list[int]

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
    """Return the exchanges of a step by group.

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
    return list(found.values())
