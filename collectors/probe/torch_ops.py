"""The operators of the running torch, and how the Python hook reads their arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from commwatch.collectors.wire.c10d_table import C10D_OPS, NOT_COMMUNICATION, Measure
from commwatch.collectors.wire.events import P2P

#: The tensors whose bytes sum up to S, and a factor for the sum (1, or the group's size).
Measured = tuple[Sequence[torch.Tensor], int]


def _flat(value: Any) -> Sequence[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return (value,)
    if not value or isinstance(value[0], torch.Tensor):
        return value  # type: ignore[no-any-return]
    return value[0] if len(value) == 1 else [tensor for tensors in value for tensor in tensors]


def _larger(args: Sequence[Any], n: int) -> Measured:
    return max(_flat(args[0]), _flat(args[1]), key=lambda tensors: sum(t.nbytes for t in tensors)), 1


MEASURES: dict[Measure, Callable[[Sequence[Any], int], Measured]] = {
    Measure.FIRST: lambda args, n: (_flat(args[0]), 1),
    Measure.SECOND: lambda args, n: (_flat(args[1]), 1),
    Measure.GATHERED: lambda args, n: (_flat(args[0]), 1) if args[0] else (_flat(args[1]), n),
    Measure.SCATTERED: lambda args, n: (_flat(args[1]), 1) if args[1] else (_flat(args[0]), n),
    Measure.LARGER: _larger,
}


def device_of(argument: Any) -> torch.device | None:
    """Return the device of the first tensor of an argument, ``None`` for the CPU."""
    while isinstance(argument, (list, tuple)) and argument:
        argument = argument[0]
    return argument.device if isinstance(argument, torch.Tensor) and not argument.is_cpu else None


class C10dOp(NamedTuple):
    """One operator as this version of torch has it; argument places come from its schema."""

    name: str
    op: str
    is_p2p: bool
    measure: Measure
    #: How many arguments there are.
    arguments: int
    group_at: int
    async_at: int | None
    peer_at: int | None
    tag_at: int | None
    #: Runs the kernel below ours, without the GIL: ``redispatch(keyset, *args)``.
    redispatch: Callable[..., Any]


def c10d_ops() -> list[C10dOp]:
    """Return all communication operators of the running torch, unknown ones under their own name."""
    found = []
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        if namespace != "c10d" or "." in name or name in NOT_COMMUNICATION:
            continue
        overload = getattr(torch.ops.c10d, name).default
        at = {argument.name: place for place, argument in enumerate(overload._schema.arguments)}
        if "process_group" not in at:
            continue
        op, measure = C10D_OPS.get(name, (f"c10d::{name}", Measure.NONE))
        peer_at = next((at[a] for a in ("dst", "src", "root_rank") if a in at), None)
        redispatch = overload._handle.redispatch_boxed
        found.append(
            C10dOp(
                name,
                op,
                op in P2P,
                measure,
                len(at),
                at["process_group"],
                at.get("async_op"),
                peer_at,
                at.get("tag"),
                redispatch,
            )
        )
    return found
