"""The protocol of node collectors, and their table. A new collector is one file and one line in ``COLLECTORS``."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable
from typing import NamedTuple, Protocol

log = logging.getLogger("commwatch")


class Reading(NamedTuple):
    """One value: ``metric`` is a name of ``commwatch_agent.prometheus.metrics.METRICS``, ``labels`` the values of its labels in order."""

    metric: str
    labels: tuple[str, ...]
    value: float


class Collector(Protocol):
    """Reads one source of the node. Constructible without arguments: its files, roots and clocks have defaults."""

    def collect(self) -> list[Reading]:
        """Return the current readings, without unknown values. Raise ``OSError`` or ``ValueError`` if the source cannot be read."""


#: Name -> ``module:Class``; a module is imported when its collector is built.
COLLECTORS = {
    "host": "commwatch_collectors.node.host:HostCollector",
}


class Collectors:
    """The collectors of an agent; one that fails does not fail the rest."""

    def __init__(self, names: Iterable[str] = COLLECTORS) -> None:
        self._built: dict[str, Collector] = {}
        self._down: set[str] = set()
        for name in names:
            module, _, cls = COLLECTORS[name].partition(":")
            self._built[name] = getattr(importlib.import_module(module), cls)()

    def collect(self) -> list[tuple[str, list[Reading] | None]]:
        """Return each collector's readings, ``None`` for one that failed; log only the first of consecutive failures."""
        return [(name, self._collect(name, collector)) for name, collector in self._built.items()]

    def _collect(self, name: str, collector: Collector) -> list[Reading] | None:
        try:
            readings = collector.collect()
        except (OSError, ValueError) as error:
            if name not in self._down:
                self._down.add(name)
                log.warning("collector %s is down: %s", name, error)
            return None
        self._down.discard(name)
        return readings
