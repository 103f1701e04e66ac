"""Connects the delivery of alerts (``alerts/commwatch_alerts/delivery.py``) with the settings and ``/metrics``."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from ipaddress import ip_address
from shutil import which
from socket import AF_INET, AF_INET6, AI_NUMERICHOST, SOCK_DGRAM, getaddrinfo, gethostname, socket

from commwatch_agent.config import Config
from commwatch_agent.runtime.agent_log import about
from commwatch_alerts.delivery import Delivery
from commwatch_alerts.kept import KeptFile
from commwatch_alerts.receivers.opening import receivers
from commwatch_alerts.receivers.sending import CannotSend
from commwatch_alerts.receivers.settings import ReceiverConfig
from commwatch_collectors.registry import Reading

log = logging.getLogger("commwatch")


def delivery_of(config: Config, agent_url: str) -> Delivery:
    """Return the delivery to the receivers of the settings; each receiver has its own thread.

    Args:
        agent_url: base URL of the agent, for links in notifications.
    """
    warn_of_unusable(config.receivers)
    return Delivery(receivers(config.receivers, agent_url), file=KeptFile(config.sent_alerts))


def unusable(asked: Iterable[ReceiverConfig], *, variables: bool) -> Iterator[str]:
    """Yield the receivers with a secret that cannot be read now, or a program that is not there, and why.

    Args:
        variables: also look at secrets in environment variables.
    """
    for receiver in asked:
        if receiver.command and which(receiver.command[0]) is None:
            yield f"receiver {receiver.name}: command: {receiver.command[0]}: no such program"
        for secret in receiver.secrets:
            try:
                if variables or secret.file is not None:
                    secret.read()
            except CannotSend as error:
                yield f"receiver {receiver.name}: {error}"


def warn_of_unusable(asked: Iterable[ReceiverConfig]) -> None:
    """Log the receivers to which no alert can be sent as things are; a secret is read at each use, so it may still come."""
    for trouble in unusable(asked, variables=True):
        log.warning("%s; no alert is sent there until that is mended", trouble, **about("no_secret"))


def address_of(config: Config, port: int) -> str:
    """Return the agent's URL for people; it leads to this host from others, unless the agent listens only on its own host."""
    return _url(config, _name_for_others() if _is_on_all_addresses(config.host) else config.host, port)


def url_of(config: Config, port: int) -> str:
    """Return the agent's URL for this machine: the address, or with TLS the name, because certificates are for names."""
    by_name = config.tls_cert is not None and _is_on_all_addresses(config.host)
    return _url(config, gethostname() if by_name else config.host, port)


def _is_on_all_addresses(host: str) -> bool:
    """Return whether a host to listen on means all addresses of the machine, however it is written: ``0``, ``0.0.0.0``, ``::``."""
    try:
        found = getaddrinfo(host, None, flags=AI_NUMERICHOST)
    except OSError:  # a name
        return False
    return ip_address(str(found[0][4][0]).partition("%")[0]).is_unspecified


def _name_for_others() -> str:
    """Return the name of this machine; if that is one of every machine, the address that leads to others."""
    name = gethostname()
    if name.partition(".")[0] != "localhost":
        return name
    for family, anywhere in ((AF_INET, "192.0.2.1"), (AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket(family, SOCK_DGRAM) as way:
            way.connect((anywhere, 9))  # sends nothing
            return str(way.getsockname()[0])
    return name


def _url(config: Config, host: str, port: int) -> str:
    scheme = "http" if config.tls_cert is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def readings(delivery: Delivery) -> list[Reading]:
    """Return the counters and queue lengths of the receivers for ``/metrics``."""
    found = []
    for each in delivery.delivered():
        results = {"sent": each.sent, "failed": each.failed, "dropped": each.dropped}
        found += [Reading("notifications_total", (each.receiver, name), count) for name, count in results.items()]
        found.append(Reading("notifications_waiting", (each.receiver,), each.waiting))
    return found
