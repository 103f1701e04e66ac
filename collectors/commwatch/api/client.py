"""HTTP requests to agents, shared by commands and agents. No redirect or proxy can send a token to another host."""

from __future__ import annotations

import http.client
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol, TypeVar

from commwatch.api.client_tls import TlsFiles
from commwatch.wire import bounded, crossing, tokens
from commwatch.wire.announcement import Announcement, answering, operators
from commwatch.wire.concurrency import at_once

_TIMEOUT_S = 10.0
#: Seconds for all agents together, so that an unresolvable name or slowly arriving headers do not delay the rest.
TOGETHER_S = 15.0
#: Most requests in flight: a process may have only about a thousand files open.
_AT_ONCE = 256
_MOST_DETAIL = 1 << 16
#: Most bytes of an answer, most JSON values in it, and most lists and objects among these, which take the most memory; agents send less.
_MOST_BYTES, _MOST_VALUES, _MOST_CONTAINERS = 256 << 20, 1 << 23, 1 << 21
_Target = TypeVar("_Target")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Keys:
    """Credentials for agents, and the certificates that agents are trusted by."""

    #: Run directory; its agents receive the tokens that they wrote there.
    dir: Path | None = None
    #: File with one token for every agent, which replaces those of the run directory.
    token_file: Path | None = None
    #: Certificates of the CAs that sign the agents' certificates; ``None``: the CAs that the system trusts.
    ca_file: Path | None = None
    #: File with a client certificate and its key, for agents that require one.
    client_cert: Path | None = None


NO_KEYS = Keys()


class KeySettings(Protocol):
    """The settings for ``Keys``, as ``config.Config`` has them; the installation for the probe alone has no settings."""

    @property
    def dir(self) -> Path:
        """Run directory."""

    @property
    def token_file(self) -> Path | None:
        """File with the token."""

    @property
    def ca_file(self) -> Path | None:
        """Certificates of the CAs."""

    @property
    def client_cert(self) -> Path | None:
        """File with a client certificate and its key."""


def keys_of(config: KeySettings) -> Keys:
    """Return the credentials that the settings name."""
    return Keys(config.dir, config.token_file, config.ca_file, config.client_cert)


def local_agents(directory: Path) -> list[str]:
    """Return the URLs of a run directory's agents: its own, and those of ``commwatch run`` in ``run-*`` folders."""
    return list(_places(directory))


def agent_of(directory: Path, history: Path) -> str | None:
    """Return the URL of the agent of a run directory that writes this history; ``None``: there is none."""
    for url, (_, about) in _places(directory).items():
        with suppress(OSError):  # one of them was deleted
            if history.samefile(about.history):
                return url
    return None


def get(url: str, path: str, keys: Keys = NO_KEYS, timeout_s: float | None = None) -> Any:
    """Return an agent's answer to a GET of ``path`` under ``/api/v1``.

    Args:
        timeout_s: for each wait for data, and for the body; ``None``: 10 s.

    Raises:
        OSError: no answer in time; ``HTTPError`` if the agent refuses.
        ValueError: the answer is not HTTP or not JSON, or the URL is not valid.
    """
    limit_s = _TIMEOUT_S if timeout_s is None else timeout_s
    return decoded(fetch(url, path, keys, timeout_s=limit_s, most_bytes=_MOST_BYTES))


def post(url: str, path: str, body: Any, keys: Keys = NO_KEYS) -> Any:
    """Return an agent's answer to a POST of ``body`` as JSON; raises what ``get`` raises."""
    return decoded(_body_of(url, path, json.dumps(body).encode(), keys, limits=(_TIMEOUT_S, _MOST_BYTES)))


def fetch(url: str, path: str, keys: Keys, *, timeout_s: float, most_bytes: int) -> bytes:
    """Return the body of an agent's answer to a GET of ``path`` under ``/api/v1``.

    Args:
        timeout_s: for each wait for data, and for the body.
        most_bytes: a longer body is an error.

    Raises:
        OSError: no answer in time; ``HTTPError`` if the agent refuses.
        ValueError: the answer is not HTTP or too long, or the URL is not valid.
    """
    return _body_of(url, path, None, keys, limits=(timeout_s, most_bytes))


def decoded(body: bytes, most_values: int = _MOST_VALUES) -> Any:
    """Return a body as JSON; raise ``ValueError`` if it is not JSON, nested too deeply, or has more values than this, or too many lists and objects."""
    try:
        return bounded.load(body, most_values, _MOST_CONTAINERS)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def together(question: Callable[[_Target], _Answer], targets: Sequence[_Target]) -> list[_Answer | None]:
    """Call ``question`` for each of ``targets`` in parallel, for at most ``TOGETHER_S`` seconds.

    Returns:
        The answers in order; ``None``: none in time. Its thread goes on, but does not keep the process alive.
    """
    futures = at_once(question, targets, _AT_ONCE)
    over, late = wait(futures, TOGETHER_S)
    for future in late:
        future.cancel()
    return [future.result() if future in over else None for future in futures]


