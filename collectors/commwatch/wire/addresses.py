"""Addresses of agents as people write them."""

from __future__ import annotations

import contextlib
import re
from urllib.parse import urlsplit

from commwatch.wire.errors import UsageError

DEFAULT_PORT = 9477
#: Before a DNS name with one address for each agent, as Thanos and VictoriaMetrics write it: a headless service.
DNS = "dns+"
#: Ends the name of a file with addresses, in Prometheus' ``file_sd`` format.
TARGETS = ".json"


class BadAddress(UsageError):
    """An address is not an agent's, or a file of addresses cannot be read; the message names it."""

    exit_code = 2


def url_of(name: str, secure: bool) -> str:
    """Return the URL of an agent.

    Args:
        name: ``host``, ``host:port`` or a URL.
        secure: use TLS if the name has no scheme.

    Raises:
        BadAddress: it is not a valid address.
    """
    scheme, separator, _ = name.partition("://")
    if separator:
        if scheme.lower() not in ("http", "https"):  # urllib would also read files
            raise BadAddress(f"{name}: not an agent's address; give HOST, HOST:PORT, or an http or https URL")
        _port_of(name, name)
        return name.rstrip("/")
    url = f"http{'s' * secure}://{name}"
    return url if _port_of(url, name) is not None else f"{url}:{DEFAULT_PORT}"


def _port_of(url: str, name: str) -> int | None:
    """Return the port of a URL; ``None``: it has none. Raises ``BadAddress``, with the name, for what is no port."""
    with contextlib.suppress(ValueError):  # spaces, a port that is no number, or too large; brackets that do not fit
        parts = urlsplit(url)
        if parts.hostname and parts.port != 0 and "@" not in parts.netloc and not re.search(r"\s", url):
            return parts.port
    raise BadAddress(f"{name}: needs a host, or HOST:PORT with a port from 1 to 65535; IPv6 addresses in brackets")


def hosts_and_ports(text: str) -> list[tuple[str, int]] | None:
    """Return hosts and ports from a comma-separated text; ``None`` if one is invalid.

    >>> hosts_and_ports("localhost:28028, [::1]:28029")
    [('localhost', 28028), ('::1', 28029)]
    """
    found = []
    for part in text.split(","):
        host, _, port = part.strip().rpartition(":")
        if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
            return None
        found.append((host.removeprefix("[").removesuffix("]"), int(port)))
    return found
