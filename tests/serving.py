"""The server of an agent without the agent: its gate, its connections and its TLS, before any application."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from commwatch.wire import tokens
from commwatch_agent.config_sources import load
from commwatch_agent.web.listener import Server, listen
from tests.helpers import PATIENCE_S, wait_for


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def detail(self) -> str:
        """Of problem details; anything else fails."""
        assert self.headers["content-type"] == "application/problem+json", self.body
        problem = json.loads(self.body)
        assert problem["status"] == self.status
        return str(problem["detail"])


class Served(NamedTuple):
    """Where it listens."""

    port: int
    directory: Path

    @property
    def token(self) -> str:
        """What it has to be shown."""
        return tokens.read_own(self.directory / tokens.NAME, os.getuid())

    def ask(
        self,
        path: str = "/",
        method: str = "GET",
        body: bytes | None = None,
        context: ssl.SSLContext | None = None,
        **headers: str,
    ) -> Answer:
        """One request, over TLS where there is a ``context``; ``_`` in names of headers is ``-``."""
        connection: http.client.HTTPConnection
        if context is None:
            connection = http.client.HTTPConnection("localhost", self.port, timeout=PATIENCE_S)
        else:
            connection = http.client.HTTPSConnection("localhost", self.port, timeout=PATIENCE_S, context=context)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            response = connection.getresponse()
            return Answer(
                response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
            )
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        """A connection without a request."""
        return socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)


async def greeting(_: Scope, receive: Receive, send: Send) -> None:
    """An application that reads what it is sent, and says how much that was."""
    taken = 0
    while True:
        message = await receive()
        taken += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/html")]})
    await send({"type": "http.response.body", "body": str(taken).encode()})


@contextmanager
def serving(directory: Path, app: ASGIApp = greeting, settings: str = "") -> Iterator[Served]:
    """A server on a free port, with lines of ``commwatch.toml``; ended at the end."""
    directory.mkdir(mode=0o700, exist_ok=True)
    file = directory / "settings.toml"
    file.write_text(f"port = 0\n{settings}\n")
    config = load({}, file, dir=str(directory))
    listener = listen(config)
    address, port = listener.getsockname()[:2]
    made = Server(app, config, address)
    thread = threading.Thread(target=made.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_for(lambda: made.started, "the server")
        yield Served(port, directory)
    finally:
        made.should_exit = True
        thread.join()
