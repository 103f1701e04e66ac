"""Requests to a receiver of OTLP: headers and TLS from files, and what becomes of failures."""

from __future__ import annotations

import logging
import ssl
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

from commwatch_agent.config import Config
from commwatch_agent.config_checks import ConfigError
from commwatch_agent.incidents.incident import Incident
from commwatch_agent.otlp.endpoint import Endpoint
from commwatch_agent.otlp.push import LOGS, METRICS, Push, Sender
from tests.agent.otlp.test_events import HANG
from tests.agent.web.test_tls import authority
from tests.helpers import free_port, wait_for
from tests.otlp import Receiver, unpacked
from tests.receivers import NOON, OK, Handler, raw, status

SECRET = "s3cret-t0ken"
EMPTY = ExportMetricsServiceRequest()


def config(url: str, **more: Path) -> Config:
    """Settings with a receiver."""
    return Config(Path("none"), Path("none"), otlp_endpoint=url, **more)  # type: ignore[arg-type]


class Clock:
    """Monotonic seconds, set by hand."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def sender(url: str, clock: Clock | None = None, signal: str = METRICS, **more: Path) -> Sender:
    """What sends to ``url`` every 15 s."""
    return Sender(signal, Endpoint(config(url, **more)), 15.0, clock or Clock(), lambda: NOON)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines in the agent's log since the last call."""
    lines = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return lines


# -- the request --------------------------------------------------------------------------------


def test_headers_from_a_file(tmp_path: Path) -> None:
    """Headers come from the file as it is at each push; comments and blank lines are left out."""
    file = tmp_path / "headers"
    file.write_text(f"# ours\n\nAuthorization: Bearer {SECRET}\nX-Scope-OrgID:7\n")
    with Receiver() as receiver:
        to_it = sender(receiver.url, otlp_headers_file=file)
        assert to_it.send(EMPTY)
        file.write_text("Authorization: Bearer another\n")
        assert to_it.send(EMPTY)
        first, second = receiver.of("/v1/metrics")
    assert (first.headers["Authorization"], first.headers["X-Scope-OrgID"]) == (f"Bearer {SECRET}", "7")
    assert second.headers["Authorization"] == "Bearer another"
    assert "X-Scope-OrgID" not in second.headers
    assert unpacked(first) == b""
    assert (to_it.view.pushes, to_it.view.pushed_at, to_it.view.trouble) == (2, NOON, None)


@pytest.mark.parametrize(
    "line", [SECRET, f"Bad Name: {SECRET}", f"A: {SECRET}\x07", "A:", f"Content-Type: {SECRET}", ": x"]
)
def test_wrong_headers(tmp_path: Path, line: str) -> None:
    """A line that is no header is an error with the file and its number, and without the line, which may be a secret."""
    file = tmp_path / "headers"
    file.write_text(f"Good: one\n{line}\n")
    with pytest.raises(ConfigError, match=f"otlp_headers_file {file}: line 2: needs a header") as error:
        Endpoint(config("http://localhost:4318", otlp_headers_file=file))
    assert SECRET not in str(error.value)
    assert error.value.exit_code == 2


def test_missing_files(tmp_path: Path) -> None:
    """A file that is missing or no certificate is an error that names its setting."""
    nothing, empty = tmp_path / "nothing", tmp_path / "empty"
    empty.write_text("")
    for more, says in (
        ({"otlp_headers_file": nothing}, "otlp_headers_file .*: No such file"),
        ({"otlp_ca_file": nothing}, "otlp_ca_file .*: No such file"),
        ({"otlp_client_cert": empty}, "otlp_client_cert .*empty: "),
    ):
        with pytest.raises(ConfigError, match=says):
            Endpoint(config("https://localhost:4318", **more))


def test_headers_file_that_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the file cannot be read later, nothing is sent, and the log has the reason once."""
    file = tmp_path / "headers"
    file.write_text("A: b\n")
    with Receiver() as receiver:
        to_it = sender(receiver.url, otlp_headers_file=file)
        file.unlink()
        assert [to_it.send(EMPTY), to_it.send(EMPTY)] == [False, False]
        assert receiver.asked == []
    assert said(caplog) == [f"otlp metrics: otlp_headers_file {file}: No such file or directory"]


def test_tls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Only a receiver with a certificate of ``otlp_ca_file`` gets data; it gets the client certificate. A renewed CA file counts at once."""
    ours, others = authority(tmp_path, "ours"), authority(tmp_path, "others")
    cert, key = ours.signed("receiver", "IP:127.0.0.1")
    client_cert, client_key = ours.signed("agent")
    both, ca = tmp_path / "both.pem", tmp_path / "ca.pem"
    both.write_bytes(client_cert.read_bytes() + client_key.read_bytes())
    ca.write_bytes(others.cert.read_bytes())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    context.load_verify_locations(ours.cert)
    context.verify_mode = ssl.CERT_REQUIRED
    with Receiver(tls=context) as receiver:
        to_it = sender(receiver.url, otlp_ca_file=ca, otlp_client_cert=both)
        assert not to_it.send(EMPTY)
        (line,) = said(caplog)
        assert line.startswith(f"otlp metrics: {receiver.url}: TLS: ")
        assert receiver.asked == []
        ca.write_bytes(ours.cert.read_bytes())
        assert to_it.send(EMPTY)
        assert len(receiver.of("/v1/metrics")) == 1
        assert not sender(receiver.url, otlp_ca_file=ca).send(EMPTY)


