"""Loads the alert rules of the agent: ours or the user's, with the thresholds from the settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from commwatch.wire import crossing
from commwatch_agent.alerting.incident_watch import Plan
from commwatch_agent.config import Config
from commwatch_agent.config_checks import ConfigError
from commwatch_agent.incidents.lifecycle import Table
from commwatch_agent.prometheus.metrics import METRICS
from commwatch_alerts.catalogue import Catalogue, CatalogueError, read, shipped
from commwatch_alerts.check import check
from commwatch_alerts.export import runbook
from commwatch_alerts.model import Alert

SHIPPED = "rules.yaml"
_MOST_BYTES = 1 << 20


def plan_of(config: Config, instance: str, address: str, deliver: Callable[[Sequence[Alert]], object]) -> Plan:
    """Return how the agent concludes, with the thresholds and kinds of the settings.

    Args:
        instance: the label ``instance`` of this node's series, as in Prometheus.
        address: base URL of the agent, which also serves the runbook.
        deliver: see ``Plan.deliver``.

    Raises:
        ConfigError: the user's list cannot be read, or it or a threshold is wrong.
    """
    found = catalogue(config)
    rules = {name: found.rows(name) for name in found.kinds}
    return Plan(Table(found.kinds, rules, partial(runbook, f"{address}/runbook")), instance, deliver)


def catalogue(config: Config) -> Catalogue:
    """Return the rules in force: the user's list if the settings name one, else ours.

    Raises:
        ConfigError: the user's list cannot be read, or it or a threshold is wrong.
    """
    try:
        text = shipped(SHIPPED) if config.rules is None else text_of(config.rules)
        found = read(text, config.thresholds, config.kinds)
        if config.rules is not None:
            check(found, labels_by_series())
    except CatalogueError as error:
        raise ConfigError(f"{config.rules or 'alerts'}: {error}") from None
    return found


def text_of(file: Path) -> str:
    """Return the text of a file with rules.

    Raises:
        CatalogueError: the file cannot be read, or is not UTF-8.
    """
    try:
        return crossing.read(file, _MOST_BYTES, crossing.operator()).decode()
    except OSError as error:
        raise CatalogueError(error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise CatalogueError("not UTF-8 text") from None


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
