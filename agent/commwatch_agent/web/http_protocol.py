"""Connections of an agent, with limits.

A client that is slow to send or to read is disconnected, sooner if others need the room. Invalid HTTP gets an answer.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from collections.abc import Iterable
from functools import cached_property
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from commwatch_agent.web import client_name
from commwatch_agent.web.problems import body_of
from commwatch_agent.web.turns import last_of_largest

#: Connections open at once, TLS handshakes included; beyond it, one of the client that has the most is closed.
MOST_CONNECTIONS = 128
#: A request's line and headers, in bytes.
MOST_HEADER_BYTES = 16 << 10
#: Seconds that a request may take from its first byte (the first one: from the start of the connection) to its last.
REQUEST_S = 10.0
#: The answer to a request without TLS, where the agent listens with it.
_NOT_TLS = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
    b"this agent listens with TLS: ask with https:// instead of http://\n"
)
#: Seconds that a client may take to read what was sent.
TAKE_S = 60.0


class Connection(H11Protocol):
    """uvicorn's connection with limits: by itself, uvicorn sets no time limit on an incomplete request."""

    _coming: asyncio.TimerHandle | None = None
    _going: asyncio.TimerHandle | None = None
    _since_s = began_s = 0.0

    @cached_property
    def owner(self) -> str:
        """Name of its client, which ``client`` is not; looked up once, and only if there are too many connections."""
        return client_of(self.transport)

    @property
    def waits_since_s(self) -> float | None:
        """Time (s, loop clock) since which it waits for its client to send or read; ``None``: it handles a request."""
        at_work = self.cycle is not None and not self.cycle.response_complete and not (self._coming or self._going)
        return None if at_work else self._since_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection if there is room, else answer 503."""
        super().connection_made(transport)
        self._since_s = self.began_s = self.loop.time()
        if make_room(self.connections, self):
            self._watch()
        else:
            self._refuse(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{MOST_CONNECTIONS} connections are in use, the limit of this agent",
            )

    def data_received(self, data: bytes) -> None:
        """Take in more of a request, or of several."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        for timer in (self._coming, self._going):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Note the time: from now on it waits for its client."""
        self._since_s = self.loop.time()
        super().on_response_complete()

    def give_way(self) -> None:
        """Close at once, to make room for another connection."""
        self.connections.discard(self)
        self.transport.abort()

    def pause_writing(self) -> None:
        """Start the timer for a client that does not read its answers."""
        super().pause_writing()
        if self._going is None:
            self._since_s = self.loop.time()
            self._going = self.loop.call_later(TAKE_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop that timer: the client has read its answers."""
        super().resume_writing()
        if self._going is not None:
            self._going.cancel()
            self._going = None

    def send_400_response(self, msg: str) -> None:
        """Answer input that is not HTTP with problem details, unless an answer is under way."""
        error = sys.exc_info()[1]
        status = HTTPStatus(getattr(error, "error_status_hint", HTTPStatus.BAD_REQUEST))
        large = status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        too_large = f"the headers are too large; at most {MOST_HEADER_BYTES} bytes are accepted"
        self._refuse(status, too_large if large else f"not HTTP: {error}")

    def _watch(self) -> None:
        """Start the timer while a request is incomplete; stop it once the request is complete."""
        complete = self.conn.their_state not in (h11.IDLE, h11.SEND_BODY)
        if complete and self._coming is not None:
            self._coming.cancel()
            self._coming = None
        elif not complete and self._coming is None:
            self._coming = self.loop.call_later(REQUEST_S, self._too_slow)

    def _too_slow(self) -> None:
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"the request was not complete after {REQUEST_S:g} s")

    def _refuse(self, status: HTTPStatus, detail: str) -> None:
        """Answer with the reason, unless an answer is under way, and close."""
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = body_of(status, detail)
            headers: list[Any] = [
                ("Content-Type", "application/problem+json"),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
            ]
            headers += [("Retry-After", "1")] if status == HTTPStatus.SERVICE_UNAVAILABLE else []
            response = h11.Response(status_code=status, headers=headers, reason=status.phrase.encode())
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class Handshake(asyncio.Protocol):
    """A connection during its TLS handshake: counted and limited like others. One that begins with HTTP instead gets an answer.

    Args:
        context: TLS context of the server.
        then: the connection that takes over after the handshake.
    """

    def __init__(self, context: ssl.SSLContext, then: Connection) -> None:
        self._context, self._then = context, then
        self._connections: set[Any] = then.connections
        self.waits_since_s: float | None = None
        self.began_s, self._answered = 0.0, False

    @cached_property
    def owner(self) -> str:
        """Name of its client."""
        return client_of(self._transport)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin the handshake if there is room, else close."""
        self._transport, self.waits_since_s = transport, self._then.loop.time()
        self.began_s = self.waits_since_s
        self._arrived = self._then.loop.create_future()
        self._connections.add(self)
        if make_room(self._connections, self):
            self._task = self._then.loop.create_task(self._shake())
        else:  # no answer is possible before TLS
            self.give_way()

    async def _shake(self) -> None:
        if (await self._first_byte()).isalpha() and not self._transport.is_closing():
            self._answer_http()
        if self._answered or self._transport.is_closing():
            return
        early = _Early()
        try:
            secured = await self._then.loop.start_tls(
                self._transport, early, self._context, server_side=True, ssl_handshake_timeout=REQUEST_S
            )
        except OSError:  # not TLS, no valid client certificate, or not in time
            secured = None
        finally:
            self._connections.discard(self)
        if secured is None or early.lost:
            return
        secured.set_protocol(self._then)
        self._then.connection_made(secured)
        if early.data:
            self._then.data_received(bytes(early.data))

    async def _first_byte(self) -> bytes:
        """Return the first byte from the client, and leave it to be read; empty: there is none."""
        loop, transport = self._then.loop, self._transport
        if transport.is_closing():
            return b""
        transport.pause_reading()
        with transport.get_extra_info("socket").dup() as peeking:
            loop.add_reader(peeking, self._wake)
            timer = loop.call_later(REQUEST_S, transport.abort)
            try:
                await self._arrived
                return bytes(peeking.recv(1, socket.MSG_PEEK))
            except OSError:
                return b""
            finally:
                timer.cancel()
                loop.remove_reader(peeking)

    def _wake(self) -> None:
        if not self._arrived.done():
            self._arrived.set_result(None)

    def _answer_http(self) -> None:
        """Answer a request without TLS, and drop what still comes of it: an answer is lost if there is something unread at the close."""
        self._answered = True
        self._transport.write(_NOT_TLS)
        self._transport.write_eof()
        self._transport.resume_reading()
        self._then.loop.call_later(REQUEST_S, self._transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting the connection, which ended before the handshake did."""
        self._connections.discard(self)
        self._wake()

    def give_way(self) -> None:
        """Close at once, to make room for another connection."""
        self._connections.discard(self)
        self._transport.abort()

    def shutdown(self) -> None:
        """Close, because the server ends."""
        self.give_way()


class _Early(asyncio.Protocol):
    """Keeps the data that arrives between the end of a handshake and the takeover by its connection."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.lost = False

    def data_received(self, data: bytes) -> None:
        self.data += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True


def client_of(transport: asyncio.BaseTransport) -> str:
    """Return the name of the client at the other end."""
    peer, here = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
    return client_name.client(peer and peer[:2], here and here[:2])


def make_room(connections: set[Any], newest: Connection | Handshake) -> bool:
    """If there are too many, close one of the client that has the most of those that can be closed; return False if there is none.

    First come connections that wait for their client, the longest first. If all of them have requests in progress, the newest one of a client
    that has more connections than others makes room.
    """
    if len(connections) <= MOST_CONNECTIONS:
        return True
    others = [each for each in connections if each is not newest]
    waiting = _by_client(each for each in others if each.waits_since_s is not None)
    if waiting:
        longest = max(waiting.values(), key=lambda each: (len(each), -_since(each[0])))[0]
        longest.give_way()
        return True
    held = _by_client(others)
    one = last_of_largest(list(held.values()), len(held.get(newest.owner, ())))
    if one is not None:
        one.give_way()
    return one is not None


def _by_client(connections: Iterable[Any]) -> dict[str, list[Any]]:
    """Return connections by client, in the order of the time since which they wait or work."""
    found: dict[str, list[Any]] = {}
    for each in sorted(connections, key=_since):
        found.setdefault(each.owner, []).append(each)
    return found


def _since(connection: Any) -> float:
    return float(connection.began_s if connection.waits_since_s is None else connection.waits_since_s)
