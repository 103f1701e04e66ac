"""Pushes metrics and events to the receiver, each in a thread of its own, so that neither delays the other or the agent."""

from __future__ import annotations

import gzip
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsPartialSuccess,
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

from commwatch_agent.model.api_views import PushView
from commwatch_agent.otlp import events, metrics
from commwatch_agent.otlp.endpoint import Endpoint
from commwatch_agent.runtime.periodic import PeriodicThread
from commwatch_alerts.delivery import Retry
from commwatch_alerts.receivers.http import post
from commwatch_alerts.receivers.sending import CannotSend, said, shown

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from commwatch_agent.incidents.incident import Incident

log = logging.getLogger("commwatch")
METRICS, LOGS = "metrics", "logs"
#: Seconds that a request may take; the same for the last one, when the agent ends.
_LIMIT_S, _LAST_S = 10.0, 2.0
#: Longest pause in seconds after failures, unless the receiver requests a longer one.
_MOST_PAUSE_S = 120.0
#: The fastest level: a third of the CPU time of the default, for a third more bytes.
_LEVEL = 1
_MOST_ANSWER = 4096


class Sender:
    """Sends the requests of one signal, and keeps its state. One thread at a time calls ``send``.

    Args:
        every_s: pause between two pushes, in seconds.
        clock: monotonic seconds.
        wall: Unix time in seconds.
    """

    def __init__(
        self,
        signal: str,
        endpoint: Endpoint,
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._signal, self._endpoint, self._clock, self._wall = signal, endpoint, clock, wall
        self._retry = Retry(every_s, max(every_s, _MOST_PAUSE_S))
        self._failures_in_row, self._not_before_s = 0, float("-inf")
        self._reason: str | None = None
        self.view = PushView(shown(endpoint.url))

    def is_due(self) -> bool:
        """Return whether no pause after a failure is under way."""
        return self._clock() >= self._not_before_s

    def send(
        self, request: ExportMetricsServiceRequest | ExportLogsServiceRequest, limit_s: float | None = None
    ) -> bool:
        """Send a request; return False if the receiver may accept it later.

        Args:
            limit_s: seconds that it may take; ``None``: the usual ones.
        """
        try:
            headers = self._endpoint.headers()
            answer = post(
                f"{self._endpoint.url}/v1/{self._signal}",
                gzip.compress(request.SerializeToString(), _LEVEL),
                {**headers, "Content-Type": "application/x-protobuf", "Content-Encoding": "gzip"},
                *_secrets(headers),
                limit_s=_LIMIT_S if limit_s is None else limit_s,
                context=self._endpoint.context(),
                most_answer=_MOST_ANSWER,
                text_of=_message_of,
            )
        except CannotSend as failure:
            self._failed(str(failure), failure.after_s)
            return not failure.again
        except (OSError, ValueError) as error:  # of the files that the settings name
            self._failed(str(error), None)
            return False
        number, why = _rejected(self._signal, answer)
        self._failures_in_row = 0
        self.view = replace(self.view, pushed_at=self._wall(), pushes=self.view.pushes + 1)
        if number:
            reason = said(why, *_secrets(headers))
            self._say(f"{self.view.endpoint}: rejected {number} of a push{f': {reason}' if reason else ''}", reason)
        else:
            self._say(None)
        return True

    def _failed(self, why: str, after_s: float | None) -> None:
        self._failures_in_row += 1
        self._not_before_s = self._clock() + max(self._retry.wait_s(self._failures_in_row), after_s or 0.0)
        self.view = replace(self.view, failures=self.view.failures + 1)
        self._say(why)

    def _say(self, trouble: str | None, reason: str | None = None) -> None:
        """Log a change of state in one line; ``reason``: the part of ``trouble`` whose change counts, by default all of it."""
        reason = trouble if reason is None else reason
        before, self._reason = self._reason, reason
        self.view = replace(self.view, trouble=trouble)
        if reason is None and before is not None:
            log.info("otlp %s: works again", self._signal)
        if trouble is not None and reason != before:
            log.warning("otlp %s: %s", self._signal, trouble)


def _rejected(signal: str, answer: bytes) -> tuple[int, str]:
    """Return how many points or records the receiver rejected of a request that it accepted, and why."""
    of_metrics, of_logs = ExportMetricsServiceResponse(), ExportLogsServiceResponse()
    try:
        if signal == METRICS:
            of_metrics.ParseFromString(answer)
            return of_metrics.partial_success.rejected_data_points, of_metrics.partial_success.error_message
        of_logs.ParseFromString(answer)
    except DecodeError:  # a text such as "ok"
        return 0, ""
    return of_logs.partial_success.rejected_log_records, of_logs.partial_success.error_message


def _message_of(answer: bytes) -> str | bytes:
    """Return the message in the body of an error, which is a ``google.rpc.Status`` or a text."""
    # A Status begins with the same two fields, a number and a text; its own package would be a further dependency.
    status = ExportLogsPartialSuccess()
    try:
        status.ParseFromString(answer)
    except DecodeError:
        return answer
    return status.error_message or answer


def _secrets(headers: Mapping[str, str]) -> list[str]:
    """Return the values of headers, and the token after a scheme such as ``Bearer``."""
    return [part for value in headers.values() for part in (value, *value.split()[1:])]


class Push:
    """Everything that the agent pushes.

    Args:
        endpoint: of the receiver.
        attributes: of the agent's resource.
        every_s: pause between two pushes, in seconds.
        collect: returns the families that ``/metrics`` shows.
        incidents: returns what is wrong and what was; ``None``: no log records.
        stop: set when the agent ends.
        wall: Unix time in ns.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        attributes: Mapping[str, str],
        *,
        every_s: float,
        collect: Callable[[], Iterable[Metric]],
        incidents: Callable[[], Iterable[Incident]] | None,
        stop: threading.Event,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        self._attributes, self._collect, self._incidents, self._wall = attributes, collect, incidents, wall
        self._starts, self._events = metrics.Starts(wall()), events.Events(wall() / 1e9)
        self._metrics, self._logs = (Sender(signal, endpoint, every_s) for signal in (METRICS, LOGS))
        self.threads = [PeriodicThread("otlp", self._push_metrics, every_s, stop)]
        if incidents is not None:
            self.threads.append(PeriodicThread("otlp", self._push_logs, every_s, stop))

    def views(self) -> dict[str, PushView]:
        """Return the state of each signal."""
        logs = replace(self._logs.view, dropped=self._events.dropped)
        return {METRICS: self._metrics.view, **({} if self._incidents is None else {LOGS: logs})}

    def close(self) -> None:
        """Push once more, so that the receiver has the last values; at most ``_LAST_S`` for each signal. Call it after ``stop`` is set."""
        for each in self.threads:
            each.thread.join(_LAST_S / len(self.threads))
            if each.thread.is_alive():  # the receiver is slow
                return
        self._push_metrics(_LAST_S)
        self._push_logs(_LAST_S)

    def _push_metrics(self, limit_s: float | None = None) -> None:
        if self._metrics.is_due():
            # Cumulative values: the next push makes up for one that failed, so none has to wait.
            request = metrics.request(self._collect(), self._attributes, self._starts, self._wall())
            self._metrics.send(request, limit_s)

    def _push_logs(self, limit_s: float | None = None) -> None:
        if self._incidents is None:
            return
        self._events.note(self._incidents(), self._wall() / 1e9)
        taken = self._events.take() if self._logs.is_due() else []
        if not taken:
            return
        failures = self._logs.view.failures
        if not self._logs.send(events.request(taken, self._attributes, self._wall()), limit_s):
            self._events.put_back(taken)
        elif self._logs.view.failures > failures:  # refused for good
            self._events.drop(len(taken))
