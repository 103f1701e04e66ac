"""Types of the settings. Pure."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from commwatch.wire.addresses import DNS, TARGETS, BadAddress, hosts_and_ports, url_of
from commwatch.wire.errors import CommwatchError
from commwatch_agent.prometheus.metrics import METRICS, NAMED
from commwatch_agent.reference.links import UnknownLink, find, links
from commwatch_alerts.kind_settings import KIND
from commwatch_alerts.receivers.settings import URL_PATTERN, is_url
from commwatch_alerts.values import BadValue, ListOf, TableOf, Type, one_of, text

GPUS_AUTO, GPUS_REQUIRED, GPUS_OFF = GPUS = ("auto", "required", "off")
LOG_TEXT, LOG_JSON = LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", LOG_INFO := "info", "warning", "error")
_TAKEN = {"job", "instance", *METRICS["job_info"].labels} - {*NAMED}


class ConfigError(CommwatchError):
    """A setting is wrong; the message names it, its source and what would be right."""

    exit_code = 2
    names_command = False


class _PathType(Type):
    """A path, made absolute; ``~`` is the home of a user."""

    def __init__(self, needs: str) -> None:
        super().__init__(needs, {"type": "string", "minLength": 1}, _path)

    def checked(self, value: Any, where: str, *, show: bool = True) -> Any:
        """Return the path; arguments and errors as in ``Type``."""
        return super().checked(os.fspath(value) if isinstance(value, os.PathLike) else value, where, show=show)


def _path(value: str) -> Path:
    if "\0" in value:
        raise ValueError
    try:
        return Path(value).expanduser().absolute()
    except RuntimeError:
        raise BadValue(f"no such user: {value}") from None


def _where(check: Callable[[str], object]) -> Callable[[str], str]:
    """Return a conversion that refuses texts for which ``check`` returns something false."""

    def convert(value: str) -> str:
        if not check(value):
            raise ValueError
        return value

    return convert


def _is_host(value: str) -> bool:
    """Return whether a text is an address or a name: what has colons, or only digits and dots (``0``, ``127.1``), must be an address."""
    try:
        if ":" in value:
            ipaddress.IPv6Address(value)
        elif not re.search(r"[^0-9.]", value):
            socket.inet_aton(value)
    except (ValueError, OSError):
        return False
    return True


def _peer(value: str) -> str:
    try:
        if not value.endswith(TARGETS):
            url_of(value.removeprefix(DNS), secure=False)
    except BadAddress as error:
        raise BadValue(f"{DNS if value.startswith(DNS) else ''}{error}") from None
    return value


def _link(value: str) -> str:
    try:
        find(value)
    except UnknownLink as error:
        raise BadValue(str(error)) from None
    return value


def _label(value: str) -> str:
    if value in _TAKEN:
        raise BadValue("is a label of commwatch or Prometheus; choose another name")
    return value


def _endpoint(value: str) -> str:
    base = value.rstrip("/")
    if not is_url(base) or "?" in base or base.endswith(("/v1/metrics", "/v1/logs")):
        raise ValueError
    return base


DIRECTORY, FILE = _PathType("a directory"), _PathType("a file")
ADDRESS = text(
    "an IP address or a host name without scheme and port, such as 0.0.0.0 or ::1",
    r"^([A-Za-z0-9_][A-Za-z0-9._-]*|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9._-]+)?)$",
    convert=_where(_is_host),
)
NODE = text(
    "a name of letters, digits, '.', '_' and '-' (first a letter or digit, at most 253)",
    "^[A-Za-z0-9][A-Za-z0-9._-]{0,252}$",
)
RAS = text(
    "addresses such as localhost:28028",
    r"^\s*[^,/\s]+:[0-9]+\s*(,\s*[^,/\s]+:[0-9]+\s*)*$",
    convert=_where(lambda value: hosts_and_ports(value) is not None),
)
HOSTS = ListOf(
    text("a name such as node1.example.org or .example.org", r"^(\.?[A-Za-z0-9_][A-Za-z0-9._-]*|[0-9A-Fa-f:]+)$"),
    "a list of names",
)
PEERS = ListOf(text("an agent, such as node1, agents.json or dns+agents:9477", convert=_peer), "a list of agents")
GPU_USE, LOG_FORMAT, LOG_LEVEL = one_of(GPUS), one_of(LOG_FORMATS), one_of(LOG_LEVELS)
JOB_INFO = ListOf(one_of(NAMED), f"a list of any of {', '.join(NAMED)}")
_LINK = rf"^\s*(0*[1-9][0-9]*\s*x\s+)?({'|'.join(map(re.escape, links()))})\s*$"
LINKS = TableOf(
    text("a link such as nvlink4 or 8 x ib-ndr", convert=_link, refused={"pattern": _LINK}),
    "a table of groups and links",
    example='{"*": "nvlink4"}',
)
THRESHOLDS = TableOf(
    Type("a number without a unit, such as 0.4 or 30", {"type": "number"}),
    "a table of names and numbers",
    example='{"comm_share": 0.4}',
)
KINDS = TableOf(KIND, "tables: [kinds.NAME] above each", example='{"hang": {"for": "1m"}}')
LABELS = TableOf(
    text("one line of text, at most 200 characters", r"^[^\x00-\x1f\x7f]+$", most=200, convert=_where(str.isprintable)),
    "a table of labels and texts",
    names=text(
        "letters, digits and '_', and must not begin with a digit or '__'",
        "^([A-Za-z]|_[A-Za-z0-9])[A-Za-z0-9_]{0,63}$",
        convert=_label,
        refused={"not": {"enum": sorted(_TAKEN)}},
    ),
    example='{"cluster": "east"}',
)
ENDPOINT = text(
    "the base URL of an OTLP receiver, such as https://collector.example.com:4318 "
    "(without /v1/metrics, query, user or password)",
    URL_PATTERN,
    convert=_endpoint,
    refused={"not": {"pattern": r"\?|/v1/(metrics|logs)/*$"}},
)
