"""The listening side of an agent: socket, token, TLS, and the server in front of the routes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from commwatch.api.client_tls import tls_context
from commwatch.wire import tokens
from commwatch.wire.addresses import DEFAULT_PORT
from commwatch.wire.errors import CommwatchError
from commwatch_agent.config import Config
from commwatch_agent.config_checks import ConfigError
from commwatch_agent.notify.delivery_setup import url_of
from commwatch_agent.runtime.agent_log import about
from commwatch_agent.runtime.offload import SharedCall
from commwatch_agent.runtime.run_lock import CannotStart, bind_remedy
from commwatch_agent.web import access, tls
from commwatch_agent.web.gate import Gate
from commwatch_agent.web.http_protocol import MOST_HEADER_BYTES, Connection, Handshake

log = logging.getLogger("commwatch")
#: Seconds between two checks whether the certificate was renewed.
_RENEWAL_S = 5
#: Seconds that the server waits for that check before it goes on.
_PATIENCE_S = 0.1
#: Seconds between two looks whether the server ends.
_LOOK_S = 0.5


def reachable_at(config: Config, listening: socket.socket) -> str | None:
    """Return the URL at which agents of other nodes reach this one; ``None``: they cannot, or are not to learn it.

    An agent that listens on all addresses of its machine gives ``0.0.0.0`` or ``::``, for which a rank puts the one that leads to the other
    nodes. With TLS it gives the name, because certificates are for names.
    """
    address, port = listening.getsockname()[:2]
    return url_of(config, port) if config.discover_peers and access.beyond_loopback(address) else None


def listen(config: Config) -> socket.socket:
    """Return the agent's listening socket; it accepts no connection yet.

    Raises:
        ConfigError: as ``check``, also for a host that is a name.
        CannotStart: there is no such address, or the port is taken.
    """
    check(config)  # first: what `config check` finds is refused with its line and exit code
    listener = _bound(config)
    try:
        _check_encrypted(config, listener.getsockname()[0])
    except ConfigError:
        listener.close()
        raise
    listener.listen(128)
    return listener


def check(config: Config) -> None:
    """Check without a socket what the agent needs to listen, and the files of its requests to other agents.

    Raises:
        ConfigError: other machines can reach the agent without TLS or ``insecure``, or a file cannot be used.
    """
    try:
        with contextlib.suppress(ValueError):  # a name, whose address the agent finds when it starts
            _check_encrypted(config, str(ipaddress.ip_address(config.host)))
        if config.tls_cert is not None:
            _certificates(config)
        if config.token_file is not None:
            tokens.read(config.token_file)
        _check_requests(config)
    except CommwatchError as error:
        raise ConfigError(str(error)) from None


def _check_encrypted(config: Config, address: str) -> None:
    if access.beyond_loopback(address) and config.tls_cert is None and not config.insecure:
        raise ConfigError(
            f"host {config.host} can be reached from other machines, and connections are not encrypted: "
            "set tls_cert and tls_key, or --insecure (insecure = true) if the network is private"
        )


def _bound(config: Config) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    wanted = DEFAULT_PORT if config.port is None else config.port
    listener = socket.socket(
        family, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )  # explicit, or asyncio leaves Nagle's delay on
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, wanted))
    except OSError as error:
        if config.port is not None or error.errno != errno.EADDRINUSE:
            listener.close()
            raise CannotStart(
                f"cannot listen on {config.host}:{wanted}: {error.strerror}; {bind_remedy(error)}"
            ) from None
        listener.bind((config.host, 0))
        log.warning("port %d is taken, using %d", wanted, listener.getsockname()[1])
    return listener


class Server(uvicorn.Server):
    """The HTTP server of ``app``, behind its gate.

    Args:
        address: IP address that it listens on.

    Raises:
        CannotStart: the token cannot be written.
        BadToken, BadCertificate: token, certificate, or a file of requests to other agents cannot be used.
    """

    def __init__(self, app: ASGIApp, config: Config, address: str) -> None:
        self._address = address
        self._gate = Gate(app, _rules(config, address), _token(config), config.tls_cert is not None)
        self._certificates = _certificates(config)
        _check_requests(config)
        self._renewing = SharedCall("certificates", self._renew)
        settings = uvicorn.Config(
            self._gate,
            http=self._connection,  # type: ignore[arg-type]
            ws="none",
            h11_max_incomplete_event_size=MOST_HEADER_BYTES,
            log_config=None,
            log_level="error",  # malformed requests are not worth a log line
            access_log=False,
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=2,
            callback_notify=None if self._certificates is None else self._check_certificates,
            timeout_notify=_RENEWAL_S,
        )
        settings.load()
        super().__init__(settings)

    async def main_loop(self) -> None:
        """Run until the end. uvicorn's own loop looks ten times a second, for a third of the CPU that an idle agent takes."""
        while not await self.on_tick(0):  # 0: renews the date in the headers
            await asyncio.sleep(_LOOK_S)

    def prepared(self, config: Config) -> tuple[Callable[[], None], bool]:
        """Prepare changed settings of access; TLS stays on or off.

        Returns:
            A function that applies them, and whether the certificate's files differ from those in use.

        Raises:
            CannotStart: the token cannot be written.
            BadToken, BadCertificate: token, certificate, or a file of requests to other agents cannot be used.
        """
        rules, token, certificates = _rules(config, self._address), _token(config), _certificates(config)
        _check_requests(config)

        def apply() -> None:
            self._gate.rules, self._gate.token = rules, SharedCall("token", token)
            self._certificates, self._renewing = certificates, SharedCall("certificates", self._renew)

        before, after = (each and each.known for each in (self._certificates, certificates))
        return apply, before != after

    def _connection(self, **about: Any) -> asyncio.Protocol:
        plain = Connection(**about)
        return plain if self._certificates is None else Handshake(self._certificates.context, plain)

    async def _check_certificates(self) -> None:
        with contextlib.suppress(TimeoutError):
            await self._renewing.ask(_PATIENCE_S)

    def _renew(self) -> None:
        if self._certificates is not None:
            self._certificates.renew()


def _certificates(config: Config) -> tls.Certificates | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    return tls.Certificates(config.tls_cert, config.tls_key, config.tls_client_ca)


def _check_requests(config: Config) -> None:
    """Raise ``BadCertificate`` if a file of requests to other agents cannot be used."""
    if config.expects_tls:
        try:
            tls_context(config.ca_file, config.client_cert)
        except OSError as error:
            raise tls.BadCertificate(str(error)) from None


def _token(config: Config) -> Callable[[], str]:
    """Return a function that reads the token from its file each time, because it may change while the agent runs."""
    own = config.dir / tokens.NAME
    read = (
        partial(tokens.read_own, own, os.getuid())
        if config.token_file is None
        else partial(tokens.read, config.token_file)
    )
    try:
        if config.token_file is None:
            tokens.make(own)
        known = read()
    except OSError as error:
        raise CannotStart(f"token file {own}: {error.strerror}; name another with --token-file") from None

    def current() -> str:
        nonlocal known
        token = read()
        if token != known:
            known = token
            log.info("the token has changed: requests need that in %s", config.token_file or own, **about("new_token"))
        return token

    return current


def _rules(config: Config, address: str) -> access.Rules:
    names = [config.host, socket.gethostname(), socket.gethostname().partition(".")[0]]
    if access.beyond_loopback(address):  # may query a name server
        names.append(socket.getfqdn())
    return access.rules_of(
        address, tuple(names), config.allowed_hosts, config.require_token, config.require_token_for_metrics
    )
