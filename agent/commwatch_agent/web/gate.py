"""The gate before an agent's routes: access, limits on concurrent requests, and security headers of all answers."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from html import escape
from http import HTTPStatus
from urllib.parse import parse_qs

from fastapi.responses import HTMLResponse, RedirectResponse, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from commwatch.wire.tokens import BadToken
from commwatch_agent.report.html_frame import STYLE_HASH, page
from commwatch_agent.runtime.offload import SharedCall
from commwatch_agent.web import access, client_name
from commwatch_agent.web.access import Refusal, Rules
from commwatch_agent.web.faults import Contained
from commwatch_agent.web.http_protocol import MOST_HEADER_BYTES
from commwatch_agent.web.problems import answer
from commwatch_agent.web.turns import AllTaken, Places, TooManyOfOne, Turns

log = logging.getLogger("commwatch")
STREAM = "/api/v1/stream"
#: Bytes of a request's body; the largest legitimate one lists the ranks of one node.
MOST_BODY_BYTES = 64 << 10
#: Requests that wait, are handled or are being answered, except ``/metrics`` and health: in all, and per client. A client that has
#: none gets one of as many again, so that two clients do not keep out a third.
MOST_REQUESTS, MOST_OF_ONE = 32, 16
#: Requests handled at once: those for the worker process, which answers one at a time; those that wait for other agents, which
#: must not wait in the same line as these agents' requests to this one; and others, each of which takes interpreter time from
#: the intake.
HISTORY, JOB, LIVE = "history", "job", "live"
_AT_ONCE = {HISTORY: 1, JOB: 4, LIVE: 2}
#: Of these, most of one client: other agents may keep a request waiting for seconds.
_OF_ONE = {JOB: 3}
_OF_HISTORY = frozenset(
    f"/api/v1/{name}"
    for name in (
        *("summary", "cells", "figures_parts", "slots", "ops", "collectives", "steps", "efficiency", "advice"),
        *("report", "report_part", "wait_part", "timeline", "timeline_part", "whatif"),
    )
)
#: These need the history with one of these parameters; and these always cover all nodes.
_WITH = {"/api/v1/jobs": ("figures",), "/api/v1/bars": ("since", "until")}
_OF_JOB = ("/api/v1/past", "/incidents/")
#: Seconds that a request waits for its turn.
_TURN_S = 30.0
#: Streams open at once: in all, and per client.
MOST_STREAMS, MOST_STREAMS_OF_ONE = 32, 16
#: Seconds to wait until the token's file has been read.
_TOKEN_S = 2.0
POLICY = (
    f"default-src 'none'; script-src 'self'; style-src 'self' 'sha256-{STYLE_HASH}'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)


class Gate:
    """An ASGI application that passes permitted requests to ``app`` and answers all others.

    Args:
        token: reads the current token; raises ``BadToken``.
        secure: the agent uses TLS; its cookie gets the attribute ``Secure``.
    """

    def __init__(self, app: ASGIApp, rules: Rules, token: Callable[[], str], secure: bool) -> None:
        self._app, self._secure = Contained(app), secure
        #: Both may be replaced while requests are handled.
        self.rules, self.token = rules, SharedCall("token", token)
        self._cookie = access.SECURE_COOKIE if secure else access.COOKIE
        self._streams = Places(MOST_STREAMS, MOST_STREAMS_OF_ONE)
        #: Number of requests by client.
        self._requests: Counter[str] = Counter()
        self._turns = {line: Turns(number, _OF_ONE.get(line)) for line, number in _AT_ONCE.items()}
        self._trouble, self._logged = "", 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        headers, path, method = Headers(scope=scope), scope["path"], scope["method"]

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                _say_to_browsers(MutableHeaders(scope=message), path)
            await send(message)

        wanted = access.wants_token(method, path, self.rules)
        token = await self._token() if wanted or path == access.LOGIN else None
        refusal = (
            _too_long(scope) or access.decide(method, path, _plain(headers), self.rules, token) or _too_large(headers)
        )
        if refusal is not None:
            await self._refused(refusal, scope, headers)(scope, receive, guarded)
        elif (method, path) == ("POST", access.LOGIN):
            response = await self._login(receive, token)
            await response(scope, receive, guarded)
        else:
            await self._pass(scope, receive, guarded)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to the routes if there is room, else answer 503."""
        path = scope["path"]
        # A page loads some twenty files at once. They are small and cost little; without one of them it would not work.
        if path in access.HEALTH or path == access.METRICS or path.startswith("/static/"):
            await self._app(scope, _bounded(receive), send)
        elif path != STREAM:
            await self._in_turn(scope, receive, send)
        else:
            await self._stream(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request for the event stream on, and end it when another client gets its place; answer 429 or 503 without a place."""
        client, over = client_name.client(scope.get("client"), scope.get("server")), asyncio.Event()
        try:
            place = self._streams.take(client, over.set)
        except TooManyOfOne:
            detail = f"{MOST_STREAMS_OF_ONE} streams of this client ({client}) are open, the limit for one client"
            await answer(HTTPStatus.TOO_MANY_REQUESTS, detail)(scope, receive, send)
            return
        except AllTaken:
            await _full(f"{MOST_STREAMS} streams are open")(scope, receive, send)
            return
        if self._streams.displaced.bit_count() == 1 and self._streams.displaced != self._logged:
            self._logged = self._streams.displaced
            log.warning(
                "all %d event streams are in use: %d so far were closed for other clients",
                MOST_STREAMS,
                self._streams.displaced,
            )
        stream = _Stream(over, _bounded(receive), send)
        try:
            await self._app(scope, stream.receive, stream.send)
        finally:
            self._streams.give_back(place)
        await stream.end()

    async def _in_turn(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to the routes when it is its turn; answer 429 or 503 without room, or without a turn in time."""
        client = client_name.client(scope.get("client"), scope.get("server"))
        if self._requests.total() >= MOST_REQUESTS * (1 if self._requests[client] else 2):
            await _full(f"{MOST_REQUESTS} requests are in progress")(scope, receive, send)
            return
        if self._requests[client] >= MOST_OF_ONE:
            detail = f"{MOST_OF_ONE} requests of this client ({client}) are in progress, the limit for one client"
            await answer(HTTPStatus.TOO_MANY_REQUESTS, detail)(scope, receive, send)
            return
        turns = self._turns[line_of(scope)]
        self._requests[client] += 1
        try:
            await turns.take(client, _TURN_S)
        except TimeoutError:
            detail = f"this request has waited {_TURN_S:g} s for other requests"
            await answer(HTTPStatus.SERVICE_UNAVAILABLE, detail)(scope, receive, send)
        else:
            await self._work(partial(turns.give_back, client), scope, receive, send)
        finally:
            self._requests[client] -= 1
            self._requests += Counter()  # drops clients without requests

    async def _work(self, give_back: Callable[[], None], scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and give its turn back when the answer begins, so that a slow reader holds no turn."""
        over = False

        async def sent(message: Message) -> None:
            nonlocal over
            if not over:
                over = True
                give_back()
            await send(message)

        try:
            await self._app(scope, _bounded(receive), sent)
        finally:
            if not over:
                give_back()

    async def _token(self) -> str | None:
        token, trouble = None, ""
        try:
            token = await self.token.ask(_TOKEN_S)
        except BadToken as error:
            trouble = str(error)
        except TimeoutError:
            trouble = f"its file could not be read within {_TOKEN_S:g} s"
        if trouble and trouble != self._trouble:
            log.error("no token is accepted: %s", trouble)
        if self._trouble and not trouble:
            log.info("the token can be read again")
        self._trouble = trouble
        return token

    def _refused(self, refusal: Refusal, scope: Scope, headers: Headers) -> Response:
        if refusal.status == HTTPStatus.UNAUTHORIZED:
            if scope["method"] == "GET" and "text/html" in headers.get("accept", ""):
                query = scope["query_string"].decode("latin-1")
                return _login_page(
                    "", access.safe_redirect(scope["raw_path"].decode("latin-1") + (query and f"?{query}"))
                )
            return answer(refusal.status, refusal.detail, {"WWW-Authenticate": "Bearer"})
        return _answer(refusal)

    async def _login(self, receive: Receive, token: str | None) -> Response:
        """Return the session cookie if the form holds the token, else the form again."""
        try:
            body = await _body(_bounded(receive))
        except HTTPException:
            return _answer(_LARGE)
        form = parse_qs(body.decode("latin-1"))
        shown, on = form.get("token", [""])[0].strip(), access.safe_redirect(form.get("next", [""])[0])
        if not access.is_token(shown, token) or token is None:
            return _login_page("That is not the token of this agent.", on)
        response = RedirectResponse(on, HTTPStatus.SEE_OTHER)
        response.set_cookie(
            self._cookie, access.session(token), path="/", httponly=True, samesite="lax", secure=self._secure
        )
        return response


class _Stream:
    """A response without an end, for a client that reads one: it ends when ``over`` is set."""

    def __init__(self, over: asyncio.Event, receive: Receive, send: Send) -> None:
        self._over, self._receive, self._send = over, receive, send
        self._begun = self._complete = False

    async def receive(self) -> Message:
        """Return the client's next message, or that it has gone when the stream is over."""
        message, over = asyncio.ensure_future(self._receive()), asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait((message, over), return_when=asyncio.FIRST_COMPLETED)
            return message.result() if message.done() else {"type": "http.disconnect"}
        finally:
            message.cancel()
            over.cancel()

    async def send(self, message: Message) -> None:
        """Pass a message on."""
        self._begun = True
        self._complete = message["type"] == "http.response.body" and not message.get("more_body", False)
        await self._send(message)

    async def end(self) -> None:
        """Complete a response that has been cut short, so that the client connects again."""
        if self._over.is_set() and self._begun and not self._complete:
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})


