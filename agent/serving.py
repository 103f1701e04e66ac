"""How an agent listens: address, token, TLS, and the server before its routes."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from commwatch import access, tls, tokens
from commwatch.config import DEFAULT_PORT, Config
from commwatch.connections import MOST_HEADER_BYTES, Connection
from commwatch.gate import Gate

log = logging.getLogger("commwatch")
#: Seconds between two looks whether the certificate has been renewed.
_RENEWAL_S = 5


class CannotStart(Exception):
    """The agent cannot run here; the message says why and what to do."""


def listen(config: Config) -> socket.socket:
    """The socket of an agent, which nobody has been let in by yet.

    Raises:
        CannotStart: there is no such address, the port is taken, or others would reach it and nothing was said about that.
    """
    listener = _bound(config)
    address = listener.getsockname()[0]
    if access.beyond_loopback(address) and config.tls_cert is None and not config.insecure:
        listener.close()
        raise CannotStart(
            f"host {config.host} is reached from other machines, and what they send can be read on the way: "
            "set tls_cert and tls_key, or say --insecure (insecure = true) where the network keeps others out"
        )
    listener.listen(128)
    return listener


def _bound(config: Config) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    wanted = DEFAULT_PORT if config.port is None else config.port
    listener = socket.socket(
        family, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )  # named, or asyncio leaves Nagle's delay on
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, wanted))
    except OSError as error:
        if config.port is not None or error.errno != errno.EADDRINUSE:
            listener.close()
            raise CannotStart(
                f"cannot listen on {config.host}:{wanted}: {error.strerror}; choose another port with --port (0: any free one)"
            ) from None
        listener.bind((config.host, 0))
        log.info("port %d is taken, using %d", wanted, listener.getsockname()[1])
    return listener


def server(app: ASGIApp, config: Config, address: str) -> uvicorn.Server:
    """What answers with ``app``, behind its gate.

    Args:
        address: that it listens on.

    Raises:
        CannotStart: token or certificate cannot be used.
    """
    token = _token(config)
    gate = Gate(app, _rules(config, address), token, config.tls_cert is not None)
    settings = uvicorn.Config(
        gate,
        http=Connection,
        ws="none",
        h11_max_incomplete_event_size=MOST_HEADER_BYTES,
        log_config=None,
        log_level="error",  # what strangers send is no news
        access_log=False,
        lifespan="off",
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    settings.load()
    if config.tls_cert is not None and config.tls_key is not None:
        try:
            context = tls.listening(config.tls_cert, config.tls_key, config.tls_client_ca)
        except tls.BadCertificate as error:
            raise CannotStart(str(error)) from None
        settings.ssl = context
        # In the server's own thread, which does the handshakes.
        settings.callback_notify = tls.Renewal(context, config.tls_cert, config.tls_key).tick
        settings.timeout_notify = _RENEWAL_S
    return uvicorn.Server(settings)


def _token(config: Config) -> Callable[[], str]:
    """Reads the token each time: it may be changed while the agent runs."""
    own = config.dir / tokens.NAME
    read = (
        partial(tokens.read_own, own, os.getuid())
        if config.token_file is None
        else partial(tokens.read, config.token_file)
    )
    try:
        if config.token_file is None:
            tokens.make(own)
        read()
    except tokens.BadToken as error:
        raise CannotStart(str(error)) from None
    except OSError as error:
        raise CannotStart(f"token file {own}: {error.strerror}; name another with --token-file") from None
    return read


def _rules(config: Config, address: str) -> access.Rules:
    names = [config.host, socket.gethostname(), socket.gethostname().partition(".")[0]]
    if access.beyond_loopback(address):  # may ask a name server
        names.append(socket.getfqdn())
    return access.rules_of(
        address, tuple(names), config.allowed_hosts, config.require_token, config.require_token_for_metrics
    )
