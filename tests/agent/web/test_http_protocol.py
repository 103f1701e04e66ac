"""Connections that are slow, idle, too many, or no HTTP: each ends, and never as an error of the server's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from commwatch_agent.web import gate, http_protocol
from tests.helpers import PATIENCE_S, RunningAgent, agent, examples, wait_for
from tests.serving import Served, serving


@pytest.fixture
def impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server that waits but half a second."""
    monkeypatch.setattr(http_protocol, "REQUEST_S", 0.5)
    monkeypatch.setattr(http_protocol, "TAKE_S", 0.5)
    with serving(tmp_path / "run", endless) as served:
        yield served


async def endless(scope: Scope, receive: Receive, send: Send) -> None:
    """Sends at ``/endless`` until the client is gone, and returns an empty answer elsewhere."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/endless":
        await receive()
        gone = asyncio.ensure_future(receive())
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)
    await send({"type": "http.response.body"})


def rest(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    connection.settimeout(PATIENCE_S)
    pieces = []
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
        b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\ntok",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HT",
    ],
)
def test_half_a_request(impatient: Served, begun: bytes) -> None:
    """Who sends half a request, or nothing, or half a second one, is let go, also if more of it drips in."""
    with impatient.connect() as connection:
        connection.sendall(begun)
        connection.settimeout(0.05)
        end, said = time.monotonic() + PATIENCE_S, b""
        while True:
            assert time.monotonic() < end, "the connection stays"
            try:
                piece = connection.recv(65536)
                if not piece:
                    break
                said += piece
            except TimeoutError:
                if begun:
                    with contextlib.suppress(OSError):
                        connection.sendall(b"a")
            except ConnectionResetError:
                break
    assert re.findall(rb"HTTP/1.1 (\d+)", said)[-1:] in ([b"408"], [b"401"], [b"200"])


def test_does_not_take_its_answer(impatient: Served) -> None:
    """A connection whose client does not read its response is closed, and its response is not kept in memory."""
    with impatient.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(b"GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n")
        end = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < end, "the connection stays"
            try:
                connection.sendall(b"x")  # fails once the other side has gone
            except OSError:
                break
            time.sleep(0.05)


#: A request that is being worked on until the test says otherwise.
ASK = b"GET /held HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Crowded(NamedTuple):
    """A server, what lets it answer, and what it works on."""

    served: Served
    go: threading.Event
    at_work: list[Scope]


@contextlib.contextmanager
def crowded(directory: Path, monkeypatch: pytest.MonkeyPatch, settings: str = "") -> Iterator[Crowded]:
    """A server that takes five connections, and whose answers at ``/held`` wait for the event."""
    monkeypatch.setattr(http_protocol, "MOST_CONNECTIONS", 5)
    monkeypatch.setattr(http_protocol, "REQUEST_S", 3600)
    go, at_work = threading.Event(), []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/held":
            at_work.append(scope)
            await asyncio.to_thread(go.wait, PATIENCE_S)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    with serving(directory, app, settings) as served:
        try:
            yield Crowded(served, go, at_work)
        finally:
            go.set()


def is_open(connection: socket.socket) -> bool:
    """Whether the other side has not ended it; it says nothing else."""
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


def test_all_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If requests of the maximum number of connections are in progress, the next gets a 503 with that reason, and those continue."""
    monkeypatch.setattr(gate, "_AT_ONCE", {gate.LIVE: 5})
    with crowded(tmp_path / "run", monkeypatch) as (served, go, at_work), contextlib.ExitStack() as stack:
        there = [stack.enter_context(served.connect()) for _ in range(5)]
        for one in there:
            one.sendall(ASK)
        wait_for(lambda: len(at_work) == 5, "all of them to be worked on")
        with served.connect() as next_one:
            said = rest(next_one)
        assert said.startswith(b"HTTP/1.1 503")
        assert b"Retry-After: 1" in said
        assert b"5 connections are in use" in said
        go.set()
        for one in there:
            assert one.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("begun", [b"", b"GET /metr", ASK.replace(b"/held", b"/")])
def test_silent_ones_give_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    """Any number of connections that are idle, incomplete, or answered block no other: the oldest is closed for the next."""
    with crowded(tmp_path / "run", monkeypatch) as (served, _, _), contextlib.ExitStack() as stack:
        silent = []
        for _ in range(12):
            silent.append(stack.enter_context(served.connect()))
            silent[-1].sendall(begun)
            if begun.endswith(b"\r\n\r\n"):
                assert silent[-1].recv(65536).startswith(b"HTTP/1.1 200")
            assert served.ask("/healthz").status == 200
        wait_for(lambda: not any(is_open(one) for one in silent[:7]), "the oldest to be let go")
        assert is_open(silent[-1])