# -- failures -----------------------------------------------------------------------------------


def test_receiver_that_is_down(caplog: pytest.LogCaptureFixture) -> None:
    """Each failure makes the pause longer, up to two minutes; the log has one line when it begins and one when it is over."""
    caplog.set_level(logging.INFO)
    clock = Clock()
    to_it = sender(f"http://127.0.0.1:{free_port()}", clock)
    pauses = []
    for _ in range(8):
        assert to_it.is_due()
        assert not to_it.send(EMPTY)
        began_s = clock.now_s
        while not to_it.is_due():
            clock.now_s += 0.5
        pauses.append(clock.now_s - began_s)
    assert said(caplog) == [f"otlp metrics: {to_it.view.endpoint}: connection refused"]
    assert 7.5 <= pauses[0] <= 15.5
    assert 60 <= pauses[-1] <= 120.5
    assert to_it.view.failures == 8
    with Receiver() as receiver:
        to_it._endpoint.url = receiver.url
        assert to_it.send(EMPTY)
    assert said(caplog) == ["otlp metrics: works again"]
    assert to_it.is_due()


@pytest.mark.parametrize("code", [429, 503])
def test_pause_that_the_receiver_requests(code: int, caplog: pytest.LogCaptureFixture) -> None:
    """A receiver that is overloaded is left alone for as long as it requests."""
    clock = Clock()
    with Receiver(status(code, "slow down", Retry_After="300"), OK) as receiver:
        to_it = sender(receiver.url, clock)
        assert not to_it.send(EMPTY)
        clock.now_s += 299
        assert not to_it.is_due()
        clock.now_s += 2
        assert to_it.is_due()
        assert to_it.send(EMPTY)
    assert said(caplog) == [f"otlp metrics: {receiver.url}: answers {code}: slow down"]