def detail(error: urllib.error.HTTPError) -> str | None:
    """Return the ``detail`` of an agent's error response, ``None`` if it has none; close the response."""
    try:
        with error:
            return str(json.loads(error.read(_MOST_DETAIL))["detail"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, http.client.HTTPException):
        return None


def reason(error: Exception) -> str:
    """Return why an agent does not answer, from what a request raised or from what reading its answer raised."""
    if isinstance(error, urllib.error.HTTPError):
        said = detail(error)
        # ``fetch`` has put the remedy into the reason.
        return error.reason if error.code == HTTPStatus.UNAUTHORIZED else said or f"{error.code} {error.reason}"
    if isinstance(error, OSError):
        cause = getattr(error, "reason", error)
        return str(getattr(cause, "strerror", None) or cause)
    return f"does not answer as an agent of this version: {error}"


def _body_of(url: str, path: str, content: bytes | None, keys: Keys, *, limits: tuple[float, int]) -> bytes:
    headers = {} if content is None else {"Content-Type": "application/json"}
    token = _token(url, keys)
    if token is not None:
        headers = {**headers, "Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"{url}/api/v1/{path}", content, headers)  # noqa: S310 - an agent's address
    try:
        with _opener(_context(keys)).open(request, timeout=limits[0]) as response:
            return _body(response, *limits)
    except OSError as error:
        if isinstance(error, urllib.error.HTTPError) and error.code == HTTPStatus.UNAUTHORIZED:
            error.msg = f"it requires {'another' if token else 'its'} token; give it with --token-file FILE"
        raise
    except http.client.HTTPException as error:
        raise ValueError(str(error)) from None


def _token(url: str, keys: Keys) -> str | None:
    """Return the token for the agent at ``url``. The token of a local agent is used for that agent only."""
    try:
        if keys.token_file is not None:
            return tokens.read(keys.token_file)
    except tokens.BadToken as error:
        raise OSError(str(error)) from None
    found = None if keys.dir is None else _places(keys.dir).get(url)
    if found is None:
        return None
    place, agent = found
    try:
        # Only a file of the user that announced the agent: else a member of the directory's group could collect tokens.
        return tokens.read_own(place / tokens.NAME, agent.uid)
    except (OSError, tokens.BadToken):  # another user's agent: many routes need no token
        return None


def _places(directory: Path) -> dict[str, tuple[Path, Announcement]]:
    """Return a run directory's agents by URL, with their folders: those of this user, root and the directory's owner."""
    try:
        with crossing.folder(directory) as where:
            runs = where.names("run-*")[1]
    except OSError:
        return {}
    trust = operators(directory)
    found = {place: answering(place, trust) for place in (directory, *(directory / run for run in runs))}
    return {about.url: (place, about) for place, about in found.items() if about is not None}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirects: agents send none, and a token must not reach another host."""

    def redirect_request(self, *_: object) -> None:
        return None


@lru_cache(maxsize=8)
def _opener(context: ssl.SSLContext | None) -> urllib.request.OpenerDirector:
    # No proxy, because agents are inside the cluster.
    handlers = [urllib.request.ProxyHandler({}), _NoRedirect()]
    if context is not None:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    return urllib.request.build_opener(*handlers)


def _context(keys: Keys) -> ssl.SSLContext | None:
    """Return the context of requests; ``None``: that of the system. May raise OSError, as ``TlsFiles.context``."""
    own = keys.ca_file is not None or keys.client_cert is not None
    return _files(keys.ca_file, keys.client_cert).context() if own else None


@cache
def _files(ca_file: Path | None, client_cert: Path | None) -> TlsFiles:
    return TlsFiles(ca_file, client_cert)


def _body(response: http.client.HTTPResponse, timeout_s: float, most_bytes: int) -> bytes:
    """Return the body of a response; raise TimeoutError if it is not complete in time, even if bytes still arrive."""
    end, body = time.monotonic() + timeout_s, bytearray()
    while piece := response.read1(1 << 16):
        body += piece
        if len(body) > most_bytes:
            raise ValueError(f"its answer is longer than {most_bytes >> 20} MiB")
        if time.monotonic() > end:
            raise TimeoutError(f"did not send its whole answer within {timeout_s:.0f} s")
    return bytes(body)
