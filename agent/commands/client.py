"""Asking agents over HTTP: what all commands share. What they are shown goes to nobody else."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

from commwatch.collectors.wire import bounded
from commwatch.config import Config
from commwatch.runtime import tokens
from commwatch.runtime.concurrency import at_once
from commwatch.runtime.discovery import Announcement, answering

_TIMEOUT_S = 10.0
#: All agents together get so long, so that no name that does not resolve, and no trickle of headers, holds up the rest.
TOGETHER_S = 15.0
#: As many are asked at once: a process may have about a thousand files open.
_AT_ONCE = 256
_MOST_DETAIL = 1 << 16
#: Of an answer, and values in it: more than the longest that agents give.
_MOST_BYTES, _MOST_VALUES = 256 << 20, 1 << 23
_Asked = TypeVar("_Asked")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Keys:
    """What agents are shown, and which are believed."""

    #: Run directory whose agents are shown the tokens that they have left there.
    dir: Path | None = None
    #: A token for every agent that is asked, instead.
    token_file: Path | None = None
    #: Who signs the agents' certificates; ``None``: those whom the system trusts.
    ca_file: Path | None = None
    #: A certificate and its key, for agents that want one.
    client_cert: Path | None = None


NO_KEYS = Keys()


def keys_of(config: Config) -> Keys:
    """As the settings say."""
    return Keys(config.dir, config.token_file, config.ca_file, config.client_cert)


def local_agents(directory: Path) -> list[str]:
    """The agents of a run directory: the one that watches it, and those of ``commwatch run`` in its corners."""
    return list(_places(directory))


def get(url: str, path: str, keys: Keys = NO_KEYS) -> Any:
    """What an agent answers under ``/api/v1``.

    Raises:
        OSError: it does not answer, or not in time; ``HTTPError`` where it refuses.
        ValueError: its answer is no HTTP or no JSON, or its URL is none.
    """
    return _ask(url, path, None, {}, keys)


def post(url: str, path: str, body: Any, keys: Keys = NO_KEYS) -> Any:
    """As ``get``, with something to tell."""
    return _ask(url, path, json.dumps(body).encode(), {"Content-Type": "application/json"}, keys)


def together(question: Callable[[_Asked], _Answer], asked: Sequence[_Asked]) -> list[_Answer | None]:
    """Ask many at once, for at most ``TOGETHER_S``.

    Returns:
        The answers in order; ``None`` is none in time. Its thread is left behind and keeps no process from ending.
    """
    futures = at_once(question, asked, _AT_ONCE)
    over, late = wait(futures, TOGETHER_S)
    for future in late:
        future.cancel()
    return [future.result() if future in over else None for future in futures]


def detail(error: urllib.error.HTTPError) -> str | None:
    """What an agent's problem details say; ``None``: it has sent none. Closes the answer."""
    try:
        with error:
            return str(json.loads(error.read(_MOST_DETAIL))["detail"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, http.client.HTTPException):
        return None


def _ask(url: str, path: str, content: bytes | None, headers: dict[str, str], keys: Keys) -> Any:
    token = _token(url, keys)
    if token is not None:
        headers = {**headers, "Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"{url}/api/v1/{path}", content, headers)  # noqa: S310 - an agent's address
    try:
        with _opener(keys.ca_file, keys.client_cert).open(request, timeout=_TIMEOUT_S) as response:
            return _load(response)
    except OSError as error:
        if isinstance(error, urllib.error.HTTPError) and error.code == HTTPStatus.UNAUTHORIZED:
            error.msg = f"it wants {'another' if token else 'its'} token; --token-file FILE names one"
        raise
    except (http.client.HTTPException, RecursionError) as error:
        raise ValueError(str(error)) from None


def _token(url: str, keys: Keys) -> str | None:
    """What to show to the agent at ``url``; the token of one that runs here goes to no other."""
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
        # Of whom says that the agent is there: else a member of the directory's group could have it sent to him.
        return tokens.read_own(place / tokens.NAME, agent.uid)
    except (OSError, tokens.BadToken):  # somebody else's agent: much of what it says needs none
        return None


def _places(directory: Path) -> dict[str, tuple[Path, Announcement]]:
    """Where the agents of a run directory answer, with the directory of each; those of us, of root and of whose directory it is."""
    try:
        owners = {os.geteuid(), 0, directory.stat().st_uid}
    except OSError:
        return {}
    found = {place: answering(place, owners) for place in (directory, *sorted(directory.glob("run-*")))}
    return {about.url: (place, about) for place, about in found.items() if about is not None}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Agents send nobody elsewhere, and a token does not go there."""

    def redirect_request(self, *_: object) -> None:
        return None


@cache
def _opener(ca_file: Path | None, client_cert: Path | None) -> urllib.request.OpenerDirector:
    # Agents are in the cluster: no proxy between.
    handlers = [urllib.request.ProxyHandler({}), _NoRedirect()]
    if ca_file is not None or client_cert is not None:
        handlers.append(urllib.request.HTTPSHandler(context=_context(ca_file, client_cert)))
    return urllib.request.build_opener(*handlers)


def _context(ca_file: Path | None, client_cert: Path | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        raise OSError(f"ca_file {ca_file}: {getattr(error, 'strerror', None) or error}") from None
    if client_cert is not None:
        try:
            context.load_cert_chain(client_cert)
        except (OSError, ValueError) as error:
            raise OSError(f"client_cert {client_cert}: {getattr(error, 'strerror', None) or error}") from None
    return context


def _load(response: http.client.HTTPResponse) -> Any:
    """JSON that has to be here in time, however it drips."""
    end, body = time.monotonic() + _TIMEOUT_S, bytearray()
    while piece := response.read1(1 << 16):
        body += piece
        if len(body) > _MOST_BYTES:
            raise ValueError(f"its answer is longer than {_MOST_BYTES >> 20} MiB")
        if time.monotonic() > end:
            raise TimeoutError(f"has not sent its answer in {_TIMEOUT_S:.0f} s")
    return bounded.load(body, _MOST_VALUES)
