"""What the verbs of ``commwatch manifest`` share: flags, and checks of their values."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Collection
from ipaddress import ip_address
from pathlib import Path

from commwatch.wire.errors import UsageError
from commwatch_agent.config_sources import keys_in

#: Flags of the agent without a value.
_SWITCHES = ("require_token", "insecure")
#: A label of a node, and its name in Prometheus.
_NODE_LABEL = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_./]*)=([A-Za-z][A-Za-z0-9_]*)")


def add_node_label(command: argparse.ArgumentParser) -> None:
    """Add the flag for labels of nodes."""
    command.add_argument(
        "--node-label",
        action="append",
        default=[],
        metavar="KEY=LABEL",
        help="label of the nodes that Prometheus adds to the series, such as topology.kubernetes.io/zone=zone; may be repeated",
    )


def add_runbook_url(command: argparse.ArgumentParser, served_by: str = "an agent on this host") -> None:
    """Add the flag for the runbook that alerts link to."""
    command.add_argument("--runbook-url", metavar="URL", help=f"URL of the runbook (default: that of {served_by})")


def node_labels(given: list[str]) -> dict[str, str]:
    """Return the labels of nodes with their names in Prometheus; raise ``UsageError`` if one is wrong."""
    found = {}
    for each in given:
        parts = _NODE_LABEL.fullmatch(each)
        if parts is None:
            raise UsageError(
                f"--node-label {shlex.quote(each)}: needs KEY=LABEL, such as topology.kubernetes.io/zone=zone"
            )
        found[parts[1]] = parts[2]
    return found


def check_utf8(arguments: argparse.Namespace, *names: str) -> None:
    """Raise ``UsageError`` if one of these arguments has bytes that are not UTF-8: no reader of the output would accept them."""
    for name in names:
        check_text(f"--{name.replace('_', '-')} ", str(getattr(arguments, name) or ""))


def check_text(where: str, value: str) -> None:
    """Raise ``UsageError`` if a value has bytes that are not UTF-8; ``where``, before it, names it."""
    if value != value.encode(errors="replace").decode():
        raise UsageError(f"{where}{shlex.quote(value)}: needs text in UTF-8")


def refuse_flags(arguments: argparse.Namespace, why: str, *names: str) -> None:
    """Raise ``UsageError`` for flags that would have no effect."""
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) is not None]
    if given:
        raise UsageError(f"{', '.join(given)}: {why}")


def refuse_settings(file: Path | None, why: str, names: Collection[str]) -> None:
    """Raise ``UsageError`` for settings in a settings file that would have no effect."""
    given = [] if file is None else [key for key in keys_in(file) if key in names]
    if given:
        raise UsageError(f"{file}: {', '.join(given)}: {why}")


def is_local(host: str) -> bool:
    """Return whether only clients on the same machine reach this address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_host(arguments: argparse.Namespace) -> None:
    """Raise ``UsageError`` for a host with which the agents would not start."""
    host = arguments.host
    if host is None or arguments.insecure or arguments.config is not None:
        return
    if not is_local(host):
        raise UsageError(
            f"--host {shlex.quote(host)}: other machines can reach it; name settings with tls_cert and tls_key (--config), "
            "or add --insecure if the network is private"
        )


def program() -> Path:
    """Return the path of the program ``commwatch``."""
    return Path(sys.executable).with_name("commwatch")


def given(arguments: argparse.Namespace) -> list[str]:
    """Return the agent's flags that were given to this command; the agent reads all other settings when it starts."""
    files = ("config", "token_file", "ca_file", "client_cert")
    values = {name: getattr(arguments, name, None) for name in (*files, "host", "port")}
    flags = {
        f"--{name.replace('_', '-')}": Path(value).absolute() if name in files and value is not None else value
        for name, value in values.items()
    }
    words = [str(word) for flag, value in flags.items() if value is not None for word in (flag, value)]
    return words + [f"--{name.replace('_', '-')}" for name in _SWITCHES if getattr(arguments, name, None)]
