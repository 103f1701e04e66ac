"""The operators of PyTorch's ``c10d`` namespace: which operation each one is, and how to read its arguments.

Sizes follow nccl-tests (DESIGN §4): S is one rank's buffer for all_reduce, broadcast, reduce, send, recv; the
gathered size for all_gather and gather; the size before the split for reduce_scatter and scatter; the larger of
input and output for all_to_all. A coalesced operator is one operation whose S is the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from commwatch.collectors.events import P2P

#: The tensors S is the sum of, and the factor they are to be multiplied with (1, or the group's size).
Measured = tuple[Sequence[torch.Tensor], int]
Measure = Callable[[Sequence[Any], int], Measured]


def _first_list(args: Sequence[Any], n: int) -> Measured:
    return args[0], 1


def _first_tensor(args: Sequence[Any], n: int) -> Measured:
    return (args[0],), 1


def _second_tensor(args: Sequence[Any], n: int) -> Measured:
    return (args[1],), 1


def _second_list(args: Sequence[Any], n: int) -> Measured:
    return args[1], 1


def _flat(lists: Sequence[Sequence[torch.Tensor]]) -> Sequence[torch.Tensor]:
    return lists[0] if len(lists) == 1 else [tensor for tensors in lists for tensor in tensors]


def _gathered_lists(args: Sequence[Any], n: int) -> Measured:
    return _flat(args[0]), 1


def _scattered_lists(args: Sequence[Any], n: int) -> Measured:
    return _flat(args[1]), 1


def _gather(args: Sequence[Any], n: int) -> Measured:
    return (_flat(args[0]), 1) if args[0] else (args[1], n)


def _scatter(args: Sequence[Any], n: int) -> Measured:
    return (_flat(args[1]), 1) if args[1] else (args[0], n)


def _larger_list(args: Sequence[Any], n: int) -> Measured:
    return max(args[0], args[1], key=lambda tensors: sum(t.nbytes for t in tensors)), 1


def _larger_tensor(args: Sequence[Any], n: int) -> Measured:
    return ((args[0],) if args[0].nbytes >= args[1].nbytes else (args[1],)), 1


#: c10d operator -> canonical op and where its bytes are; ``None``: an operation without a size.
C10D_OPS: dict[str, tuple[str, Measure | None]] = {
    "allreduce_": ("all_reduce", _first_list),
    "allreduce_coalesced_": ("all_reduce", _first_list),
    "allgather_": ("all_gather", _gathered_lists),
    "_allgather_base_": ("all_gather", _first_tensor),
    "allgather_coalesced_": ("all_gather", _gathered_lists),
    "allgather_into_tensor_coalesced_": ("all_gather", _first_list),
    "reduce_scatter_": ("reduce_scatter", _scattered_lists),
    "_reduce_scatter_base_": ("reduce_scatter", _second_tensor),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", _second_list),
    "alltoall_": ("all_to_all", _larger_list),
    "alltoall_base_": ("all_to_all", _larger_tensor),
    "broadcast_": ("broadcast", _first_list),
    "reduce_": ("reduce", _first_list),
    "gather_": ("gather", _gather),
    "scatter_": ("scatter", _scatter),
    "send": ("send", _first_list),
    "recv_": ("recv", _first_list),
    "recv_any_source_": ("recv", _first_list),
    "barrier": ("barrier", None),
    "monitored_barrier_": ("barrier", None),
}
#: Operators of the namespace that are no communication.
NOT_COMMUNICATION = frozenset({"check_for_nan"})


class C10dOp(NamedTuple):
    """One operator as this version of torch has it; argument places come from its schema."""

    name: str
    op: str
    is_p2p: bool
    measure: Measure | None
    group_at: int
    async_at: int | None
    peer_at: int | None
    tag_at: int | None
    #: Runs the kernel below ours, without the GIL: ``redispatch(keyset, *args)``.
    redispatch: Callable[..., Any]


def c10d_ops() -> list[C10dOp]:
    """All communication operators of the running torch, unknown ones under their own name."""
    found = []
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        if namespace != "c10d" or "." in name or name in NOT_COMMUNICATION:
            continue
        overload = getattr(torch.ops.c10d, name).default
        at = {argument.name: place for place, argument in enumerate(overload._schema.arguments)}
        if "process_group" not in at:
            continue
        op, measure = C10D_OPS.get(name, (f"c10d::{name}", None))
        peer_at = next((at[a] for a in ("dst", "src", "root_rank") if a in at), None)
        redispatch = overload._handle.redispatch_boxed
        found.append(
            C10dOp(
                name,
                op,
                op in P2P,
                measure,
                at["process_group"],
                at.get("async_op"),
                peer_at,
                at.get("tag"),
                redispatch,
            )
        )
    return found
