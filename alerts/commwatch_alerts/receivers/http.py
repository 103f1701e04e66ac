"""An HTTP request with a hard time limit, whatever the server does. Standard library only."""

from __future__ import annotations

import base64
import contextlib
import http.client
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from urllib.parse import SplitResult, unquote, urlsplit

from commwatch_alerts.receivers.sending import LIMIT_S, MOST_ANSWER, CannotSend, said, shown

#: Longest wait in seconds that a receiver can ask for.
_MOST_WAIT_S = 900.0
_TEMPORARY = (408, 429)


class _Connection(http.client.HTTPConnection):
    """A connection, with or without TLS, whose TLS handshake can be interrupted, too."""

    def __init__(
        self, host: str, port: int, timeout: float, server: str | None, context: ssl.SSLContext | None
    ) -> None:
        super().__init__(host, port, timeout=timeout)
        self._server, self._context = server, context

    def connect(self) -> None:
        super().connect()
        if self._server is not None:
            context = self._context or ssl.create_default_context()
            self.sock = context.wrap_socket(self.sock, server_hostname=self._server, do_handshake_on_connect=False)
            self.sock.do_handshake()


@contextmanager
def _in_time(limit_s: float, connection: http.client.HTTPConnection) -> Iterator[Callable[[], bool]]:
    """Shut a connection down after ``limit_s`` seconds, because time-outs of single reads do not end a slow stream.

    Yields:
        A function that returns whether the time limit has passed.
    """
    late = threading.Event()

    def cut() -> None:
        late.set()
        opened: socket.socket | None = connection.sock  # None until it is connected
        if opened is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(opened, socket.SHUT_RDWR)

    timer = threading.Timer(limit_s, cut)
    timer.daemon = True
    timer.start()
    try:
        yield late.is_set
    finally:
        timer.cancel()


def post(
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    *secrets: str,
    limit_s: float = LIMIT_S,
    context: ssl.SSLContext | None = None,
    most_answer: int = 0,
    text_of: Callable[[bytes], str | bytes] = bytes,
) -> bytes:
    """POST ``body``, follow no redirect, and read a few KB of the answer.

    Args:
        url: ``http`` or ``https``; the environment's proxies are used.
        secrets: texts that must not appear in an error.
        context: for TLS; ``None``: the CAs that the system trusts, without a client certificate.
        most_answer: bytes of a 2xx answer to return.
        text_of: returns the text in the body of another answer, for the error.

    Returns:
        The beginning of the answer's body.

    Raises:
        CannotSend: no answer in ``limit_s`` seconds, or not a 2xx; not ``again`` after a 3xx or a permanent 4xx.
    """
    parts, where = urlsplit(url), shown(url)
    about = {"User-Agent": "commwatch", "Content-Type": "application/json", "Connection": "close"}
    connection, path, extra = _connection(parts, limit_s, context)
    with _in_time(limit_s, connection) as is_late:
        try:
            connection.request("POST", path, body, {**about, **headers, **extra})
            response = connection.getresponse()
            status, after = response.status, response.headers.get("Retry-After")
            answer = response.read(MOST_ANSWER if status >= 300 else most_answer)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if is_late() or isinstance(error, TimeoutError):
                raise CannotSend(f"{where}: no answer within {limit_s:g} s") from None
            raise CannotSend(f"{where}: {_why(error, *secrets)}") from None
        finally:
            connection.close()
        if is_late():  # an answer that was cut off may look complete
            raise CannotSend(f"{where}: no answer within {limit_s:g} s")
    if status // 100 != 2:
        raise _refusal(where, status, said(text_of(answer), *secrets), after)
    return answer


def _connection(
    parts: SplitResult, limit_s: float, context: ssl.SSLContext | None
) -> tuple[_Connection, str, dict[str, str]]:
    """Return the connection to the host or its proxy, the request target, and headers for the proxy.

    Raises CannotSend if the proxy is not an ``http`` one: TLS to the proxy itself is not supported.
    """
    host, encrypted = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if encrypted else 80)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    server = host if encrypted else None
    proxy = urllib.request.getproxies().get(parts.scheme)
    if not proxy or urllib.request.proxy_bypass(parts.netloc):
        return _Connection(host, port, limit_s, server, context), path, {}
    by = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if by.scheme != "http":
        raise CannotSend(
            f"the proxy {by.scheme}://{by.hostname} is not supported; give one that starts with http://", again=False
        )
    credentials = {}
    if by.username:
        credentials = {"Proxy-Authorization": basic(unquote(by.username), unquote(by.password or ""))}
    connection = _Connection(by.hostname or "", by.port or 80, limit_s, server, context)
    if not encrypted:
        return connection, f"http://{parts.netloc}{path}", credentials
    connection.set_tunnel(host, port, credentials)
    return connection, path, {}


def _why(error: Exception, *secrets: str) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, socket.gaierror):
        return "no such host"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {getattr(error, 'verify_message', '') or error.reason or 'no handshake'}"
    if isinstance(error, OSError):
        return error.strerror or said(str(error), *secrets) or type(error).__name__
    # No text of other errors, because it may contain headers.
    return f"does not answer as HTTP ({type(error).__name__})"


def _refusal(where: str, status: int, answer: str, after: str | None) -> CannotSend:
    again = status in _TEMPORARY or status >= 500
    says = f"{where}: answers {status}{f': {answer}' if answer else ''}"
    if 300 <= status < 400:
        says = f"{where}: answers {status}, a redirect, which is not followed; give the address that it leads to"
    return CannotSend(says, again=again, after_s=_after_s(after) if again else None)


def _after_s(header: str | None) -> float | None:
    """Return the seconds to wait by a ``Retry-After`` header, at most ``_MOST_WAIT_S``; ``None``: no such header."""
    if header is None:
        return None
    try:
        wait_s = (
            float(header) if header.strip().isdecimal() else parsedate_to_datetime(header).timestamp() - time.time()
        )
    except (ValueError, OverflowError):
        return None
    return min(max(wait_s, 0.0), _MOST_WAIT_S)


def basic(username: str, password: str) -> str:
    """Return the value of ``Authorization`` for a user name and password."""
    return f"Basic {base64.b64encode(f'{username}:{password}'.encode()).decode()}"
