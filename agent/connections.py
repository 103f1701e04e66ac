"""Connections of an agent: who sends nothing whole, or takes nothing, is let go after a while; what is no HTTP gets an answer."""

from __future__ import annotations

import asyncio
import sys
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from commwatch.problems import body_of

#: Open at once; the next is closed with 503.
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

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Let it in, if there is room."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            self._refuse(
                HTTPStatus.SERVICE_UNAVAILABLE, f"{MOST_CONNECTIONS} connections are open, as many as there may be"
            )
        else:
            self._watch()

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

    def pause_writing(self) -> None:
        """Answers pile up."""
        super().pause_writing()
        if self._going is None:
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
