"""Connections of an agent: who sends nothing whole, or takes nothing, is let go after a while, or sooner for others; what is no HTTP
gets an answer."""

from __future__ import annotations

import asyncio
import ssl
import sys
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from commwatch.server.problems import body_of

#: Open at once, before their handshake as well; for the next goes the one that has waited the longest for its client.
MOST_CONNECTIONS = 128
#: A request's line and headers, in bytes.
MOST_HEADER_BYTES = 16 << 10
#: Seconds that a request may take to come, from its first byte (of a connection: from its beginning) to its last.
REQUEST_S = 10.0
#: Seconds in which who asked has to take what lies ready.
TAKE_S = 60.0


class Connection(H11Protocol):
    """As uvicorn's, which lets a connection that has sent half a request stay for ever."""

    _coming: asyncio.TimerHandle | None = None
    _going: asyncio.TimerHandle | None = None
    _since_s = 0.0

    @property
    def waits_since_s(self) -> float | None:
        """When, on the loop's clock, it began to wait for its client to ask or to take; ``None``: a request is being worked on."""
        at_work = self.cycle is not None and not self.cycle.response_complete and not (self._coming or self._going)
        return None if at_work else self._since_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Let it in, if there is room."""
        super().connection_made(transport)
        self._since_s = self.loop.time()
        if make_room(self.connections, self):
            self._watch()
        else:
            self._refuse(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{MOST_CONNECTIONS} connections are being worked on, as many as there may be",
            )

    def data_received(self, data: bytes) -> None:
        """More of a request, or of several."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        for timer in (self._coming, self._going):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """An answer has been given."""
        self._since_s = self.loop.time()
        super().on_response_complete()

    def give_way(self) -> None:
        """End at once, for another."""
        self.connections.discard(self)
        self.transport.abort()

    def pause_writing(self) -> None:
        """Answers pile up."""
        super().pause_writing()
        if self._going is None:
            self._since_s = self.loop.time()
            self._going = self.loop.call_later(TAKE_S, self.transport.abort)

    def resume_writing(self) -> None:
        """They have been taken."""
        super().resume_writing()
        if self._going is not None:
            self._going.cancel()
            self._going = None

    def send_400_response(self, msg: str) -> None:
        """What is no request gets problem details, too, where there is nothing under way."""
        error = sys.exc_info()[1]
        status = HTTPStatus(getattr(error, "error_status_hint", HTTPStatus.BAD_REQUEST))
        large = status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        self._refuse(
            status, f"at most {MOST_HEADER_BYTES} bytes of headers are taken" if large else f"not HTTP: {error}"
        )

    def _watch(self) -> None:
        """Start the clock of a request that has begun and is not whole; stop that of one that is."""
        whole = self.conn.their_state not in (h11.IDLE, h11.SEND_BODY)
        if whole and self._coming is not None:
            self._coming.cancel()
            self._coming = None
        elif not whole and self._coming is None:
            self._coming = self.loop.call_later(REQUEST_S, self._too_slow)

    def _too_slow(self) -> None:
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"the request was not whole after {REQUEST_S:g} s")

    def _refuse(self, status: HTTPStatus, detail: str) -> None:
        """Say why, unless an answer is on its way, and close."""
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
    """A connection before it has shown that it speaks TLS, with a certificate where one is asked for: counted and let go like others.

    Args:
        context: of the server.
        then: the connection that it is afterwards.
    """

    def __init__(self, context: ssl.SSLContext, then: Connection) -> None:
        self._context, self._then = context, then
        self._connections: set[Any] = then.connections
        self.waits_since_s: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, if there is room."""
        self._transport, self.waits_since_s = transport, self._then.loop.time()
        self._connections.add(self)
        if make_room(self._connections, self):
            self._task = self._then.loop.create_task(self._shake())
        else:  # nothing can be said before there is TLS
            self.give_way()

    async def _shake(self) -> None:
        if self._transport.is_closing():
            return
        early = _Early()
        try:
            secured = await self._then.loop.start_tls(
                self._transport, early, self._context, server_side=True, ssl_handshake_timeout=REQUEST_S
            )
        except OSError:  # not TLS, not somebody to be let in, or not in time
            secured = None
        finally:
            self._connections.discard(self)
        if secured is None or early.lost:
            return
        secured.set_protocol(self._then)
        self._then.connection_made(secured)
        if early.data:
            self._then.data_received(bytes(early.data))

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over before it began."""
        self._connections.discard(self)

    def give_way(self) -> None:
        """End at once, for another."""
        self._connections.discard(self)
        self._transport.abort()

    def shutdown(self) -> None:
        """The server ends."""
        self.give_way()


class _Early(asyncio.Protocol):
    """What comes in the moment between the end of a handshake and the connection that it is for."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.lost = False

    def data_received(self, data: bytes) -> None:
        self.data += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True


def make_room(connections: set[Any], newest: Connection | Handshake) -> bool:
    """Let go, if there are too many, the one that has waited the longest for its client; False: all others are at work."""
    if len(connections) <= MOST_CONNECTIONS:
        return True
    waiting = [each for each in connections if each is not newest and each.waits_since_s is not None]
    if waiting:
        min(waiting, key=lambda each: float(each.waits_since_s)).give_way()
    return bool(waiting)
