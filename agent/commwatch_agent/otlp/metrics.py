"""The families of ``/metrics`` as a request of OTLP: same names, labels and values. Pure.

The messages are those of ``opentelemetry-proto``. The SDK's exporter takes three times the CPU time for its own copy of each point, and
reports its errors only to a log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from math import isinf

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric, ScopeMetrics
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Sample

from commwatch_agent.otlp.resource import JOB, SCOPE, resource
from commwatch_agent.prometheus.node_metrics import NODE_METRICS

_CUMULATIVE = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
#: Counters that kernel and drivers keep: when they began is not known.
_OF_OTHERS = frozenset(spec.name for spec in NODE_METRICS)
#: Counters of a rank that ``/metrics`` withholds while too much of its communication is unknown; then they appear with all since its start.
_WITHHELD = frozenset(f"commwatch_step_{what}_seconds_total" for what in ("comm", "exposed_comm", "group_comm"))
#: For how many rounds a series that is gone is remembered: an hour of those at the default interval.
_KEPT_ROUNDS = 240
Key = tuple[str, ...]


class Starts:
    """Since when each cumulative series counts: the latest time at which it was not there yet, or fell.

    A series that was gone and returns without a fall counts from its earlier start on. Counters that ``/metrics`` withheld count from the start
    of their rank's steps on. A counter that the agent does not keep itself counts from its first observation on, which is OTLP's form of an
    unknown start.

    Args:
        began_ns: Unix time when the agent had no series.
    """

    def __init__(self, began_ns: int) -> None:
        self._before_ns = self._at_ns = began_ns
        self._round = 0
        #: By series, its start, its latest value, and the round of that.
        self._known: dict[Key, tuple[int, float, int]] = {}

    def begin(self, at_ns: int) -> None:
        """Begin a round of observations at the Unix time ``at_ns``; forget series that were last seen long ago."""
        self._before_ns, self._at_ns = self._at_ns, at_ns
        self._round += 1
        oldest = self._round - _KEPT_ROUNDS
        self._known = {key: known for key, known in self._known.items() if known[2] >= oldest}

    def of(self, key: Key, value: float) -> int:
        """Return the start of a series, which now has this value, as Unix time in ns."""
        known = self._known.get(key)
        if known is None:
            start_ns = self._first(key)
        elif value >= known[1]:
            start_ns = known[0]
        else:
            start_ns = self._before_ns
        self._known[key] = start_ns, value, self._round
        return start_ns

    def _first(self, key: Key) -> int:
        """Return the start of a series that was not there before."""
        name, *labels = key
        if name in _OF_OTHERS:
            return self._at_ns
        steps = self._known.get(("commwatch_steps_total", *labels[:2])) if name in _WITHHELD else None
        return self._before_ns if steps is None else steps[0]


class _Pairs(dict[tuple[str, str], KeyValue]):
    """Labels as attributes; each is made once."""

    def __missing__(self, label: tuple[str, str]) -> KeyValue:
        pair = self[label] = KeyValue(key=label[0], value=AnyValue(string_value=label[1]))
        return pair

    def of(self, labels: Mapping[str, str]) -> list[KeyValue]:
        return [self[label] for label in labels.items()]


class _Request:
    """A request under construction, with one resource per job."""

    def __init__(self, attributes: Mapping[str, str]) -> None:
        self.message = ExportMetricsServiceRequest()
        self._attributes, self._scopes = attributes, dict[str, ScopeMetrics]()
        self._metrics: dict[tuple[str, str], Metric] = {}

    def metric(self, job: str, name: str, family: Family) -> Metric:
        """Return the metric of a job."""
        found = self._metrics.get((job, name))
        if found is None:
            scope = self._scopes.get(job) or self._scope(job)
            found = self._metrics[job, name] = scope.metrics.add(name=name, description=family.documentation)
            if family.type == "counter":
                found.sum.aggregation_temporality, found.sum.is_monotonic = _CUMULATIVE, True
            elif family.type == "histogram":
                found.histogram.aggregation_temporality = _CUMULATIVE
        return found

    def _scope(self, job: str) -> ScopeMetrics:
        of_job = self.message.resource_metrics.add(resource=resource(self._attributes, job))
        scope = self._scopes[job] = of_job.scope_metrics.add(scope=SCOPE)
        return scope


def request(
    families: Iterable[Family], attributes: Mapping[str, str], starts: Starts, at_ns: int
) -> ExportMetricsServiceRequest:
    """Return all samples as one request.

    Args:
        attributes: of the agent's resource; those with a ``job_id`` have it in addition.
        starts: of the earlier rounds.
        at_ns: Unix time at which the families were collected.
    """
    starts.begin(at_ns)
    made, pairs = _Request(attributes), _Pairs()
    for family in families:
        if family.type == "histogram":
            _add_histograms(made, family, pairs, starts, at_ns)
            continue
        counts = family.type == "counter"
        for sample in family.samples:
            labels, value = sample.labels, float(sample.value)
            metric = made.metric(labels.get(JOB, ""), sample.name, family)
            if counts:
                metric.sum.data_points.add(
                    time_unix_nano=at_ns,
                    start_time_unix_nano=starts.of((sample.name, *labels.values()), value),
                    as_double=value,
                    attributes=pairs.of(labels),
                )
            else:
                metric.gauge.data_points.add(time_unix_nano=at_ns, as_double=value, attributes=pairs.of(labels))
    return made.message


def _add_histograms(made: _Request, family: Family, pairs: _Pairs, starts: Starts, at_ns: int) -> None:
    for labels, buckets, total in _histograms(family.samples):
        running = [0, *(int(count) for _, count in buckets)]
        made.metric(labels.get(JOB, ""), family.name, family).histogram.data_points.add(
            time_unix_nano=at_ns,
            start_time_unix_nano=starts.of((family.name, *labels.values()), running[-1]),
            count=running[-1],
            sum=total,
            explicit_bounds=[bound for bound, _ in buckets if not isinf(bound)],
            bucket_counts=[count - before for before, count in pairwise(running)],
            attributes=pairs.of(labels),
        )


def _histograms(samples: Iterable[Sample]) -> Iterator[tuple[dict[str, str], list[tuple[float, float]], float]]:
    """Yield labels, cumulative buckets by upper bound, and sum of each histogram; its ``_sum`` is its last sample."""
    buckets: list[tuple[float, float]] = []
    for sample in samples:
        if sample.name.endswith("_bucket"):
            buckets.append((float(sample.labels["le"]), sample.value))
        elif sample.name.endswith("_sum"):
            yield sample.labels, buckets, sample.value
            buckets = []
