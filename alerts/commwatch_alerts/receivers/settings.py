"""``[[receivers]]`` of the settings: their keys, and the checks of each table.

Error messages do not repeat values that could be secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from commwatch_alerts.model import SEVERITIES, WARNING
from commwatch_alerts.receivers.sending import Secret
from commwatch_alerts.values import SWITCH, BadValue, ListOf, Type, from_json, one_of, text

ALERTMANAGER, WEBHOOK, SLACK, COMMAND = KINDS = ("alertmanager", "webhook", "slack", "command")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_TOKEN, _PASSWORD, _URL = (("token_file", "token_env"), ("password_file", "password_env"), ("url_file", "url_env"))
_ALWAYS = ("kind", "name", "severity")
_OFTEN = (*_ALWAYS, "send_resolved", "repeat")
#: The keys of each kind.
KEYS = {
    ALERTMANAGER: (*_ALWAYS, "url", "urls", *_TOKEN, "username", *_PASSWORD),
    WEBHOOK: (*_OFTEN, "url", *_URL, *_TOKEN, "username", *_PASSWORD),
    SLACK: (*_OFTEN, *_URL),
    COMMAND: (*_OFTEN, "command"),
}
#: The keys without which a table of a kind is incomplete: one of these sets of keys.
_NEEDED = {
    ALERTMANAGER: (("url",), ("urls",)),
    WEBHOOK: (("url",), ("url_file",), ("url_env",)),
    SLACK: (("url_file",), ("url_env",)),
    COMMAND: (("command",),),
}
#: Keys that would hold a secret, and are refused; with the keys to use in their place.
_LITERAL = {"token": _TOKEN, "password": _PASSWORD, "bearer_token": _TOKEN, "webhook_url": _URL, "api_url": _URL}
_NAME = r"^[A-Za-z0-9_.@-]{1,64}$"
#: URLs, of which ``is_url`` checks the rest: printable ASCII, without '@' in front of the path.
URL_PATTERN = r"""^[hH][tT][tT][pP][sS]?://[!"$-.0-9;->A-~][!"$-.0->A-~]*([/?#][!-~]*)?$"""