def line_of(scope: Scope) -> str:
    """Return the line in which a request waits for its turn."""
    route = "/".join(scope["path"].split("/")[:4])
    given = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    if "job" in given.get("scope", ()) or route.startswith(_OF_JOB):
        return JOB
    return HISTORY if route in _OF_HISTORY or not given.keys().isdisjoint(_WITH.get(route, ())) else LIVE


def _plain(headers: Headers) -> dict[str, str]:
    """Return headers by name; values of a repeated header are joined, so that none hides another."""
    return {name: ", ".join(headers.getlist(name)) for name in set(headers)}


_LARGE = Refusal(
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is too large; at most {MOST_BODY_BYTES} bytes are accepted"
)


def _too_long(scope: Scope) -> Refusal | None:
    """Refuse a too long request line and headers; h11 checks only those that arrive in several pieces."""
    taken = len(scope["raw_path"]) + len(scope["query_string"])
    taken += sum(len(name) + len(value) + len(": \r\n") for name, value in scope["headers"])
    detail = f"the headers are too large; at most {MOST_HEADER_BYTES} bytes are accepted"
    return Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, detail) if taken > MOST_HEADER_BYTES else None


def _too_large(headers: Headers) -> Refusal | None:
    length = headers.get("content-length", "0")
    return _LARGE if not length.isdecimal() or int(length[:20]) > MOST_BODY_BYTES else None


