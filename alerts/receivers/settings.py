"""``[[receivers]]`` of the settings: their keys, the checks of each table, and the receivers that they describe.

Error messages do not repeat values that could be secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commwatch.alerts.model import SEVERITIES, WARNING
from commwatch.alerts.outbox import Policy
from commwatch.alerts.receivers.command import Command
from commwatch.alerts.receivers.hooks import (
    ALERTMANAGER_LINGER_S,
    ALERTMANAGER_REPEAT_S,
    Alertmanager,
    Login,
    Slack,
    Webhook,
    is_url,
)
from commwatch.alerts.receivers.mail import PORTS, STARTTLS, TLS, Mail
from commwatch.alerts.receivers.sending import Receiver, Secret

ALERTMANAGER, WEBHOOK, SLACK, EMAIL, COMMAND = KINDS = ("alertmanager", "webhook", "slack", "email", "command")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LEAST_REPEAT_S, _REPEAT_S = 60.0, 4 * 3600.0
_TOKEN, _PASSWORD, _URL = (("token_file", "token_env"), ("password_file", "password_env"), ("url_file", "url_env"))
_ALWAYS = ("kind", "name", "severity")
_OFTEN = (*_ALWAYS, "send_resolved", "repeat")
#: The keys of each kind.
KEYS = {
    ALERTMANAGER: (*_ALWAYS, "url", "urls", *_TOKEN, "username", *_PASSWORD),
    WEBHOOK: (*_OFTEN, "url", *_URL, *_TOKEN, "username", *_PASSWORD),
    SLACK: (*_OFTEN, *_URL),
    EMAIL: (*_OFTEN, "smtp", "from", "to", "tls", "username", *_PASSWORD),
    COMMAND: (*_OFTEN, "command"),
}
#: Keys that would hold a secret, and are refused; with the keys to use in their place.
_LITERAL = {"token": _TOKEN, "password": _PASSWORD, "bearer_token": _TOKEN, "webhook_url": _URL, "api_url": _URL}


class BadReceiver(ValueError):
    """A table is wrong; the message names the key and a correct value."""


@dataclass(frozen=True)
class ReceiverConfig:
    """One receiver of the settings. It has no secrets, only the places where they are stored."""

    kind: str
    name: str
    severity: str = WARNING
    send_resolved: bool = True
    repeat_s: float = _REPEAT_S
    urls: tuple[str, ...] = ()
    url: Secret | None = None
    login: Login = Login()  # noqa: RUF009 - frozen
    #: Host and port of the mail server.
    smtp: tuple[str, int] | None = None
    sender: str = ""
    to: tuple[str, ...] = ()
    tls: str = STARTTLS
    command: tuple[str, ...] = ()

    @property
    def secrets(self) -> list[Secret]:
        """The secrets that the receiver reads when it sends."""
        return [secret for secret in (self.url, self.login.token, self.login.password) if secret is not None]


def checked(tables: Any) -> tuple[ReceiverConfig, ...]:
    """Return the receivers that the settings describe; raise BadReceiver if a table is wrong."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise BadReceiver("needs tables: [[receivers]] above each")
    found: dict[str, ReceiverConfig] = {}
    for number, table in enumerate(tables, 1):
        try:
            asked = _Table(table).asked()
        except BadReceiver as error:
            name = table.get("name")
            who = f" ({name})" if isinstance(name, str) and re.fullmatch(r"[\w.@-]{1,64}", name) else ""
            raise BadReceiver(f"receiver {number}{who}: {error}") from None
        if asked.name in found:
            raise BadReceiver(f"receiver {number} ({asked.name}): a name of another; give each its own name")
        found[asked.name] = asked
    return tuple(found.values())


