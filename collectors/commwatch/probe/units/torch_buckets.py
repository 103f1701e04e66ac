"""The buckets of DDP, as its logger has them."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size as _assign
from torch.nn.parallel import DistributedDataParallel

from commwatch.probe.torch_groups import Replacements
from commwatch.probe.torch_steps import as_it_is
from commwatch.probe.units.part_tables import Announce, Carried, Guarded

#: Most forward passes in which the logger is asked for the buckets: it has them in one of the next ten, and then in one of a hundred.
_MOST_TRIES = 200


class _Parameter(NamedTuple):
    name: str
    tensor: Any
    #: Its gradient is sparse, and so is that of its bucket.
    is_sparse: bool

    @property
    def bytes(self) -> int:
        return int(self.tensor.numel() * self.tensor.element_size())


class _Seen:
    """A DDP module that has had a forward pass."""

    def __init__(self, ddp: Any) -> None:
        self.ddp = weakref.ref(ddp)
        self.rebuilt = False
        #: Begin of the first forward pass with these buckets.
        self.since_ns = 0
        self.tries = 0


class Buckets:
    """Notes the buckets of each DDP module once they are final.

    They are read in a forward pass, where DDP itself takes the lock of its reducer: in a backward pass, or in an optimizer that runs in it,
    the lock may be held until this thread goes on.

    Args:
        guarded: calls a function, and handles its errors.
        announce: writes a table.
    """

    def __init__(self, guarded: Guarded, announce: Announce) -> None:
        self._guarded, self._announce = guarded, announce
        self._replaced = Replacements()
        #: By ``id`` of the module; ids are used again.
        self._seen: dict[int, _Seen] = {}

    def watch(self) -> None:
        """Note the forward passes of all DDP modules from now on."""
        self._replaced.wrap(DistributedDataParallel, "_pre_forward", self._watching)

    def unwatch(self) -> None:
        """Undo ``watch``."""
        self._replaced.undo()

    def _watching(self, original: Any) -> Any:
        @as_it_is
        def pre_forward(ddp: Any, *inputs: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(ddp, *inputs, **kwargs)
            began_ns = time.monotonic_ns()
            result = original(ddp, *inputs, **kwargs)
            self._guarded(self._look, ddp, began_ns)
            return result

        return pre_forward

    def _look(self, ddp: Any, began_ns: int) -> None:
        """Announce the buckets of a module if they are final and have not been announced."""
        seen = self._seen.get(id(ddp))
        if seen is None or seen.ddp() is not ddp:
            self._seen = {key: each for key, each in self._seen.items() if each.ddp() is not None}
            seen = self._seen[id(ddp)] = _Seen(ddp)
        rebuilt = getattr(ddp, "_has_rebuilt_buckets", False)
        if not seen.since_ns or rebuilt != seen.rebuilt:
            seen.rebuilt, seen.since_ns, seen.tries = rebuilt, began_ns, 0
        is_final = rebuilt or (ddp.find_unused_parameters and not ddp.static_graph)
        if is_final and seen.tries < _MOST_TRIES and torch.is_grad_enabled() and ddp.require_backward_grad_sync:
            seen.tries += 1
            if self._announced(ddp, seen.since_ns, rebuilt):
                seen.tries = _MOST_TRIES

    def _announced(self, ddp: Any, since_ns: int, rebuilt: bool) -> bool:
        """Announce the buckets, unless the parameters do not have the sizes of the logger; return False if it lacks them as yet."""
        logged = ddp._get_ddp_logging_data()
        if rebuilt and not logged.get("has_rebuilt_buckets"):
            return False
        parameters = list(_parameters(ddp))
        if rebuilt:
            buckets = _lists(logged.get("rebuilt_per_bucket_param_indices", ""))
            sizes = _sizes(logged.get("rebuilt_bucket_sizes", ""))
        else:
            sizes = _sizes(logged["bucket_sizes"])
            buckets = _first(ddp, parameters, sizes)
        if any(index >= len(parameters) for bucket in buckets for index in bucket):
            return True  # parameters were frozen meanwhile
        members = [[parameters[index] for index in bucket] for bucket in buckets]
        if [sum(one.bytes for one in bucket) for bucket in members] != sizes:
            return True
        group = weakref.ref(ddp.process_group)
        order = [
            Carried(group, "all_reduce", sum(one.tensor.numel() for one in bucket), place)
            for place, bucket in enumerate(members)
            if not any(one.is_sparse for one in bucket)
        ]
        self._announce(since_ns, [_name(place, bucket) for place, bucket in enumerate(members)], order)
        return True


def _name(place: int, bucket: list[_Parameter]) -> str:
    """Return the name of a bucket: its index and its parameters, of many the first and the last one."""
    names = [one.name for one in bucket]
    if len(names) <= 2:
        return f"bucket {place}: {', '.join(names)}"
    return f"bucket {place}: {names[0]} … {names[-1]} ({len(names)} parameters)"


def _parameters(ddp: Any) -> Iterator[_Parameter]:
    """Yield the parameters whose gradients DDP reduces, in the order of their indices."""
    known = set()
    for path, module in ddp.module.named_modules():
        is_sparse = isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse
        for name, one in module.named_parameters(recurse=False):
            wanted = one.requires_grad and f"{path}.{name}" not in ddp.parameters_to_ignore
            if wanted and id(one) not in known:
                known.add(id(one))
                yield _Parameter(f"{path}.{name}".lstrip("."), one, is_sparse)


def _first(ddp: Any, parameters: list[_Parameter], sizes: list[int]) -> list[list[int]]:
    """Return the buckets as DDP made them, as indices of parameters; empty: not of these sizes, so this version makes them another way."""
    tensors, sparse = [one.tensor for one in parameters], [one.is_sparse for one in parameters]
    first = getattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", ddp.bucket_bytes_cap)
    for limits in ([first, ddp.bucket_bytes_cap], [ddp.bucket_bytes_cap]):
        buckets: list[list[int]] = _assign(tensors, limits, sparse)[0][::-1]
        if [sum(parameters[index].bytes for index in bucket) for bucket in buckets] == sizes:
            return buckets
    return []


def _lists(text: str) -> list[list[int]]:
    return [[int(index) for index in bucket.split()] for bucket in text.split(",") if bucket.strip()]


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",") if size.strip()]
