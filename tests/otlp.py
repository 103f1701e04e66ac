"""A receiver of OTLP over HTTP, which reads requests with the messages of ``opentelemetry-proto``."""

from __future__ import annotations

import gzip
import ssl
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, HistogramDataPoint

from tests.receivers import Answer, Asked, Server

METRICS, LOGS = "/v1/metrics", "/v1/logs"
#: A name and labels, as in ``/metrics``.
Series = tuple[str, frozenset[tuple[str, str]]]
Attribute = str | int | float | list[int]
CUMULATIVE = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE


class Receiver(Server):
    """Gives its answers one after the other, the last one repeatedly, and keeps the requests."""

    def __init__(self, *answers: Answer, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(*answers, tls=tls)
        self.url = self.url.removesuffix("/hook")

    def of(self, path: str) -> list[Asked]:
        """The requests of one signal."""
        return [asked for asked in self.asked if asked.path == path]

    def metrics(self) -> list[ExportMetricsServiceRequest]:
        """The requests with metrics."""
        return [ExportMetricsServiceRequest.FromString(unpacked(asked)) for asked in self.of(METRICS)]

    def records(self) -> list[LogRecord]:
        """All log records, in their order."""
        requests = (ExportLogsServiceRequest.FromString(unpacked(asked)) for asked in self.of(LOGS))
        return [
            record
            for request in requests
            for of_job in request.resource_logs
            for scope in of_job.scope_logs
            for record in scope.log_records
        ]


def unpacked(asked: Asked) -> bytes:
    """The message in a request, which must be of OTLP."""
    assert asked.headers["Content-Type"] == "application/x-protobuf"
    assert asked.headers["Content-Encoding"] == "gzip"
    return gzip.decompress(asked.body)


def value_of(value: AnyValue) -> Attribute:
    """A value as Python has it."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [each.int_value for each in value.array_value.values]
    assert kind in ("string_value", "int_value", "double_value")
    found: str | int | float = getattr(value, kind)
    return found


def attributes(pairs: Iterable[KeyValue]) -> dict[str, Attribute]:
    """Attributes by key; no key twice."""
    listed = list(pairs)
    found = {pair.key: value_of(pair.value) for pair in listed}
    assert len(found) == len(listed)
    return found


def labels(pairs: Iterable[KeyValue]) -> dict[str, str]:
    """Attributes that are all texts."""
    return {key: str(value) for key, value in attributes(pairs).items()}


def samples(request: ExportMetricsServiceRequest) -> dict[Series, float]:
    """What ``/metrics`` would show of a request; fails if two series share name and labels."""
    found: dict[Series, float] = {}
    for name, value, named in _samples(request):
        series = name, frozenset(named.items())
        assert series not in found
        found[series] = value
    return found


def _samples(request: ExportMetricsServiceRequest) -> Iterator[tuple[str, float, Mapping[str, str]]]:
    for of_job in request.resource_metrics:
        job = labels(of_job.resource.attributes).get("job_id", "")
        for metric in of_job.scope_metrics[0].metrics:
            kind = metric.WhichOneof("data")
            assert kind in ("gauge", "sum", "histogram")
            if kind == "histogram":
                assert metric.histogram.aggregation_temporality == CUMULATIVE
                for point in metric.histogram.data_points:
                    assert labels(point.attributes)["job_id"] == job
                    yield from _histogram(metric.name, point)
                continue
            if kind == "sum":
                assert metric.sum.is_monotonic
                assert metric.sum.aggregation_temporality == CUMULATIVE
            for number in getattr(metric, kind).data_points:
                named = labels(number.attributes)
                assert named.get("job_id", "") == job
                yield metric.name, number.as_double, named


def _histogram(name: str, point: HistogramDataPoint) -> Iterator[tuple[str, float, Mapping[str, str]]]:
    named = labels(point.attributes)
    bounds = [*map(repr, point.explicit_bounds), "+Inf"]
    for bound, count in zip(bounds, accumulate(point.bucket_counts), strict=True):
        yield f"{name}_bucket", count, {**named, "le": bound}
    yield f"{name}_count", point.count, named
    yield f"{name}_sum", point.sum, named


def starts(request: ExportMetricsServiceRequest) -> dict[Series, int]:
    """Since when each cumulative series counts, as Unix time in ns; a histogram under its own name."""
    found: dict[Series, int] = {}
    for of_job in request.resource_metrics:
        for metric in of_job.scope_metrics[0].metrics:
            for number in metric.sum.data_points:
                found[metric.name, frozenset(labels(number.attributes).items())] = number.start_time_unix_nano
            for point in metric.histogram.data_points:
                found[metric.name, frozenset(labels(point.attributes).items())] = point.start_time_unix_nano
    return found
