"""Finds the parameters of an optimizer that must be equal on all ranks of a group: those of DDP, and what HSDP replicates.

No tensor and no module is kept: weak references only. Shards are left out, and so are parameters that tensor parallelism replicates: each
rank computes their gradients for itself, so that kernels with an undefined order may make them differ.
"""

from __future__ import annotations

import hashlib
import json
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from commwatch.wire.handlers import raised_by_handler

#: A communication hook with which ranks step on gradients of their own for a while.
_LOCAL_HOOKS = frozenset({"post_localSGD_hook"})
#: Where torch keeps the state of FSDP by module, weakly.
_STATES = "torch.distributed._composable_state", "_module_state_mapping"


class Replicas:
    """Parameters that must be equal on the ranks of a group after each step of one optimizer.

    Args:
        group: their process group.
        named: the parameters by name.
        ddp: the module that makes them equal; ``None``: FSDP does.
    """

    def __init__(self, group: Any, named: dict[str, Any], ddp: Any = None) -> None:
        self.names = list(named)
        self.group = weakref.ref(group)
        self._tensors = [weakref.ref(tensor) for tensor in named.values()]
        self._ddp = None if ddp is None else weakref.ref(ddp)
        shapes = [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in named.items()]
        #: Equal on all ranks for the same parameters.
        self.key = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:12]

    def _module(self) -> Any:
        return None if self._ddp is None else self._ddp()

    @property
    def join(self) -> Any:
        """What is another object in each context in which ranks may end before others (``Join``), and outside of them."""
        ddp = self._module()
        return None if ddp is None else ddp._join_config

    @property
    def is_local(self) -> bool:
        """Whether the latest step used gradients of this rank only, after which ranks differ rightly."""
        ddp = self._module()
        if ddp is None:
            return False
        hooks = (getattr(hook, "__name__", "") for hook, _ in ddp._comm_hooks)
        return not ddp.require_forward_param_sync or not _LOCAL_HOOKS.isdisjoint(hooks)

    def tensors(self) -> list[Any]:
        """Return the part of each parameter on this rank, in the order of ``names``; ``None`` for one without memory."""
        return [_local(reference()) for reference in self._tensors]


def _local(parameter: Any) -> Any:
    """Return the part of a parameter on this rank; ``None`` if it has no memory."""
    tensor = getattr(parameter, "_local_tensor", parameter)
    if tensor is None or tensor.is_meta or tensor.layout != torch.strided or not tensor.untyped_storage().size():
        return None
    return tensor


class Modules:
    """The modules of this process whose parameters are replicated."""

    def __init__(self) -> None:
        self._ddp: list[weakref.ref[Any]] = []
        self._handle: Any = None
        #: How many have been made.
        self.made = 0

    def watch(self) -> None:
        """Note each DDP module from now on."""
        self._handle = register_module_module_registration_hook(self._registered)

    def unwatch(self) -> None:
        """Undo ``watch``."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _registered(self, module: Any, name: str, submodule: Any) -> None:
        if name == "module" and isinstance(module, DistributedDataParallel):
            self._ddp = [known for known in self._ddp if known() is not None]
            self._ddp.append(weakref.ref(module))
            self.made += 1

    def of(self, optimizer: Any) -> list[Replicas]:
        """Return what an optimizer steps of each module; with the parameters of the module that nothing steps."""
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [*self._of_ddp(stepped), *_of_fsdp(stepped)]

    def _of_ddp(self, stepped: set[int]) -> Iterator[Replicas]:
        for ddp in (reference() for reference in self._ddp):
            if ddp is None or ddp.process_group.size() < 2:
                continue
            named = {
                name: parameter
                for name, parameter in ddp.module.named_parameters()
                if name not in ddp.parameters_to_ignore and (id(parameter) in stepped or not parameter.requires_grad)
            }
            if any(id(parameter) in stepped for parameter in named.values()):
                yield Replicas(ddp.process_group, named, ddp)


def _of_fsdp(stepped: set[int]) -> Iterator[Replicas]:
    """Yield the shards that HSDP replicates, by group."""
    states = getattr(sys.modules.get(_STATES[0]), _STATES[1], {})
    found: dict[int, tuple[Any, dict[str, Any]]] = {}
    for state in (reference() for reference in list(states.values())):
        for of_state in _param_groups(state):
            group = getattr(of_state.mesh_info, "replicate_process_group", None)
            if group is None or group.size() < 2:
                continue
            _, named = found.setdefault(id(group), (group, {}))
            for each in of_state.fsdp_params:
                if id(each.sharded_param) in stepped:
                    named[each._param_fqn or f"parameter {len(named)}"] = each.sharded_param
    yield from (Replicas(group, named) for group, named in found.values() if named)


def _param_groups(state: Any) -> list[Any]:
    one = getattr(state, "_fsdp_param_group", None)
    many: list[Any] = getattr(state, "_fsdp_param_groups", [one] if one is not None else [])
    return many


def shape_of(optimizer: Any) -> tuple[int, ...]:
    """Return what changes when parameters are added to an optimizer."""
    return tuple(len(group["params"]) for group in optimizer.param_groups)


def number_in(group: Any, device: torch.device) -> int:
    """Return how many collectives a group has launched for a device; 0 if its backend does not count them."""
    try:
        return int(group._get_backend(device)._get_sequence_number_for_group())
    except RuntimeError as error:
        if raised_by_handler(error):
            raise
        return 0