def _bounded(receive: Receive) -> Receive:
    """Limit the body to ``MOST_BODY_BYTES`` while it arrives: a chunked body has no length in advance."""
    taken = 0

    async def bounded() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > MOST_BODY_BYTES:
            raise HTTPException(_LARGE.status, _LARGE.detail)
        return message

    return bounded


async def _body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


def _answer(refusal: Refusal) -> Response:
    return answer(refusal.status, refusal.detail)


def _full(what: str) -> Response:
    return answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{what}, the limit of this agent")


def _login_page(trouble: str, on: str) -> Response:
    """Return the login form; ``on``: path to go to afterwards."""
    form = (
        (f"<p>{trouble}</p>" if trouble else "")
        + """<p>This agent requires its token: the content of the file <code>agent.token</code> in its run directory, or of the one that
the setting <code>token_file</code> names.</p>
<form method="post" action="/login">"""
        + f'<input name="next" type="hidden" value="{escape(on)}">'
        + """<label>Token <input name="token" type="password" autocomplete="off" required></label>
<button>Log in</button></form>"""
    )
    # With no-referrer a browser would send this form with Origin: null.
    headers = {"WWW-Authenticate": "Bearer", "Referrer-Policy": "same-origin"}
    return HTMLResponse(page("commwatch", form), HTTPStatus.UNAUTHORIZED, headers)


def _say_to_browsers(headers: MutableHeaders, path: str) -> None:
    """Set headers that prevent MIME sniffing, caching and embedding in another page."""
    headers.setdefault("X-Content-Type-Options", "nosniff")
    headers.setdefault("Referrer-Policy", "no-referrer")
    headers.setdefault("Cross-Origin-Resource-Policy", "same-origin")
    if not path.startswith("/static/"):
        headers.setdefault("Cache-Control", "no-store")
    if headers.get("content-type", "").startswith("text/html"):
        headers.setdefault("Content-Security-Policy", POLICY)
