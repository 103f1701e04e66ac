"""The rendered page, compared with the encoders of prometheus_client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from commwatch_agent.prometheus.exposition import rendered

_HELP = 'With a "quote", a \\ and a\nsecond line.'
_TEXT = st.text() | st.text(alphabet='\\"\n{}, =')
_SAMPLES = st.lists(st.tuples(_TEXT, _TEXT, st.floats() | st.integers(0, 1 << 62)), max_size=4)


class _Held(Collector):
    """Families as a collector."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._families


@pytest.mark.parametrize("openmetrics", [True, False])
@given(counted=_SAMPLES, gauged=_SAMPLES, spread=_SAMPLES)
def test_same_bytes(
    openmetrics: bool,
    counted: list[tuple[str, str, float]],
    gauged: list[tuple[str, str, float]],
    spread: list[tuple[str, str, float]],
) -> None:
    """Both formats have the bytes of prometheus_client's encoders, whatever labels and values there are."""
    families: list[Metric] = []
    for kind, name, samples in ((CounterMetricFamily, "events_total", counted), (GaugeMetricFamily, "ratio", gauged)):
        family = kind(name, _HELP, labels=("zone", "at"))
        for zone, at, value in samples:
            family.add_metric((zone, at), value)
        families.append(family)
    histogram = HistogramMetricFamily("seconds", _HELP, labels=("zone", "at"))
    for zone, at, value in spread:
        histogram.add_metric((zone, at), [("0.5", 1.0), ("+Inf", 3.0)], value)
    single = GaugeMetricFamily("single", "No labels.", value=1e6)
    families += [histogram, single]
    registry = CollectorRegistry()
    registry.register(_Held(families))
    encode, _ = choose_encoder("application/openmetrics-text;version=1.0.0" if openmetrics else "")
    assert rendered(registry.collect(), openmetrics) == encode(registry)
