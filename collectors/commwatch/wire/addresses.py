"""Addresses of agents as people write them."""

from __future__ import annotations

from commwatch.wire.errors import UsageError

DEFAULT_PORT = 9477
#: Before a DNS name with one address for each agent, as Thanos and VictoriaMetrics write it: a headless service.
DNS = "dns+"


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
        return name.rstrip("/")
    host, colon, port = name.rpartition(":")
    is_port = bool(colon) and port.isdecimal() and (host.endswith("]") or ":" not in host)
    return f"http{'s' * secure}://{name}{'' if is_port else f':{DEFAULT_PORT}'}"


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
