"""Writes checksums of replicated parameters to the ring, every so many steps, so that the agent can compare the ranks.

On a CPU the sums are made at the step mark. On a GPU they are queued behind the step on its own stream, and copied to the host; a later step
mark finds the copy complete and writes it. Nothing waits for the device.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from commwatch.probe.checks.torch_checksums import checksum
from commwatch.probe.checks.torch_replicas import Modules, Replicas, number_in, shape_of
from commwatch.probe.governor import LOOK_NS
from commwatch.wire import events as ev
from commwatch.wire import variables

#: Most checksums of one check: of more parameters, neighbours share one.
MOST_SUMS = 1024
#: Most sets of parameters that are announced; and how often the interval is doubled at most.
MOST_SETS, _MOST_DOUBLED = 1024, 20
#: Part of the budget below which the interval is halved again.
_CHEAP = 0.25


class Schedule:
    """Decides at which steps there is a check. The interval is doubled while checks cost more than their budget, up to ``every`` * 2**20.

    Ranks decide alone. The steps of a long interval are among those of a short one, so that ranks still have common checks.

    Args:
        every: steps between two checks.
        budget: share of the time that checks may take, 0 to 1; 0: no limit.
    """

    def __init__(self, every: int, budget: float) -> None:
        self._every, self._budget = every, budget
        self._doubled = 0
        self._began_ns: int | None = None
        self._cost_ns = 0

    def is_due(self, count: int) -> bool:
        """Return whether there is a check at the step with this number, from 1: at the first one, and at multiples of the interval."""
        return count == 1 or count % (self._every << self._doubled) == 0

    def begins(self, now_ns: int) -> None:
        """Note that a check begins; choose the interval by what those before it have cost."""
        if self._began_ns is None:
            self._began_ns = now_ns
        elapsed = now_ns - self._began_ns
        if elapsed < LOOK_NS:
            return
        share, self._began_ns, self._cost_ns = self._cost_ns / elapsed, now_ns, 0
        if 0 < self._budget < share:
            self._doubled = min(self._doubled + 1, _MOST_DOUBLED)
        elif share < _CHEAP * self._budget or not self._budget:
            self._doubled = max(self._doubled - 1, 0)

    def cost(self, ns: int) -> None:
        """Add the cost of a check, in ns."""
        self._cost_ns += ns


class _Set:
    """Replicated parameters that have been announced in the ring."""

    def __init__(self, replicas: Replicas, number: int, group: int) -> None:
        self.replicas, self.number, self.group = replicas, number, group
        #: Steps since it was announced; whether ranks stepped without each other, and differ rightly from then on.
        self.count, self.is_local = 0, False


class _Known(NamedTuple):
    """The sets of one optimizer."""

    optimizer: weakref.ref[Any]
    #: If they change, the sets must be found anew: the parameters of the optimizer, and how many modules there are.
    state: tuple[Any, ...]
    sets: list[_Set]
    #: ``Replicas.join`` of each set. In another context the steps are counted anew: ranks may have made different numbers of steps.
    joins: list[Any]


class _Queued(NamedTuple):
    """A check on a device."""

    of: _Set
    step: int
    number: int
    taken_ns: int
    sums: torch.Tensor
    began: Any
    ended: Any


class ReplicaChecks:
    """The checks of this process.

    Args:
        announce: called as ``announce(number, group, key, names)`` for each new set; returns the group's number in the ring, or ``None``
            if it cannot be announced.
        write: called with each checksum.
        say: called with a line for the user.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        *,
        announce: Callable[[int, Any, str, list[str]], int | None],
        write: Callable[[ev.Checksum], object],
        say: Callable[[str], None],
    ) -> None:
        self.modules = Modules()
        self._announce, self._write, self._say = announce, write, say
        self._schedule = Schedule(variables.checksum_every(env), variables.checksum_budget(env))
        #: By id; ids are used again. Not a WeakKeyDictionary, as in ``torch_steps``.
        self._known: dict[int, _Known] = {}
        self._same: Counter[tuple[int, str]] = Counter()
        self._made = 0
        self._queued: deque[_Queued] = deque()

    def step(self, optimizer: Any) -> None:
        """After a step of an optimizer: check its replicated parameters, if it is time."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return
        self._finish()
        for each in self._sets(optimizer):
            each.count += 1
            if not each.is_local and each.replicas.is_local:
                each.is_local = True
                self._say("replicas are not compared where ranks step on gradients of their own (no_sync, local SGD)")
            if not each.is_local and self._schedule.is_due(each.count):
                self._check(each)

    def _sets(self, optimizer: Any) -> list[_Set]:
        if not hasattr(optimizer, "param_groups"):  # a framework's engine
            return []
        state = (shape_of(optimizer), self.modules.made)
        known = self._known.get(id(optimizer))
        if known is not None and known.optimizer() is optimizer and known.state == state:
            joins = (each.replicas.join for each in known.sets)
            if all(before is now for before, now in zip(known.joins, joins, strict=True)):
                return known.sets
        sets = [found for replicas in self.modules.of(optimizer) if (found := self._new(replicas)) is not None]
        self._known = {at: other for at, other in self._known.items() if other.optimizer() is not None}
        self._known[id(optimizer)] = _Known(weakref.ref(optimizer), state, sets, [each.replicas.join for each in sets])
        return sets

    def _new(self, replicas: Replicas) -> _Set | None:
        group = replicas.group()
        if self._made >= MOST_SETS or group is None:
            return None
        which = id(group), replicas.key
        small_id = self._announce(self._made, group, f"{replicas.key}-{self._same[which]}", bundled(replicas.names))
        if small_id is None:
            return None
        self._same[which] += 1
        self._made += 1
        return _Set(replicas, self._made - 1, small_id)

    def _check(self, of: _Set) -> None:
        now = time.monotonic_ns()
        self._schedule.begins(now)
        group, tensors = of.replicas.group(), of.replicas.tensors()
        device = next((tensor.device for tensor in tensors if tensor is not None), None)
        if group is None or device is None or device.type not in ("cpu", "cuda"):
            return
        number = number_in(group, device)
        on_device = device.type == "cuda"
        began = _event(device) if on_device else None
        with torch.no_grad():
            zeros = torch.zeros(2, dtype=torch.int64, device=device)
            each = [zeros if tensor is None or tensor.device != device else checksum(tensor) for tensor in tensors]
            sums = torch.stack(each)
            if on_device:
                host = torch.empty(sums.shape, dtype=torch.int64, device="cpu", pin_memory=True)
                sums = host.copy_(sums, non_blocking=True)
        if on_device:
            self._queued.append(_Queued(of, of.count, number, now, sums, began, _event(device)))
        else:
            self._put(of, of.count, number, now, sums)
        self._schedule.cost(time.monotonic_ns() - now)

    def _finish(self) -> None:
        """Write the checks that a device has finished."""
        while self._queued and self._queued[0].ended.query():
            done = self._queued.popleft()
            self._schedule.cost(int(done.began.elapsed_time(done.ended) * 1e6))
            self._put(done.of, done.step, done.number, done.taken_ns, done.sums)

    def _put(self, of: _Set, step: int, number: int, taken_ns: int, sums: torch.Tensor) -> None:
        for place, (plain, weighted) in enumerate(_together(sums.tolist())):
            self._write(ev.Checksum(of.group, of.number, place, step, number, plain, weighted, taken_ns))


def _event(device: torch.device) -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def bundled(names: list[str]) -> list[str]:
    """Return a name for each checksum of parameters with these names."""
    size = -(-len(names) // MOST_SUMS)
    if size < 2:
        return names
    return [f"{part[0]} to {part[-1]}" for at in range(0, len(names), size) if (part := names[at : at + size])]


def _together(sums: list[list[int]]) -> list[tuple[int, int]]:
    """Return the checksums, those of a bundle added up; each sum is from 0 to 2**64 - 1."""
    size, mask = -(-len(sums) // MOST_SUMS), (1 << 64) - 1
    parts = (sums[at : at + size] for at in range(0, len(sums), size)) if sums else iter(())
    # The place in the bundle counts, so that two parameters that are swapped are seen.
    return [
        (sum(plain for plain, _ in part) & mask, sum(at * weighted for at, (_, weighted) in enumerate(part, 1)) & mask)
        for part in parts
    ]
