"""A RAS of our own: answers as NCCL's does (NVIDIA/nccl, src/ras/client_support.cc), or badly."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

#: What is sent in answer to a line; ``None``: nothing, and the connection is closed.
Answers = Callable[[str], bytes | None]


class RasServer:
    """The address of the server, and the requests it got."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.asked: list[str] = []
        self.status: bytes = b""
        #: Knows ``SET FORMAT``, as from NCCL 2.28.7 on.
        self.knows_json = True

    def answer(self, command: str) -> tuple[bytes, bool]:
        """What to send, and whether to close then."""
        self.asked.append(command)
        if command.lower().startswith("client protocol "):
            return b"SERVER PROTOCOL 2\n", False
        if command.lower() == "set format json" and self.knows_json:
            return b"OK\n", False
        if command.lower() in ("status", "verbose status"):
            return self.status, True
        return f"ERROR: Unknown command {command}\n".encode(), False


@contextmanager
def ras_server(status: bytes = b"", knows_json: bool = True) -> Iterator[RasServer]:
    """A RAS on a free port of this machine."""
    with listening() as listener:
        server = RasServer(listener.getsockname()[1])
        server.status, server.knows_json = status, knows_json

        def serve(connection: socket.socket) -> None:
            with connection.makefile("rb") as lines:
                for line in lines:
                    data, done = server.answer(line.decode("utf-8", "replace").rstrip("\n"))
                    connection.sendall(data)
                    if done:
                        return

        with serving(listener, serve):
            yield server


@contextmanager
def listening() -> Iterator[socket.socket]:
    """A socket that listens on a free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@contextmanager
def serving(listener: socket.socket, serve: Callable[[socket.socket], None]) -> Iterator[None]:
    """Serve one connection after the other until the end."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            with suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    serve(connection)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        with suppress(OSError), socket.create_connection(listener.getsockname(), timeout=5):
            pass  # so that it sees that it is to end
        thread.join()
