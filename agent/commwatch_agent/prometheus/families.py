"""Collects samples by metric and converts them to the types of prometheus_client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from commwatch_agent.prometheus.metrics import METRICS

Labels = tuple[str, ...]


class Families:
    """Samples by metric, in the order of ``METRICS``.

    Args:
        more: by metric, names of labels in addition to those in ``METRICS``.
    """

    def __init__(self, more: Mapping[str, tuple[str, ...]] | None = None) -> None:
        self._more = more or {}
        self._samples: dict[str, dict[Labels, float]] = {}
        self._histograms: dict[str, list[tuple[Labels, list[tuple[str, float]], float]]] = {}

    def add(self, metric: str, labels: Labels, value: float) -> None:
        """Set one sample."""
        self._samples.setdefault(metric, {})[labels] = value

    def count(self, metric: str, labels: Labels, value: float) -> None:
        """Add to a sample, because several lives of one rank share their labels."""
        samples = self._samples.setdefault(metric, {})
        samples[labels] = samples.get(labels, 0.0) + value

    def histogram(self, metric: str, labels: Labels, bounds: list[float], counts: list[int], total: float) -> None:
        """Add one histogram; ``counts`` are per bucket (not cumulative), one more than ``bounds``."""
        buckets, running = [], 0
        for bound, count in zip([*bounds, float("inf")], counts, strict=True):
            running += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(running)))
        self._histograms.setdefault(metric, []).append((labels, buckets, total))

    def values(self) -> Iterator[Metric]:
        """Yield the families that have samples."""
        for name, spec in METRICS.items():
            if name in self._histograms:
                histogram = HistogramMetricFamily(spec.name, spec.help, labels=spec.labels)
                for labels, buckets, total in self._histograms[name]:
                    histogram.add_metric(labels, buckets, total)
                yield histogram
            elif name in self._samples:
                kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
                family = kind(spec.name, spec.help, labels=(*spec.labels, *self._more.get(name, ())))
                for labels, value in self._samples[name].items():
                    family.add_metric(labels, value)
                yield family