def test_work_does_not_give_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection whose request is being worked on stays, however many silent ones come."""
    with crowded(tmp_path / "run", monkeypatch) as (served, go, at_work), contextlib.ExitStack() as stack:
        asking = stack.enter_context(served.connect())
        asking.sendall(ASK)
        wait_for(lambda: at_work, "it to be worked on")
        for _ in range(12):
            stack.enter_context(served.connect())
            assert served.ask("/healthz").status == 200
        go.set()
        assert asking.recv(65536).startswith(b"HTTP/1.1 200")


def test_who_does_not_take_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that do not read their answers block no other either."""
    monkeypatch.setattr(http_protocol, "MOST_CONNECTIONS", 5)
    monkeypatch.setattr(http_protocol, "TAKE_S", 3600)
    with serving(tmp_path / "run", endless) as served, contextlib.ExitStack() as stack:
        for _ in range(12):
            greedy = stack.enter_context(served.connect())
            greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            greedy.sendall(b"GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert greedy.recv(12) == b"HTTP/1.1 200"
            wait_for(lambda: served.ask("/").status == 200, "an answer")


@dataclass
class Open:
    """A connection as ``make_room`` sees it; notes when it is closed."""

    owner: str
    began_s: float
    waits_since_s: float | None = None
    closed: bool = False

    def give_way(self) -> None:
        """Note that it is closed."""
        self.closed = True

    __hash__ = object.__hash__


def room(monkeypatch: pytest.MonkeyPatch, there: str, newest: str, *, waiting: bool) -> list[int] | None:
    """The places in ``there``, which has the client of each connection, that are closed for one of ``newest``; ``None``: it is refused."""
    monkeypatch.setattr(http_protocol, "MOST_CONNECTIONS", len(there))
    opened = [Open(client, n, n if waiting else None) for n, client in enumerate(there)]
    last = Open(newest, len(there), len(there))
    if not http_protocol.make_room({*opened, last}, last):  # type: ignore[arg-type]
        return None
    return [n for n, each in enumerate(opened) if each.closed]


def test_room_of_the_client_with_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client with the most connections makes room: the one that has waited longest; else its newest one, unless it has few itself."""
    assert room(monkeypatch, "baaab", "c", waiting=True) == [1]
    assert room(monkeypatch, "abcde", "c", waiting=True) == [0]
    assert room(monkeypatch, "baaab", "c", waiting=False) == [3]
    assert room(monkeypatch, "baaab", "b", waiting=False) is None
    assert room(monkeypatch, "baaab", "a", waiting=False) is None
    assert room(monkeypatch, "abcde", "f", waiting=False) is None


def test_large_headers_in_pieces(tmp_path: Path) -> None:
    """Headers that do not end are refused with what is taken, as problem details."""
    with serving(tmp_path / "run") as served, served.connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        with contextlib.suppress(OSError):
            for _ in range(20):
                connection.sendall(b"X: " + b"a" * 4000 + b"\r\n")
        said = rest(connection)
    assert said.startswith(b"HTTP/1.1 431") or not said  # the rest of them may have met a closed door


# -- anything at all ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    with agent(tmp_path_factory.mktemp("raw") / "run") as made:
        yield made


def test_silent_crowd(running: RunningAgent) -> None:
    """A real agent answers beside more silent connections than there may be, and beside those that come in the place of others."""
    port = int(running.url.rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        for n in range(3 * http_protocol.MOST_CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
            if n % 32 == 0:
                assert running.get("/healthz") == "ok\n"


PARTS = st.sampled_from(
    [
        b"GET ", b"POST ", b"OPTIONS ", b"/ ", b"/metrics ", b"/api/v1/ops?limit=1 ", b"/%ff%00 ", b"//login ", b"* ", b"http://[::1/ ",
        b"HTTP/1.1\r\n", b"HTTP/1.0\r\n", b"HTTP/2.0\r\n", b"\r\n", b"Host: localhost\r\n", b"Host: [\r\n", b"Cookie: ;;=\r\n",
        b"Authorization: Bearer \xff\r\n", b"Origin: http://[\r\n", b"Content-Length: 5\r\n", b"Content-Length: -1\r\n",
        b"Transfer-Encoding: chunked\r\n", b"Connection: upgrade\r\nUpgrade: websocket\r\n", b"Expect: 100-continue\r\n", b"5\r\nabcde\r\n",
        b"0\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ]
)  # fmt: skip


@examples(400)
@given(st.lists(PARTS | st.binary(max_size=40), max_size=12))
def test_any_bytes(running: RunningAgent, parts: list[bytes]) -> None:
    """To any bytes, the response is none or a clear error, the connection ends, and the agent continues."""
    port = int(running.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(b"".join(parts))
            connection.shutdown(socket.SHUT_WR)
        said = rest(connection)
    assert not [code for code in re.findall(rb"^HTTP/1.1 (\d+)", said, re.MULTILINE) if code.startswith(b"5")]
    assert running.process.poll() is None


def test_agent_after_any_bytes(running: RunningAgent, caplog: pytest.LogCaptureFixture) -> None:
    """After all that the agent answers as ever."""
    with caplog.at_level(logging.ERROR):
        assert running.get("/healthz") == "ok\n"
        assert running.get("/api/v1/jobs") == []
