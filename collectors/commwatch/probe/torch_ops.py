"""The operators of the running torch, and how the Python hook reads their arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from commwatch.probe.torch_groups import Group
from commwatch.wire import events as ev
from commwatch.wire.c10d_table import C10D_OPS, NOT_COMMUNICATION, Measure
from commwatch.wire.splits import MOST_MEMBERS, Splits

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


def _gathered(args: Sequence[Any], n: int) -> Measured:
    outputs = _flat(args[0])
    return (outputs, 1) if any(tensor.numel() for tensor in outputs) else (_flat(args[1]), n)


MEASURES: dict[Measure, Callable[[Sequence[Any], int], Measured]] = {
    Measure.FIRST: lambda args, n: (_flat(args[0]), 1),
    Measure.SECOND: lambda args, n: (_flat(args[1]), 1),
    Measure.GATHERED: _gathered,
    Measure.SCATTERED: lambda args, n: (_flat(args[1]), 1) if args[1] else (_flat(args[0]), n),
    Measure.LARGER: _larger,
}


def _first(argument: Any) -> Any:
    while isinstance(argument, (list, tuple)) and argument:
        argument = argument[0]
    return argument


def splits_of(args: Sequence[Any], group_at: int, members: int) -> Splits | None:
    """Return the bytes that a rank sends to each rank of its group in an all_to_all, and expects from each.

    ``None``: the group is too large, or the call is not valid, or its tensors are sparse.
    """
    if members > MOST_MEMBERS:
        return None
    if members > MOST_MEMBERS:
        return None
    if isinstance(args[0], torch.Tensor):
        expects = _parts(args[0], args[group_at + 1], members)
        sends = _parts(args[1], args[group_at + 2], members)
    else:
        expects, sends = _sizes(args[0]), _sizes(args[1])
    return Splits(sends, expects) if len(sends) == len(expects) == members else None


def _sizes(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the bytes of tensors; without those of sparse ones."""
    return tuple([tensor.nbytes for tensor in tensors if tensor.layout is torch.strided])


def _parts(rows: torch.Tensor, splits: Sequence[int], members: int) -> tuple[int, ...]:
    """Return the bytes of so many rows each; of equal parts if there are no ``splits``; none of a sparse tensor."""
    if rows.layout is not torch.strided:
        return ()
    number = rows.shape[0] if rows.dim() else 1
    row = rows.nbytes // number if number else 0
    return tuple([row * part for part in splits]) or (rows.nbytes // members,) * members


def device_of(argument: Any) -> torch.device | None:
    """Return the device of the first tensor of an argument, ``None`` for the CPU."""
    first = _first(argument)
    return first.device if isinstance(first, torch.Tensor) and not first.is_cpu else None


def has_no_data(args: Sequence[Any]) -> bool:
    """Return whether an operation's first tensor is on the device ``meta``, or of ``FakeTensorMode``: nothing is communicated."""
    for argument in args[:2]:  # the outputs may be empty
        first = _first(argument)
        if isinstance(first, torch.Tensor):
            return first.is_meta
    return False


class C10dOp(NamedTuple):
    """One operator as this version of torch has it; argument places come from its schema."""

    name: str
    op: str
    is_p2p: bool
    measure: Measure
    #: How many arguments there are.
    arguments: int
    group_at: int
    #: ``None``: the arguments do not state whether the call blocks, as for most operators before torch 2.8.
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
                op in ev.P2P,
                measure,
                len(at),
                at["process_group"],
                next((at[a] for a in ("async_op", "asyncOp") if a in at), None),  # asyncOp: before torch 2.8
                peer_at,
                at.get("tag"),
                redispatch,
            )
        )
    return found


class _Names(Protocol):
    def dtype_code(self, name: str) -> int:
        """Return the number of a dtype in the ring."""


class Arguments:
    """Reads what is recorded of an operation from its arguments.

    Args:
        names: assigns numbers to dtypes.
    """

    def __init__(self, names: _Names) -> None:
        self._names = names
        self._dtypes: dict[torch.dtype, int] = {}

    def about(self, op: C10dOp, args: Sequence[Any], group: Group) -> tuple[int, int, int, torch.device | None]:
        """Return flags, size in bytes and dtype's number of an operation, and its device, ``None`` for the CPU."""
        flags, async_at = 0 if group.aligned else ev.UNALIGNED, op.async_at
        # Trailing arguments that have their default (async_op=True) do not arrive; p2p has no such argument.
        if async_at is not None and (len(args) <= async_at or args[async_at]):
            flags |= ev.ASYNC
        if op.measure is Measure.NONE:
            device = device_of(args[0])
            return flags | ev.NO_SIZE | (ev.ON_DEVICE if device else 0), 0, ev.NO_DTYPE, device
        tensors, factor = MEASURES[op.measure](args, group.size)
        if not tensors:
            return flags, 0, ev.NO_DTYPE, None
        first = tensors[0]
        dtype = self._dtypes.get(first.dtype) or self._add(first.dtype)
        device = None if first.is_cpu else first.device
        if device is not None:
            flags |= ev.ON_DEVICE
        single = len(tensors) == 1
        strided = first.layout is torch.strided if single else all(t.layout is torch.strided for t in tensors)
        if not strided:  # sparse: its bytes are not in one place
            return flags | ev.NO_SIZE, 0, dtype, device
        size = first.nbytes if single else sum([tensor.nbytes for tensor in tensors])
        return flags, size * factor, dtype, device

    def _add(self, dtype: torch.dtype) -> int:
        code = self._dtypes[dtype] = self._names.dtype_code(str(dtype).removeprefix("torch."))
        return code