def is_url(address: str) -> bool:
    """Return whether ``address`` is an HTTP URL to post to, without user name and password."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        return False
    sound = address.isascii() and address.isprintable() and " " not in address and "@" not in parts.netloc
    return sound and parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0


def _url(value: str) -> str:
    if not is_url(value):
        raise ValueError
    return value


def _line(value: str) -> str:
    if not value.isprintable():
        raise ValueError
    return value


def _repeat_s(value: str) -> float:
    repeat_s = float(value[:-1]) * _UNITS_S[value[-1]]
    if repeat_s < 60:
        raise ValueError
    return repeat_s


class _Command(ListOf):
    def checked(self, value: Any, where: str, *, show: bool = True) -> tuple[str, ...]:
        if isinstance(value, list) and value[:1] == [""]:
            raise self._wrong(value, where, show)
        return super().checked(value, where, show=show)


_FILE = text("a text of one line", convert=lambda value: expanduser(_line(value)))  # noqa: PTH111
_VARIABLE = text("the name of a variable of the environment, not the secret itself", "^[A-Za-z_][A-Za-z0-9_]*$")
_ADDRESS = text(
    "http:// or https:// and a host; a user and password go into username and password_file", URL_PATTERN, convert=_url
)
_ARGUMENT = Type("a text without NUL", {"type": "string", "pattern": r"^[^\x00]*$"})
_TYPES: dict[str, Type] = {
    "kind": one_of(KINDS),
    "name": text("letters, digits, '_', '-', '.', '@', at most 64 of them", _NAME),
    "severity": one_of(SEVERITIES),
    "send_resolved": SWITCH,
    "repeat": text(
        "a time of at least a minute, such as 4h, 30m or 1d",
        "^[0-9]{1,6}[smhd]$",
        convert=_repeat_s,
        refused={"not": {"pattern": "^(0*[0-5]?[0-9]s|0+[mhd])$"}},
    ),
    "url": _ADDRESS,
    "urls": ListOf(_ADDRESS, "a list of addresses", least=1),
    "username": text("a text of one line", convert=_line),
    "command": _Command(_ARGUMENT, "a list of a program and its arguments", least=1),
    **dict.fromkeys(("url_file", "token_file", "password_file"), _FILE),
    **dict.fromkeys(("url_env", "token_env", "password_env"), _VARIABLE),
}


@dataclass(frozen=True)
class ReceiverConfig:
    """One receiver of the settings. It has no secrets, only the places where they are stored."""

    kind: str
    name: str
    severity: str = WARNING
    send_resolved: bool = True
    repeat_s: float = 4 * 3600.0
    #: Addresses that are no secrets.
    urls: tuple[str, ...] = ()
    #: An address that is a secret.
    url: Secret | None = None
    token: Secret | None = None
    username: str | None = None
    password: Secret | None = None
    command: tuple[str, ...] = ()

    @property
    def secrets(self) -> list[Secret]:
        """The secrets that the receiver reads when it sends."""
        return [secret for secret in (self.url, self.token, self.password) if secret is not None]


def _schema_of(kind: str) -> dict[str, Any]:
    properties = {key: _TYPES[key].schema for key in KEYS[kind]}
    return {
        "additionalProperties": False,
        "properties": properties,
        "anyOf": [{"required": list(keys)} for keys in _NEEDED[kind]],
    }


class _Receivers(Type):
    """The receivers, each with a name of its own. In the environment they are JSON."""

    def __init__(self) -> None:
        items = {"type": "object", "required": ["kind"], "properties": {"kind": _TYPES["kind"].schema}}
        by_kind = [{"if": {"properties": {"kind": {"const": kind}}}, "then": _schema_of(kind)} for kind in KINDS]
        super().__init__("tables: [[receivers]] above each", {"type": "array", "items": {**items, "allOf": by_kind}})

    def checked(self, value: Any, where: str, *, show: bool = True) -> tuple[ReceiverConfig, ...]:
        """Return the receivers; arguments and errors as in ``Type``. No message repeats a value."""
        if not isinstance(value, list):
            raise self._wrong(value, where, show=False)
        found: dict[str, ReceiverConfig] = {}
        for number, table in enumerate(value, 1):
            if not isinstance(table, dict):
                raise BadValue(f"{where}: receiver {number}: needs a table with a kind: {', '.join(KINDS)}")
            name = table.get("name")
            who = f" ({name})" if isinstance(name, str) and re.fullmatch(_NAME, name) else ""
            try:
                config = _receiver(table)
            except BadValue as error:
                raise BadValue(f"{where}: receiver {number}{who}: {error}") from None
            if config.name in found:
                why = "another receiver has this name; give each its own"
                raise BadValue(f"{where}: receiver {number} ({config.name}): {why}")
            found[config.name] = config
        return tuple(found.values())

    def parsed(self, text: str) -> Any:
        """Return the tables that a text in the environment means."""
        return from_json(text, list, '[{"kind": "slack", "url_env": "SLACK_URL"}]')


def _receiver(table: Mapping[str, Any]) -> ReceiverConfig:
    """Return the receiver of a table; raise BadValue if it is wrong."""
    kind = table.get("kind")
    if kind not in KINDS:
        raise BadValue(f"kind: needs one of {', '.join(KINDS)}")
    for key in table:
        if key in _LITERAL or (kind == SLACK and key == "url"):
            file, variable = _LITERAL.get(key, _URL)
            raise BadValue(f"{key}: a secret must not be in the settings; write it to a file and set {file} = \"PATH\", "
                           f"or put it in the environment and set {variable} = \"NAME\"")  # fmt: skip
        if key not in KEYS[kind]:
            raise BadValue(f"unknown key '{key}'; {kind} has {', '.join(KEYS[kind])}")
    given = {key: _TYPES[key].checked(value, key, show=False) for key, value in table.items()}
    _check_whole(kind, given)
    return ReceiverConfig(
        kind,
        given.get("name", kind),
        given.get("severity", WARNING),
        given.get("send_resolved", True),
        given.get("repeat", ReceiverConfig.repeat_s),
        urls=tuple(dict.fromkeys((*([given["url"]] if "url" in given else []), *given.get("urls", ())))),
        url=_secret(given, *_URL),
        token=_secret(given, *_TOKEN),
        username=given.get("username"),
        password=_secret(given, *_PASSWORD),
        command=given.get("command", ()),
    )


def _check_whole(kind: str, given: Mapping[str, Any]) -> None:
    """Check that the keys of a table go together; raise BadValue."""
    for file, variable in (_URL, _TOKEN, _PASSWORD):
        if file in given and variable in given:
            raise BadValue(f"{file} and {variable}: give one of them")
    secret, token, password = (any(key in given for key in keys) for keys in (_URL, _TOKEN, _PASSWORD))
    user, needed = given.get("username", ""), _NEEDED[kind]
    wrong = {
        "url: given here and in a file or the environment; give one of them": "url" in given and secret,
        f"needs {' or '.join(' and '.join(keys) for keys in needed)}": not any(
            {*keys} <= given.keys() for keys in needed
        ),
        "username: needs password_file or password_env, and vice versa": bool(user) != password,
        "token and username: give one of them": user and token,
        "username: must not contain a colon": ":" in user,
    }
    for message, holds in wrong.items():
        if holds:
            raise BadValue(message)


def _secret(given: Mapping[str, Any], file: str, variable: str) -> Secret | None:
    if file in given:
        return Secret(file, file=Path(given[file]))
    return Secret(variable, variable=given[variable]) if variable in given else None


#: The type of the setting.
RECEIVERS = _Receivers()
