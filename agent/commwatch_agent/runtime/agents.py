"""Which agents are meant: names on a command line or in the settings, files of Prometheus' service discovery, and DNS names."""

from __future__ import annotations

import json
import socket
import urllib.parse
from collections.abc import Iterable
from pathlib import Path

from commwatch.api.client import together
from commwatch.wire import crossing
from commwatch.wire.addresses import DNS, TARGETS, BadAddress, url_of

#: Bytes of a target file.
_MOST_BYTES = 16 << 20


def addresses(names: Iterable[str], secure: bool = False) -> list[str]:
    """Return the URLs of agents, each once; waits for files and for the DNS.

    Args:
        names: ``host``, ``host:port``, URLs, target files (``.json``) in Prometheus' ``file_sd`` format, and ``dns+host:port`` for
            all addresses that a DNS name has.
        secure: use TLS for addresses without a scheme.

    Raises:
        BadAddress: a file cannot be read or has another format, an address is not valid, or a DNS name has no address.
    """
    found: dict[str, None] = {}
    for name in names:
        if name.endswith(TARGETS):
            found.update(dict.fromkeys(url_of(target, secure) for target in _targets(Path(name))))
        elif name.startswith(DNS):
            found.update(dict.fromkeys(_resolved(url_of(name.removeprefix(DNS), secure), name)))
        else:
            found[url_of(name, secure)] = None
    return list(found)


def without_address(names: Iterable[str], secure: bool = False) -> list[str]:
    """Return why hosts of agents have no address at the moment, one line for each; arguments and errors of files as for ``addresses``."""
    hosts = [host for name in names for host in (_targets(Path(name)) if name.endswith(TARGETS) else [name])]

    def trouble(host: str) -> str:
        try:
            _resolved(url_of(host.removeprefix(DNS), secure), host)
        except BadAddress as error:
            return str(error)
        return ""

    found = zip(hosts, together(trouble, hosts), strict=True)
    return [f"{host}: no answer of the name server" if says is None else says for host, says in found if says != ""]


def _targets(file: Path) -> list[str]:
    try:
        entries = json.loads(crossing.read(file, _MOST_BYTES, crossing.operator()))
        return [str(target) for entry in entries for target in entry["targets"]]
    except OSError as error:
        raise BadAddress(f"{file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadAddress(f"{file}: not a Prometheus file_sd target file: {error}") from None


def _resolved(url: str, name: str) -> list[str]:
    """Return the URL once for each address of its host; ``name``: for the error."""
    parts = urllib.parse.urlsplit(url)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise BadAddress(f"{name}: {getattr(error, 'strerror', None) or error}") from None
    hosts = dict.fromkeys(str(address[0]) for *_, address in found)
    return [f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port}" for host in hosts]
