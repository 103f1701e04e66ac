"""Loads the kinds and alerts of the agent, with the thresholds and kinds of the settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from commwatch_agent.config import Config
from commwatch_agent.config_checks import ConfigError
from commwatch_agent.incidents.lifecycle import Table
from commwatch_agent.notify.incident_watch import Plan
from commwatch_agent.prometheus.metrics import METRICS
from commwatch_alerts.catalogue import RULES, Catalogue, CatalogueError, read, shipped
from commwatch_alerts.export import runbook
from commwatch_alerts.model import Alert


def plan_of(config: Config, instance: str, address: str, deliver: Callable[[Sequence[Alert]], object]) -> Plan:
    """Return how the agent concludes, with the thresholds and kinds of the settings.

    Args:
        instance: the label ``instance`` of this node's series, as in Prometheus.
        address: base URL of the agent, which also serves the runbook.
        deliver: see ``Plan.deliver``.

    Raises:
        ConfigError: a threshold or a kind in the settings is wrong.
    """
    found = catalogue(config)
    rules = {name: found.rows(name) for name in found.kinds}
    thresholds = {each.name: each.value for each in found.thresholds}
    concluding = Table(found.kinds, rules, thresholds, partial(runbook, f"{address}/runbook"))
    return Plan(concluding, instance, deliver, labels=config.labels)


def catalogue(config: Config) -> Catalogue:
    """Return the kinds and alerts in force.

    Raises:
        ConfigError: a threshold or a kind in the settings is wrong.
    """
    try:
        return read(shipped(RULES), config.thresholds, config.kinds)
    except CatalogueError as error:
        raise ConfigError(f"alerts: {error}") from None


def labels_by_series() -> dict[str, tuple[str, ...]]:
    """Return the label names of every series of ``/metrics`` by its name; a histogram has three series."""
    found: dict[str, tuple[str, ...]] = {}
    for spec in METRICS.values():
        if spec.kind == "histogram":
            found[f"{spec.name}_bucket"] = (*spec.labels, "le")
            found |= {f"{spec.name}_{part}": spec.labels for part in ("sum", "count")}
        else:
            found[spec.name] = spec.labels
    return found
