"""Connects the delivery of alerts (``alerts/commwatch_alerts/delivery.py``) with the settings and ``/metrics``."""

from __future__ import annotations

from socket import gethostname

from commwatch_agent.config import Config
from commwatch_alerts.delivery import Delivery
from commwatch_alerts.kept import KeptFile
from commwatch_alerts.receivers.settings import receivers
from commwatch_collectors.registry import Reading


def delivery_of(config: Config, agent_url: str) -> Delivery:
    """Return the delivery to the receivers of the settings; each receiver has its own thread.

    Args:
        agent_url: base URL of the agent, for links in notifications.
    """
    return Delivery(receivers(config.receivers, agent_url), file=KeptFile(config.sent_alerts))


def address_of(config: Config, port: int) -> str:
    """Return the agent's URL for people; it has the host's name if the agent listens on all addresses."""
    host = gethostname() if config.host in ("0.0.0.0", "::") else config.host  # noqa: S104 - nothing is bound here
    return _url(config, host, port)


def url_of(config: Config, port: int) -> str:
    """Return the agent's URL for this machine: the address, or with TLS the name, because certificates are for names."""
    return _url(config, config.host, port) if config.tls_cert is None else address_of(config, port)


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
