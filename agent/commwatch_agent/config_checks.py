"""Checks of single settings: what type and range a value needs. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commwatch.wire.addresses import DNS, BadAddress, hosts_and_ports, url_of
from commwatch.wire.errors import CommwatchError
from commwatch_agent.prometheus.metrics import METRICS, NAMED
from commwatch_agent.reference.links import UnknownLink, find

if TYPE_CHECKING:
    from commwatch_alerts.model import KindSettings
    from commwatch_alerts.receivers.settings import ReceiverConfig

GPUS_AUTO, GPUS_REQUIRED, GPUS_OFF = GPUS = ("auto", "required", "off")
LOG_TEXT, LOG_JSON = LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", LOG_INFO := "info", "warning", "error")
JOB_INFO = NAMED


class ConfigError(CommwatchError):
    """A setting is wrong; the message names it, its source and what would be right."""

    exit_code = 2
    names_command = False


_RANGES: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "interval": (0.01, 60),
    "raw_bytes": (1 << 20, 1 << 50),
    "summary_bytes": (1 << 20, 1 << 50),
    "keep_days": (0.01, 3650),
    "keep_ended": (0, 86400),
    "otlp_interval": (1, 3600),
    "profile_every": (0, 10**9),
}
#: Settings that are files.
FILES = (
    "token_file", "tls_cert", "tls_key", "tls_client_ca", "ca_file", "client_cert",
    "otlp_headers_file", "otlp_ca_file", "otlp_client_cert",
)  # fmt: skip
_SWITCHES = ("require_token", "require_token_for_metrics", "insecure", "discover_peers", "otlp_logs")
#: By key of a setting that is a text: what it must be.
_TEXTS = {
    **dict.fromkeys(("dir", "state", "inspector_dir"), "a directory"),
    **dict.fromkeys(FILES, "a file"),
    "host": "an address",
    "ras": "addresses such as localhost:28028",
}


def checked(key: str, value: Any, where: str) -> Any:
    """Return the value of a setting as ``Config`` has it.

    Args:
        where: where the value was given, for the message.

    Raises:
        ConfigError: wrong type or range.
    """
    if key in _TEXTS:
        return _checked_text(key, value, where)
    return _CHECKS[key](value, where) if key in _CHECKS else _checked_number(key, value, where)


def _checked_number(key: str, value: Any, where: str) -> int | float:
    low, high = _RANGES[key]
    integral = key in ("port", "raw_bytes", "summary_bytes", "profile_every")
    if isinstance(value, bool) or not isinstance(value, int if integral else (int, float)) or not low <= value <= high:
        raise ConfigError(
            f"{where}: needs a {'whole ' if integral else ''}number from {low:g} to {high:g}, not {value!r}"
        )
    return value


def _checked_choice(choices: tuple[str, ...], value: Any, where: str) -> str:
    if value not in choices:
        raise ConfigError(f"{where}: needs one of {', '.join(choices)}, not {value!r}")
    return str(value)


def _checked_job_info(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(each in JOB_INFO for each in value):
        raise ConfigError(f"{where}: needs a list of any of {', '.join(JOB_INFO)}, not {value!r}")
    return tuple(value)


def _checked_switch(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: needs true or false, not {value!r}")
    return value


def _checked_text(key: str, value: Any, where: str) -> str | Path:
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else ""
    if not text or "\0" in text or (key == "ras" and hosts_and_ports(text) is None):
        raise ConfigError(f"{where}: needs {_TEXTS[key]}, not {value!r}")
    try:
        return text if key in ("host", "ras") else Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(f"{where}: no such user: {text}") from None


def _checked_node(value: Any, where: str) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}", value):
        raise ConfigError(f"{where}: needs a name of letters, digits, '.', '_' and '-', not {value!r}")
    return value


def _checked_hosts(value: Any, where: str) -> tuple[str, ...]:
    named = r"\.?[A-Za-z0-9_](?:[A-Za-z0-9._-]*)|[0-9A-Fa-f:]+"
    if not isinstance(value, list) or not all(isinstance(each, str) and re.fullmatch(named, each) for each in value):
        raise ConfigError(
            f'{where}: needs a list of names, such as ["node1.example.org", ".example.org"], not {value!r}'
        )
    return tuple(value)


def _checked_peers(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise ConfigError(
            f'{where}: needs a list of agents, such as ["node1", "agents.json", "dns+agents:9477"], not {value!r}'
        )
    try:
        for each in value:
            url_of(each.removeprefix(DNS), secure=False)
    except BadAddress as error:
        raise ConfigError(f"{where}: {error}") from None
    return tuple(value)


def _checked_links(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: needs a table of groups and links, not {value!r}")
    for group, link in value.items():
        if not isinstance(link, str):
            raise ConfigError(f"{where}: {group}: needs the key of a link, not {link!r}")
        try:
            find(link)
        except UnknownLink as error:
            raise ConfigError(f"{where}: {group}: {error}") from None
    return value


def _checked_thresholds(value: Any, where: str) -> dict[str, float]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: needs a table of names and numbers, not {value!r}")
    for name, number in value.items():
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise ConfigError(f"{where}: {name}: needs a number, not {number!r}")
    return value


def _checked_kinds(value: Any, where: str) -> dict[str, KindSettings]:
    # Here, because they import pydantic, which most commands do without.
    from commwatch_alerts import kind_settings
    from commwatch_alerts.tables import BadTable

    try:
        return kind_settings.checked(value)
    except BadTable as error:
        raise ConfigError(f"{where}: {error}") from None


def _checked_labels(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: needs a table of labels and texts, not {value!r}")
    taken = {"job", "instance", *METRICS["job_info"].labels} - {*NAMED}
    for name, text in value.items():
        if not re.fullmatch(r"(?!__)[A-Za-z_][A-Za-z0-9_]{0,63}", name):
            raise ConfigError(
                f"{where}: {name}: needs letters, digits and '_', and must not begin with a digit or '__'"
            )
        if name in taken:
            raise ConfigError(f"{where}: {name}: is a label of commwatch or Prometheus; choose another name")
        if not isinstance(text, str) or not text.isprintable() or not 0 < len(text) <= 200:
            raise ConfigError(f"{where}: {name}: needs one line of text, at most 200 characters, not {text!r}")
    return value


def _checked_endpoint(value: Any, where: str) -> str:
    from commwatch_alerts.receivers.hooks import is_url

    text = value.rstrip("/") if isinstance(value, str) else ""
    if not is_url(text) or "?" in text or text.endswith(("/v1/metrics", "/v1/logs")):
        raise ConfigError(
            f"{where}: needs the base URL of an OTLP receiver, such as https://collector.example.com:4318 "
            "(without /v1/metrics, query, user or password)"
        )
    return text


def _checked_receivers(value: Any, where: str) -> tuple[ReceiverConfig, ...]:
    # Here, because it imports pydantic, which most commands do without.
    from commwatch_alerts.receivers import settings

    try:
        return settings.checked(value)
    except settings.BadReceiver as error:
        raise ConfigError(f"{where}: {error}") from None


#: Checks of the settings that are neither texts nor numbers.
_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    **dict.fromkeys(_SWITCHES, _checked_switch),
    "allowed_hosts": _checked_hosts,
    "node": _checked_node,
    "peers": _checked_peers,
    "gpus": partial(_checked_choice, GPUS),
    "log_format": partial(_checked_choice, LOG_FORMATS),
    "log_level": partial(_checked_choice, LOG_LEVELS),
    "job_info": _checked_job_info,
    "links": _checked_links,
    "thresholds": _checked_thresholds,
    "kinds": _checked_kinds,
    "labels": _checked_labels,
    "receivers": _checked_receivers,
    "otlp_endpoint": _checked_endpoint,
}
