"""Series in promtool's notation as snapshots of an agent's metrics, and what rules find in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.metrics_core import Metric

from commwatch_agent.incidents.incident import Condition
from commwatch_agent.incidents.metric_conditions import MetricRule
from commwatch_agent.incidents.metric_rules import METRIC_NAMES
from commwatch_agent.incidents.metric_window import MetricWindow
from commwatch_alerts.catalogue import Catalogue, read, shipped
from tests.alerts.cases import EVERY_S, THRESHOLDS, Series

CATALOGUE: Catalogue = read(shipped("rules.yaml"), THRESHOLDS)
LIMITS: Mapping[str, float] = {one.name: one.value for one in CATALOGUE.thresholds}
#: Unix time of the first snapshot.
BEGIN_S = 1_700_000_000.0
_NUMBER = r"-?[\d.]+(?:e[+-]?\d+)?"
_PART = re.compile(rf"(?P<first>{_NUMBER}|_)(?:(?P<each>[+-]{_NUMBER}))?(?:x(?P<times>\d+))?|stale")


def samples(notation: str) -> list[float | None]:
    """The values of a series; ``None`` where it is not there."""
    found: list[float | None] = []
    for part in notation.split():
        match = _PART.fullmatch(part)
        assert match, part
        times = int(match["times"] or 0)
        if match["first"] in (None, "_"):
            found += [None] * max(1, times)
        else:
            found += [float(match["first"]) + number * float(match["each"] or 0) for number in range(times + 1)]
    return found


def family(name: str, *values: tuple[Mapping[str, str], float]) -> Metric:
    """A metric as the registry collects it."""
    metric = Metric(name.removesuffix("_total"), "Text.", "counter" if name.endswith("_total") else "gauge")
    for labels, value in values:
        metric.add_sample(name, dict(labels), value)
    return metric


def labels_and_name(series: str) -> tuple[str, dict[str, str]]:
    """Name and labels; without ``job``, which Prometheus adds."""
    name, _, inside = series.partition("{")
    found = dict(re.findall(r'(\w+)="([^"]*)"', inside))
    return name, {key: value for key, value in found.items() if key != "job"}


def windows(series: Series) -> Iterator[tuple[int, MetricWindow]]:
    """The window after each snapshot, with the seconds since the first."""
    each = [(*labels_and_name(name), samples(notation)) for name, notation in series.items()]
    window = MetricWindow(METRIC_NAMES)
    for step in range(max((len(values) for _, _, values in each), default=0)):
        there = [(name, labels, values[step]) for name, labels, values in each if step < len(values)]
        families = [family(name, (labels, value)) for name, labels, value in there if value is not None]
        window.add(float(step * EVERY_S), families)
        yield step * EVERY_S, window


def at_end(rule: MetricRule, *series: Series, **limits: float) -> list[Condition]:
    """What a rule finds in the last snapshot."""
    window, at_s = MetricWindow(METRIC_NAMES), 0
    for at_s, window in windows({name: values for one in series for name, values in one.items()}):  # noqa: B007
        pass
    return list(rule(window, {**LIMITS, **limits}, BEGIN_S + at_s))


def variants(conditions: Iterable[Condition]) -> Sequence[str]:
    """The variants of conditions, in order."""
    return [one.variant for one in conditions]
