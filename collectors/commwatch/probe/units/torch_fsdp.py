"""The units of FSDP2, in the order in which a step communicates them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from commwatch.probe.torch_groups import Replacements
from commwatch.probe.torch_steps import as_it_is
from commwatch.probe.units.part_tables import Announce, Carried, Guarded

#: Where torch keeps the state of FSDP by module, weakly; and where it makes the collectives of a unit.
_STATES = "torch.distributed._composable_state", "_module_state_mapping"
_MAKES = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
#: Most steps that are watched for two in succession with the same collectives.
_MOST_STEPS = 8


class _Learning:
    """The collectives of the steps that are watched."""

    def __init__(self, since_ns: int) -> None:
        #: By ``id`` of a state of a parameter, which lives as long as its module: the place of its unit in ``names``.
        self.parameters: dict[int, int] = {}
        self.names: list[str] = []
        #: The group in which a unit is replicated, by the same place; ``None``: it is not.
        self.replicas: list[weakref.ref[Any] | None] = []
        self.calls: list[Carried] = []
        self.latest: list[Carried] = []
        #: Begin of ``calls``, and of ``latest``.
        self.since_ns = self.latest_ns = since_ns
        self.steps = 0


class FsdpUnits:
    """Watches some steps after the units were made, and announces their order; then FSDP has its own functions again.

    Args:
        guarded: calls a function, and handles its errors.
        announce: writes a table.
    """

    def __init__(self, guarded: Guarded, announce: Announce) -> None:
        self._guarded, self._announce = guarded, announce
        self._replaced = Replacements()
        self._learning: _Learning | None = None
        #: Number of states when they were looked at.
        self._states = 0

    def unwatch(self) -> None:
        """Give FSDP its own functions again."""
        self._replaced.undo()
        self._learning = None

    def step(self, ended_ns: int) -> None:
        """A step has ended: begin to watch if there are new units, else judge the step that was watched."""
        states, learning = getattr(sys.modules.get(_STATES[0]), _STATES[1], {}), self._learning
        if len(states) != self._states:
            self._states = len(states)
            self.unwatch()
            self._begin(ended_ns, [state for state in (reference() for reference in list(states.values())) if state])
        elif learning is not None:
            self._judge(learning, ended_ns)

    def _begin(self, now_ns: int, states: list[Any]) -> None:
        learning, module = _Learning(now_ns), sys.modules.get(_MAKES)
        for unit in (unit for state in states for unit in _units(state)):
            learning.parameters |= {id(each): len(learning.names) for each in unit.fsdp_params}
            learning.names.append(f"unit {unit._module_fqn or '(root)'}")
            replicas = getattr(unit.mesh_info, "replicate_process_group", None)
            learning.replicas.append(None if replicas is None else weakref.ref(replicas))
        if learning.names and module is not None:
            self._learning = learning
            self._replaced.wrap(module, "foreach_all_gather", self._watching_gather)
            self._replaced.wrap(module, "foreach_reduce", self._watching_reduce)

    def _judge(self, learning: _Learning, ended_ns: int) -> None:
        if not learning.calls:  # another optimizer of the same step
            return
        learning.steps += 1
        if learning.calls == learning.latest:
            self._announce(learning.latest_ns, learning.names, learning.calls)
            self.unwatch()
        elif learning.steps >= _MOST_STEPS:
            self.unwatch()
        learning.latest, learning.latest_ns = learning.calls, learning.since_ns
        learning.calls, learning.since_ns = [], ended_ns

    def _watching_gather(self, original: Any) -> Any:
        @as_it_is
        def gather(parameters: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(parameters, group, *args, **kwargs)
            if not torch.compiler.is_compiling():
                self._guarded(self._gathered, parameters, group, result)
            return result

        return gather

    def _watching_reduce(self, original: Any) -> Any:
        @as_it_is
        def reduce(parameters: Any, gradients: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(parameters, gradients, group, *args, **kwargs)
            if not torch.compiler.is_compiling():
                self._guarded(self._reduced, parameters, group, result)
            return result

        return reduce

    def _gathered(self, parameters: Any, group: Any, result: Any) -> None:
        learning, part = self._part(parameters)
        if learning is not None and result is not None:
            learning.calls.append(Carried(weakref.ref(group), "all_gather", result.all_gather_output.numel(), part))

    def _reduced(self, parameters: Any, group: Any, result: Any) -> None:
        learning, part = self._part(parameters)
        if learning is None:
            return
        if group is not None and group.size() > 1:
            learning.calls.append(Carried(weakref.ref(group), "reduce_scatter", result[0].numel(), part))
        replicas, tensor = learning.replicas[part], result[4]
        if replicas is not None and tensor is not None:
            learning.calls.append(Carried(replicas, "all_reduce", tensor.numel(), part))

    def _part(self, parameters: Any) -> tuple[_Learning | None, int]:
        """Return what is learnt, and the place of a unit; ``None`` if nothing is, or no more because the unit is not known."""
        learning = self._learning
        part = -1 if learning is None else learning.parameters.get(id(parameters[0]), -1)
        if part < 0:
            self.unwatch()
        return (learning, part) if part >= 0 else (None, part)


def _units(state: Any) -> Iterator[Any]:
    """Yield the units of a state of torch: groups of parameters that are communicated together."""
    one = getattr(state, "_fsdp_param_group", None)
    yield from getattr(state, "_fsdp_param_groups", [one] if one is not None else [])