def test_refusal_shows_no_secret(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A refusal is one line in the log with the receiver's reason, without headers that it repeats; it is not sent again."""
    file = tmp_path / "headers"
    file.write_text(f"Authorization: Bearer {SECRET}\n")
    with Receiver(status(401, f"bad token {SECRET}")) as receiver:
        to_it = sender(receiver.url, otlp_headers_file=file)
        assert to_it.send(EMPTY)
    assert said(caplog) == [f"otlp metrics: {receiver.url}: answers 401: bad token ***"]
    assert to_it.view.trouble is not None


def test_refusal_in_protobuf(caplog: pytest.LogCaptureFixture) -> None:
    """The reason of a refusal is also read from a ``google.rpc.Status``, in which collectors send it."""
    reason = b"field is missing"
    body = b"\x08\x0d\x12" + bytes([len(reason)]) + reason  # code 13 and the message; 13 is also a line break
    with Receiver(raw(b"HTTP/1.1 400 x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))) as receiver:
        sender(receiver.url).send(EMPTY)
    assert said(caplog) == [f"otlp metrics: {receiver.url}: answers 400: field is missing"]


def test_redirect(tmp_path: Path) -> None:
    """A redirect is not followed, because the headers are for the receiver only."""
    file = tmp_path / "headers"
    file.write_text(f"Authorization: Bearer {SECRET}\n")
    with Receiver() as elsewhere, Receiver(status(307, Location=f"{elsewhere.url}/v1/metrics")) as receiver:
        to_it = sender(receiver.url, otlp_headers_file=file)
        to_it.send(EMPTY)
        assert elsewhere.asked == []
    assert "a redirect, which is not followed" in str(to_it.view.trouble)


def test_slow_receiver() -> None:
    """A receiver that never answers, or answers a byte at a time, is given up at the limit."""
    with Receiver() as receiver:
        receiver._answers = [receiver.never, receiver.drip]
        to_it = sender(receiver.url)
        assert not to_it.send(EMPTY, limit_s=0.3)
        assert not to_it.send(EMPTY, limit_s=0.3)
    assert to_it.view.trouble == f"{receiver.url}: no answer within 0.3 s"


def partial(message: ExportMetricsServiceResponse | ExportLogsServiceResponse) -> Receiver:
    """A receiver that accepts with this message."""
    body = message.SerializeToString()

    def answer(handler: Handler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    return Receiver(answer)


def test_partial_success(caplog: pytest.LogCaptureFixture) -> None:
    """What a receiver rejects of a request that it accepts is shown, and not sent again; an empty answer and a text are fine."""
    of_metrics = ExportMetricsServiceResponse()
    of_metrics.partial_success.rejected_data_points = 3
    of_metrics.partial_success.error_message = "too old"
    of_logs = ExportLogsServiceResponse()
    of_logs.partial_success.rejected_log_records = 2
    for signal, message, says in ((METRICS, of_metrics, "3 of a push: too old"), (LOGS, of_logs, "2 of a push")):
        with partial(message) as receiver:
            to_it = sender(receiver.url, signal=signal)
            assert to_it.send(EMPTY)
            assert to_it.is_due()
            assert said(caplog) == [f"otlp {signal}: {receiver.url}: rejected {says}"]
            assert to_it.send(EMPTY)
            assert said(caplog) == []
    for answer in (status(200, "fine"), status(200)):
        with Receiver(answer) as receiver:
            to_it = sender(receiver.url)
            assert to_it.send(EMPTY)
            assert to_it.view.trouble is None


# -- both signals -------------------------------------------------------------------------------


def push(receiver: Receiver, stop: threading.Event, incidents: list[Incident] | None) -> Push:
    """What pushes nothing but incidents every 10 ms."""
    known = None if incidents is None else lambda: incidents
    return Push(Endpoint(config(receiver.url)), {}, every_s=0.01, collect=list, incidents=known, stop=stop)


def test_records_wait_for_the_receiver() -> None:
    """Records that a receiver could not take are sent when it can, once; records that it refuses are dropped, and counted."""
    with Receiver(status(503), status(400), OK) as receiver:
        known = [HANG]
        ours = push(receiver, threading.Event(), known)
        ours._push_logs()
        assert {signal: view.dropped for signal, view in ours.views().items()} == {METRICS: 0, LOGS: 0}
        wait_for(ours._logs.is_due, "the pause")
        ours._push_logs()
        assert {signal: view.dropped for signal, view in ours.views().items()} == {METRICS: 0, LOGS: 1}
        wait_for(ours._logs.is_due, "the pause")
        known.append(replace(HANG, id="another", says="another"))
        ours._push_logs()
        ours._push_logs()
        assert [record.body.string_value for record in receiver.records()] == [
            f"Hang: rank 1: {HANG.says}",
            f"Hang: rank 1: {HANG.says}",
            "Hang: rank 1: another",
        ]


def test_signals_are_independent() -> None:
    """A receiver that hangs for logs still gets metrics, and the end of the agent does not wait for it."""
    stop = threading.Event()
    with Receiver() as receiver:

        def answer(handler: Handler) -> None:
            (receiver.never if handler.asked.path.endswith(LOGS) else OK)(handler)

        receiver._answers = [answer]
        ours = push(receiver, stop, [HANG])
        for each in ours.threads:
            each.thread.start()
        wait_for(lambda: receiver.of("/v1/logs"), "the records")
        before = len(receiver.of("/v1/metrics"))
        wait_for(lambda: len(receiver.of("/v1/metrics")) > before + 3, "more metrics")
        stop.set()
        ours.close()
        assert any(each.thread.is_alive() for each in ours.threads)
    for each in ours.threads:
        each.thread.join()


def test_last_push() -> None:
    """At its end the agent pushes once more, so that the receiver has the last values and the last records."""
    stop = threading.Event()
    stop.set()
    with Receiver() as receiver:
        known: list[Incident] = []
        ours = push(receiver, stop, known)
        for each in ours.threads:
            each.thread.start()
            each.thread.join()
        known.append(HANG)
        ours.close()
        assert len(receiver.of("/v1/metrics")) == 2
        assert len(receiver.records()) == 1


def test_without_logs() -> None:
    """With ``otlp_logs = false`` there are only metrics."""
    stop = threading.Event()
    stop.set()
    with Receiver() as receiver:
        ours = push(receiver, stop, None)
        for each in ours.threads:
            each.thread.start()
        ours.close()
        assert {asked.path for asked in receiver.asked} == {"/v1/metrics"}
        assert list(ours.views()) == [METRICS]
