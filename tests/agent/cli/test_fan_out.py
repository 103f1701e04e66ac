"""Many agents queried at once: the failures of some are reported and do not delay the others."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from commwatch_agent.commands.diagnose import ask
from tests.agent.web.routes.test_jobs import rings_of
from tests.helpers import MS, agent, end_rank, free_port, group_entry, identity, operation, wait_for, write_ring

HEALTHY, EACH = 20, 4
Behaviour = Callable[[socket.socket, threading.Event], None]


@contextmanager
def recorded(answers: dict[str, bytes], rank: int) -> Iterator[str]:
    """An agent that reports its own rank with the data that another agent reported for its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            told = json.loads(answers[self.path])
            for each in told:
                one = {"rank": rank, "ranks": [rank]}
                each |= {name: value for name, value in one.items() if name in each}
            self.wfile.write(json.dumps(told).encode())

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def strange(behave: Behaviour) -> Iterator[str]:
    """A server that does with each connection what it likes, until the end."""
    over, threads = threading.Event(), list[threading.Thread]()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)

        def serve(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                behave(connection, over)

        def accept() -> None:
            while not over.is_set():
                with contextlib.suppress(TimeoutError):
                    threads.append(threading.Thread(target=serve, args=(server.accept()[0],)))
                    threads[-1].start()

        threads.append(threading.Thread(target=accept))
        threads[0].start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            over.set()
            for thread in threads:
                thread.join()


def hanging(_: socket.socket, over: threading.Event) -> None:
    """It accepts and says nothing."""
    over.wait()


def trickling(connection: socket.socket, over: threading.Event) -> None:
    """It never ends its headers, and is never silent for long."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
    while not over.wait(0.1):
        connection.sendall(b"x")


def answers_of(directory: Path) -> dict[str, bytes]:
    """What a real agent answers to ``diagnose`` of a job with one rank."""
    now = time.monotonic_ns()
    made = [operation(start_ns=now - MS, end_ns=now, seq=0)]
    writer = write_ring(rings_of(directory), made, [group_entry(0, (0,))], wall_offset_ns=0, world_size=1)
    with agent(directory) as running:
        wait_for(lambda: running.get("/api/v1/jobs"), "the job")
        which = f"job={identity()['job']}"
        paths = ["jobs", "incidents?state=open&state=pending", f"ranks?{which}", f"verdicts?{which}"]
        told = {f"/api/v1/{path}": json.dumps(running.get(f"/api/v1/{path}")).encode() for path in paths}
    end_rank(writer)
    return told


def test_some_do_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of agents that refuse, hang, or trickle headers without end each is named with its reason; all others are heard in time."""
    monkeypatch.setattr("commwatch.api.client._TIMEOUT_S", 2.0)
    monkeypatch.setattr("commwatch.api.client.TOGETHER_S", 6.0)
    answers = answers_of(tmp_path)
    with ExitStack() as stack:
        good = [stack.enter_context(recorded(answers, rank)) for rank in range(HEALTHY)]
        dead = [f"http://127.0.0.1:{free_port()}" for _ in range(EACH)]
        mute = [stack.enter_context(strange(hanging)) for _ in range(EACH)]
        slow = [stack.enter_context(strange(trickling)) for _ in range(EACH)]
        seen = ask([*dead, *mute, *slow, *good], None)
    assert sorted(view.rank for view in seen.ranks) == list(range(HEALTHY))
    assert seen.verdicts == []
    assert set(seen.silent) == {*dead, *mute, *slow}
    assert all("refused" in seen.silent[url] for url in dead)
    assert {seen.silent[url] for url in mute} == {"timed out"}
    assert all(seen.silent[url].startswith("no answer within") for url in slow)
