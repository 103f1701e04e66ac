"""Receivers of our own for alerts: servers on loopback that answer well, badly or never, and a real Alertmanager."""

from __future__ import annotations

import json
import shutil
import socketserver
import ssl
import subprocess
import threading
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from commwatch_alerts.model import FIRING, RESOLVED, Alert
from tests.helpers import PATIENCE_S, fetch, free_port, needs, wait_for

_L = TypeVar("_L", bound="Listening")
#: 2026-11-21T00:00:00Z
NOON = 1_795_219_200.0


def alert(name: str = "CommShareHigh", state: str = FIRING, at: float = NOON, **labels: str) -> Alert:
    """An alert that became active at ``at``, and ended ten minutes later if it has ended."""
    said = {"summary": f"{name} of a job", "description": "comm share 42%", "runbook_url": f"https://runbook/#{name}"}
    named = {"alertname": name, "severity": "warning", "job_id": "train", **labels}
    ended = at + 600 if state == RESOLVED else None
    return Alert(name, named, said, 0.42, state, active_at=at, fired_at=at + 60, resolved_at=ended)


class Asked(NamedTuple):
    """A request that a server got."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Handler(socketserver.StreamRequestHandler):
    """A connection, with the request that came over it."""

    asked: Asked


#: What to do with a connection once the request has been read.
Answer = Callable[[Handler], None]


def status(code: int, body: str = "", **headers: str) -> Answer:
    """A whole answer."""
    lines = [
        f"HTTP/1.1 {code} x",
        f"Content-Length: {len(body)}",
        *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items()),
    ]
    return raw("\r\n".join([*lines, "", body]).encode())


def raw(answer: bytes) -> Answer:
    """Any bytes, and the end of the connection."""

    def send(handler: Handler) -> None:
        handler.wfile.write(answer)

    return send


OK = status(200, "ok")


class Listening:
    """A TCP server on a free port of loopback, in a separate thread, until the block ends."""

    def __init__(self, handler: type[socketserver.BaseRequestHandler], tls: ssl.SSLContext | None = None) -> None:
        class Listener(socketserver.ThreadingTCPServer):
            daemon_threads, request_queue_size = True, 128

        #: Ends answers that never end.
        self.over = threading.Event()
        self._server = Listener(("127.0.0.1", 0), handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def __enter__(self: _L) -> _L:
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Server(Listening):
    """An HTTP server that gives its answers one after the other, the last one repeatedly, and keeps the requests."""

    def __init__(self, *answers: Answer, tls: ssl.SSLContext | None = None) -> None:
        self.asked: list[Asked] = []
        self._answers = list(answers) or [OK]
        outer = self

        class Served(Handler):
            def handle(self) -> None:
                outer._handle(self)

        super().__init__(Served, tls)
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.port}/hook"

    def _handle(self, handler: Handler) -> None:
        try:
            path = handler.rfile.readline().decode().split(" ")[1]
            headers = {}
            while line := handler.rfile.readline().decode().strip():
                name, _, value = line.partition(": ")
                headers[name] = value
            length = int(headers.get("Content-Length", 0))
            body = handler.rfile.read(length)
            if len(body) < length:  # killed while it sent
                return
            answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
            handler.asked = Asked(path, headers, body)
            self.asked.append(handler.asked)
            answer(handler)
        except (OSError, IndexError):
            return  # the other side has gone

    def never(self, handler: Handler) -> None:
        """An answer: none, and the connection stays."""
        self.over.wait(PATIENCE_S)

    def drip(self, handler: Handler) -> None:
        """An answer: one byte of a header after the other, without an end."""
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while not self.over.wait(0.02):
            handler.wfile.write(b"x")

    def flood(self, handler: Handler) -> None:
        """An answer: an error with a body that does not end."""
        handler.wfile.write(b"HTTP/1.1 400 x\r\n\r\n")
        while not self.over.is_set():
            handler.wfile.write(b"x" * 65536)


@contextmanager
def certificate(directory: Path) -> Iterator[tuple[ssl.SSLContext, Path]]:
    """What a server on 127.0.0.1 shows, made for the occasion, and the file of who vouches for it: itself."""
    needs(shutil.which("openssl"), "openssl")
    key, file = directory / "key.pem", directory / "cert.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    command += ["-keyout", str(key), "-out", str(file), "-subj", "/CN=ours", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file, key)
    yield context, file


class RunningAlertmanager:
    """An Alertmanager and how to ask it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def alerts(self) -> list[dict[str, Any]]:
        """What it holds, ended ones excluded."""
        found = json.loads(fetch(f"{self.url}/api/v2/alerts")[0])
        assert isinstance(found, list)
        return found

    def ready(self) -> bool:
        """It answers."""
        try:
            return bool(fetch(f"{self.url}/-/ready"))
        except (urllib.error.URLError, OSError):
            return False


@contextmanager
def alertmanager(directory: Path, webhook: str) -> Iterator[RunningAlertmanager]:
    """An Alertmanager on a free port of 127.0.0.1 that sends ``webhook`` all alerts at once, by alert and job."""
    directory.mkdir(exist_ok=True)
    times = {"group_wait": "0s", "group_interval": "1s", "repeat_interval": "4h"}
    config = {
        "route": {"receiver": "ours", "group_by": ["alertname", "job_id"], **times},
        "receivers": [{"name": "ours", "webhook_configs": [{"url": webhook, "send_resolved": True}]}],
    }
    (directory / "am.yml").write_text(json.dumps(config))  # JSON is YAML
    with started_alertmanager(directory, directory / "am.yml", free_port()) as running:
        yield running


@contextmanager
def started_alertmanager(directory: Path, config: Path, port: int) -> Iterator[RunningAlertmanager]:
    """An Alertmanager with this configuration on a port of 127.0.0.1, and its data and log in the directory."""
    needs(shutil.which("prometheus-alertmanager"), "prometheus-alertmanager")
    command = ["prometheus-alertmanager", f"--config.file={config}", f"--storage.path={directory}/notifications"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address="]
    running = RunningAlertmanager(port)
    with open(directory / "alertmanager.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:

        def ready() -> bool:
            assert process.poll() is None, (directory / "alertmanager.log").read_text()
            return running.ready()

        wait_for(ready, "Alertmanager")
        yield running
    finally:
        process.terminate()
        process.wait(30)
