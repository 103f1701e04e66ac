"""Switches the checks for corrupt data on, as the environment asks, and keeps their errors from the training and from the records."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from commwatch.probe.naming_probe import NamingProbe
from commwatch.probe.torch_steps import StepHooks
from commwatch.wire import events as ev
from commwatch.wire import variables
from commwatch.wire.handlers import raised_by_handler

if TYPE_CHECKING:
    from commwatch.probe.checks.torch_corruption import ReplicaChecks


class CheckedProbe(NamingProbe, Protocol):
    """What the checks need of a probe (``torch_probe.Probe``)."""

    env: Mapping[str, str]
    steps: StepHooks

    def write_checksum(self, checksum: ev.Checksum) -> None:
        """Write the record of a checksum."""

    def check_collectives(self, every: int, budget: float) -> bool:
        """Check one in ``every`` collectives from now on; return False if this hook cannot do that."""


class Checks:
    """The checks of one probe."""

    def __init__(self, probe: CheckedProbe) -> None:
        self._probe = probe
        #: Checks of replicated parameters; ``None``: they are off.
        self._replicas: ReplicaChecks | None = None
        #: Printed by rank 0 once it records: what was asked for and is not checked.
        self.remark = ""

    def watch(self) -> None:
        """Check what is wanted from now on. The modules for replicas are loaded only then."""
        wanted = self._probe.env.get("COMMWATCH_CHECKSUMS", "off")
        if wanted in variables.CHECK_COLLECTIVES:
            every, budget = variables.checksum_every(self._probe.env), variables.checksum_budget(self._probe.env)
            if not self._probe.check_collectives(every, budget):
                self.remark = "collectives are not checked for corrupt data: that needs the native hook"
        if wanted in variables.CHECK_REPLICAS:
            self._watch_replicas()

    def _watch_replicas(self) -> None:
        from commwatch.probe.checks.torch_corruption import ReplicaChecks

        probe = self._probe
        say = partial(probe.say, about="replicas")
        self._replicas = ReplicaChecks(probe.env, announce=self._announce, write=probe.write_checksum, say=say)
        self._replicas.modules.watch()
        probe.steps.on_step = self._step

    def unwatch(self) -> None:
        """Undo what ``watch`` has done for replicas. The hook ends the checks of collectives."""
        self._probe.steps.on_step = None
        if self._replicas is not None:
            self._replicas.modules.unwatch()
            self._replicas = None

    def _step(self, optimizer: Any) -> None:
        """After a step: check its parameters. Errors end the checks, but reach neither the training nor the records."""
        probe = self._probe
        try:
            if self._replicas is not None and probe.ring is not None and not probe.off:
                self._replicas.step(optimizer)
        except Exception as error:
            if raised_by_handler(error):
                raise
            self.unwatch()
            rank = probe.place[1]
            probe.say(f"replicas of rank {rank} are not compared: {type(error).__name__}: {error}", "checks")

    def _announce(self, number: int, pg: Any, key: str, names: list[str]) -> int | None:
        """Write a set of replicated parameters to the names file; return the number of its group, ``None`` without space."""
        return self._probe.with_probe_locks(partial(self._write_set, number, pg, key, names))

    def _write_set(self, number: int, pg: Any, key: str, names: list[str]) -> int | None:
        group = self._probe.group_of(pg)
        entry = {"in": group.small_id, "key": key, "tensors": names}
        announced = self._probe.intern("replicas", number, entry, ev.NO_GROUP)
        return None if announced == ev.NO_GROUP else group.small_id
