"""Which frameworks exchange the gradients of this process: advice names only their settings."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commwatch.probe.torch_groups import Replacements

DDP, FSDP, FSDP2, DEEPSPEED, MEGATRON = "ddp", "fsdp", "fsdp2", "deepspeed", "megatron"
#: Modules that have the class of all modules that FSDP2 shards, in torch from 2.6 on, and in 2.5.
_FSDP2_MODULES = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")
#: What FSDP sets on the parameters that it flattens.
_FLATTENED = "_fsdp_flattened"
_DEEPSPEED_ENGINE = "deepspeed.runtime.engine", "DeepSpeedEngine"
_MEGATRON = "megatron.core.distributed"
#: Most parameters of an optimizer that are looked at.
_MOST_PARAMETERS = 64


class Frameworks:
    """Finds out which frameworks this process uses."""

    def __init__(self) -> None:
        self._replaced = Replacements()
        self._has_ddp = False
        #: Models may have been made before.
        self._late = False

    def watch(self) -> None:
        """Note the models of DDP that are made from now on."""
        self._late = dist.is_available() and dist.is_initialized()
        self._replaced.wrap(DistributedDataParallel, "__init__", self._making)

    def unwatch(self) -> None:
        """Undo ``watch``. May be called twice."""
        self._replaced.undo()

    def _making(self, original: Any) -> Any:
        @wraps(original)
        def making(model: Any, *args: Any, **kwargs: Any) -> None:
            self._has_ddp = True
            original(model, *args, **kwargs)

        return making

    def found(self, optimizers: Iterable[Any]) -> list[str] | None:
        """Return the frameworks in use; empty: none of those that are known here; ``None``: not known.

        Args:
            optimizers: those that have stepped, and engines of frameworks.
        """
        every = list(optimizers)
        used = {
            DDP: self._has_ddp,
            FSDP: any(map(_is_flattened, every)),
            FSDP2: any(map(_has_sharded, _FSDP2_MODULES)),
            DEEPSPEED: any(isinstance(each, _engine()) for each in every),
            MEGATRON: _MEGATRON in sys.modules,
        }
        names = [name for name, is_used in used.items() if is_used]
        return None if self._late and not names else names


def _has_sharded(module: str) -> bool:
    """Return whether a module was sharded by FSDP2: it then has a class that was derived for it."""
    sharded = getattr(sys.modules.get(module), "FSDPModule", None)
    return isinstance(sharded, type) and bool(sharded.__subclasses__())


def _engine() -> type | tuple[()]:
    module, name = _DEEPSPEED_ENGINE
    engine = getattr(sys.modules.get(module), name, None)
    return engine if isinstance(engine, type) else ()


def _is_flattened(optimizer: Any) -> bool:
    """Return whether an optimizer has parameters that FSDP has flattened."""
    groups = getattr(optimizer, "param_groups", ())
    parameters = (each for group in groups for each in group["params"][:_MOST_PARAMETERS])
    return any(getattr(each, _FLATTENED, False) for each in parameters)
