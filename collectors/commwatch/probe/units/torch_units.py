"""Writes to the names file what the collectives of a model carry: buckets of DDP, units of FSDP2.

Nothing is added to an operation: a table has the order in which a pass communicates its parts, and the agent finds the part of an operation by
its place in the step (``commwatch_agent/model/model_parts``). No tensor and no module is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from commwatch.probe.naming_probe import NamingProbe
from commwatch.probe.units.part_tables import Carried
from commwatch.probe.units.torch_buckets import Buckets
from commwatch.probe.units.torch_fsdp import FsdpUnits
from commwatch.wire.handlers import raised_by_handler

#: Most tables of a process, most parts of a table, and most characters of a part's name.
MOST_TABLES, MOST_PARTS, MOST_NAME = 64, 2048, 300


class Units:
    """The tables of one probe."""

    def __init__(self, probe: NamingProbe) -> None:
        self._probe = probe
        self._tables, self._failed = 0, False
        self._buckets = Buckets(self._guarded, self._announce)
        self._fsdp = FsdpUnits(self._guarded, self._announce)

    def watch(self) -> None:
        """Look for buckets and units from now on."""
        self._buckets.watch()

    def unwatch(self) -> None:
        """Undo ``watch``. May be called twice."""
        self._buckets.unwatch()
        self._fsdp.unwatch()

    def step(self, ended_ns: int) -> None:
        """A step mark was written."""
        self._guarded(self._fsdp.step, ended_ns)

    def _guarded(self, do: Callable[..., None], *args: Any) -> None:
        """Call ``do`` while the probe records. An error ends the names, but reaches neither the training nor the records."""
        probe = self._probe
        if probe.ring is None or probe.off or self._failed:
            return
        try:
            do(*args)
        except Exception as error:
            if raised_by_handler(error):
                raise
            self._failed = True
            self.unwatch()
            about = "buckets and units of the model have no names"
            probe.say(f"{about} in rank {probe.place[1]}: {type(error).__name__}: {error}", "units")

    def _announce(self, since_ns: int, names: Sequence[str], order: Sequence[Carried]) -> None:
        if order and len(names) <= MOST_PARTS and self._tables < MOST_TABLES:
            self._tables += 1
            self._probe.with_probe_locks(partial(self._write, since_ns, names, order))

    def _write(self, since_ns: int, names: Sequence[str], order: Sequence[Carried]) -> int:
        """Write a table: for each kind of collective the parts that it carries, in the order of a pass."""
        found: dict[tuple[int, str, int], list[int]] = {}
        for each in order:
            group = each.group()
            if group is None:
                return MOST_TABLES
            found.setdefault((self._probe.group_of(group).small_id, each.op, each.elements), []).append(each.part)
        entry = {
            "since": since_ns,
            "names": [name[:MOST_NAME] for name in names],
            "order": [[*kind, parts] for kind, parts in found.items()],
        }
        return self._probe.intern("parts", self._tables, entry, MOST_TABLES + 1)