class _Table:
    """Checks one table and makes a ``ReceiverConfig`` of it."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self._table = table

    def asked(self) -> ReceiverConfig:
        kind = self._one_of("kind", KINDS)
        for key in self._table:
            self._known(key, kind)
        name = self._text("name", kind)
        if not re.fullmatch(r"[\w.@-]{1,64}", name):
            raise BadReceiver("name: needs letters, digits, '_', '-', '.', '@', at most 64 of them")
        asked = ReceiverConfig(
            kind=kind,
            name=name,
            severity=self._one_of("severity", SEVERITIES, WARNING),
            send_resolved=self._bool("send_resolved"),
            repeat_s=self._duration("repeat"),
            urls=self._urls(),
            url=self._secret("url", *_URL),
            login=self._login(kind),
            smtp=self._smtp(),
            sender=self._mailbox("from", self._table.get("from")) if kind == EMAIL else "",
            to=self._mailboxes() if kind == EMAIL else (),
            tls=self._one_of("tls", TLS, STARTTLS),
            command=self._texts("command"),
        )
        needs = {ALERTMANAGER: asked.urls, WEBHOOK: asked.urls or asked.url, SLACK: asked.url, EMAIL: asked.smtp}
        if not {**needs, COMMAND: asked.command}[kind]:
            words = {ALERTMANAGER: "urls", WEBHOOK: "url", SLACK: "url_file or url_env", EMAIL: "smtp"}
            raise BadReceiver(f"needs {words.get(kind, 'command, a list of a program and its arguments')}")
        return asked

    def _known(self, key: str, kind: str) -> None:
        if key in _LITERAL or (kind == SLACK and key == "url"):
            file, variable = _LITERAL.get(key, _URL)
            raise BadReceiver(f"{key}: a secret does not stand here; write it to a file and say {file} = \"PATH\", "
                              f"or put it in the environment and say {variable} = \"NAME\"")  # fmt: skip
        if key not in KEYS[kind]:
            raise BadReceiver(f"unknown key '{key}'; {kind} has {', '.join(KEYS[kind])}")

    # -- values -------------------------------------------------------------------------------

    def _text(self, key: str, default: str | None = None) -> str:
        value = self._table.get(key, default)
        if not isinstance(value, str) or not value or not value.isprintable():
            raise BadReceiver(f"{key}: needs a text of one line")
        return value

    def _texts(self, key: str) -> tuple[str, ...]:
        value = self._table.get(key, [])
        if not isinstance(value, list) or not all(isinstance(part, str) and "\0" not in part for part in value):
            raise BadReceiver(f"{key}: needs a list of texts")
        if key in self._table and not (value and value[0]):
            raise BadReceiver(f"{key}: is empty")
        return tuple(value)

    def _one_of(self, key: str, known: Sequence[str], default: str | None = None) -> str:
        value = self._table.get(key, default)
        if value not in known:
            raise BadReceiver(f"{key}: needs one of {', '.join(known)}")
        return str(value)

    def _bool(self, key: str) -> bool:
        value = self._table.get(key, True)
        if not isinstance(value, bool):
            raise BadReceiver(f"{key}: needs true or false")
        return value

    def _duration(self, key: str) -> float:
        value = self._table.get(key, "4h")
        match = re.fullmatch(r"(\d{1,6})([smhd])", value) if isinstance(value, str) else None
        seconds = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
        if seconds < _LEAST_REPEAT_S:
            raise BadReceiver(f"{key}: needs a time of at least a minute, such as 4h, 30m or 1d")
        return seconds

    def _urls(self) -> tuple[str, ...]:
        single = [self._text("url")] if "url" in self._table else []
        found = (*single, *self._texts("urls"))
        for number, url in enumerate(found, 1):
            if not is_url(url):
                hint = (
                    "a user and password do not stand in it: username, password_file"
                    if "@" in url
                    else "http:// or https://, a host"
                )
                raise BadReceiver(f"url {number}: not an address to post to ({hint})")
        if found and any(key in self._table for key in _URL):
            raise BadReceiver("url: stands here and in a file or the environment; one of them")
        return tuple(dict.fromkeys(found))

    def _secret(self, what: str, file: str, variable: str) -> Secret | None:
        if file in self._table and variable in self._table:
            raise BadReceiver(f"{file} and {variable}: one of them")
        if file in self._table:
            return Secret(file, file=Path(self._text(file)).expanduser())
        if variable not in self._table:
            return None
        name = self._text(variable)
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise BadReceiver(f"{variable}: needs the name of a variable of the environment, not the {what} itself")
        return Secret(variable, variable=name)

    def _login(self, kind: str) -> Login:
        token, password = self._secret("token", *_TOKEN), self._secret("password", *_PASSWORD)
        username = self._text("username") if "username" in self._table else None
        if (username is None) != (password is None):
            raise BadReceiver("username: needs password_file or password_env beside it, and the other way round")
        if username is not None and token is not None:
            raise BadReceiver("token and username: one of them")
        if username is not None and ":" in username and kind != EMAIL:
            raise BadReceiver("username: a colon cannot stand in it")
        return Login(token, username, password)

    # -- mail ---------------------------------------------------------------------------------

    def _smtp(self) -> tuple[str, int] | None:
        if "smtp" not in self._table:
            return None
        match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?", self._text("smtp"))
        port = int(match[2] or PORTS[self._one_of("tls", TLS, STARTTLS)]) if match else 0
        if match is None or not 0 < port < 65536:
            raise BadReceiver("smtp: needs a host, or host:port, such as mail.example.com:587")
        return match[1].strip("[]"), port

    def _mailbox(self, key: str, value: Any) -> str:
        if not isinstance(value, str) or not value.isascii() or not value.isprintable():
            raise BadReceiver(f"{key}: needs an address such as ops@example.com")
        if not re.fullmatch(r"(?:[^<>,@\"]+ <)?[^\s<>,@\"]+@[^\s<>,@\"]+>?", value) or ("<" in value) != (">" in value):
            raise BadReceiver(f"{key}: needs an address such as ops@example.com")
        return value

    def _mailboxes(self) -> tuple[str, ...]:
        value = self._table.get("to")
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not found:
            raise BadReceiver("to: needs an address, or a list of them")
        return tuple(self._mailbox("to", each) for each in found)


# -- receivers ----------------------------------------------------------------------------------


def receivers(asked: Sequence[ReceiverConfig], agent_url: str) -> list[Receiver]:
    """Return the receivers; each URL of an Alertmanager becomes one.

    Args:
        agent_url: URL of the agent, for links in messages.
    """
    hidden = frozenset(secret.variable for each in asked for secret in each.secrets if secret.variable is not None)
    return [receiver for each in asked for receiver in _receivers(each, agent_url, hidden)]


def _receivers(asked: ReceiverConfig, agent_url: str, hidden: frozenset[str]) -> list[Receiver]:
    policy = Policy(asked.repeat_s, send_resolved=asked.send_resolved, severity=asked.severity)
    if asked.kind == ALERTMANAGER:
        often = Policy(ALERTMANAGER_REPEAT_S, ALERTMANAGER_LINGER_S, grouped=False, severity=asked.severity)
        several = len(asked.urls) > 1
        return [
            Alertmanager(f"{asked.name}/{number}" if several else asked.name, often, url, agent_url, asked.login)
            for number, url in enumerate(asked.urls, 1)
        ]
    if asked.kind == WEBHOOK:
        return [Webhook(asked.name, policy, asked.url or asked.urls[0], agent_url, asked.login)]
    if asked.kind == SLACK:
        assert asked.url is not None
        return [Slack(asked.name, policy, asked.url, agent_url)]
    if asked.kind == EMAIL:
        assert asked.smtp is not None
        login = asked.login
        return [
            Mail(
                asked.name,
                policy,
                *asked.smtp,
                asked.sender,
                asked.to,
                agent_url,
                asked.tls,
                login.username,
                login.password,
            )
        ]
    return [Command(asked.name, policy, asked.command, agent_url, hidden)]
