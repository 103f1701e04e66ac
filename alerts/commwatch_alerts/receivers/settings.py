"""``[[receivers]]`` of the settings: their keys, the checks of each table, and the receivers that they describe.

Error messages do not repeat values that could be secret.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from os.path import expanduser
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, Strict, model_validator

from commwatch_alerts.model import SEVERITIES, WARNING, OneLineError
from commwatch_alerts.outbox import Policy
from commwatch_alerts.receivers.command import Command
from commwatch_alerts.receivers.hooks import (
    ALERTMANAGER_LINGER_S,
    ALERTMANAGER_REPEAT_S,
    Alertmanager,
    Login,
    Slack,
    Webhook,
    is_url,
)
from commwatch_alerts.receivers.sending import Receiver, Secret
from commwatch_alerts.tables import TABLE, BadTable, checked_table, needs, one_of

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
#: Keys that would hold a secret, and are refused; with the keys to use in their place.
_LITERAL = {"token": _TOKEN, "password": _PASSWORD, "bearer_token": _TOKEN, "webhook_url": _URL, "api_url": _URL}
_NAME = re.compile(r"[\w.@-]{1,64}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class BadReceiver(OneLineError):
    """A table is wrong; the message names the key and a correct value."""


def _seconds(value: Any) -> float:
    match = re.fullmatch(r"(\d{1,6})([smhd])", value) if isinstance(value, str) else None
    return float(match[1]) * _UNITS_S[match[2]] if match else 0.0


_Line = Annotated[str, needs("a text of one line", lambda text: text and text.isprintable())]
_File = Annotated[_Line, AfterValidator(expanduser)]
_Variable = Annotated[
    str, needs("the name of a variable of the environment, not the secret itself", _VARIABLE.fullmatch)
]
_Url = Annotated[
    str, needs("http:// or https:// and a host; a user and password go into username and password_file", is_url)
]
_Argument = Annotated[str, needs("a text without NUL", lambda text: "\0" not in text)]
_Repeat = Annotated[
    float,
    BeforeValidator(_seconds),
    needs("a time of at least a minute, such as 4h, 30m or 1d", lambda repeat_s: repeat_s >= 60),
]
_Command = Annotated[
    tuple[_Argument, ...],
    Strict(False),
    needs("a list of a program and its arguments", lambda command: command and command[0]),
]
_Urls = Annotated[tuple[_Url, ...], Strict(False), needs("a list of addresses", bool)]


class ReceiverConfig(BaseModel):
    """One receiver of the settings. It has no secrets, only the places where they are stored."""

    model_config = TABLE

    kind: str
    name: Annotated[str, needs("letters, digits, '_', '-', '.', '@', at most 64 of them", _NAME.fullmatch)]
    severity: Annotated[str, one_of(SEVERITIES)] = WARNING
    send_resolved: Annotated[bool, needs("true or false")] = True
    repeat_s: _Repeat = Field(4 * 3600.0, alias="repeat")
    single_url: _Url | None = Field(None, alias="url")
    several_urls: _Urls = Field((), alias="urls")
    url_file: _File | None = None
    url_env: _Variable | None = None
    token_file: _File | None = None
    token_env: _Variable | None = None
    username: _Line | None = None
    password_file: _File | None = None
    password_env: _Variable | None = None
    command: _Command = ()

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, table: dict[str, Any]) -> dict[str, Any]:
        kind = table.get("kind")
        if kind not in KINDS:
            raise ValueError(f"kind: needs one of {', '.join(KINDS)}")
        for key in table:
            if key in _LITERAL or (kind == SLACK and key == "url"):
                file, variable = _LITERAL.get(key, _URL)
                raise ValueError(f"{key}: a secret must not be in the settings; write it to a file and set {file} = \"PATH\", "
                                 f"or put it in the environment and set {variable} = \"NAME\"")  # fmt: skip
            if key not in KEYS[kind]:
                raise ValueError(f"unknown key '{key}'; {kind} has {', '.join(KEYS[kind])}")
        return {"name": kind, **table}

    @model_validator(mode="after")
    def _check_whole(self) -> ReceiverConfig:
        for file, variable in (_URL, _TOKEN, _PASSWORD):
            if getattr(self, file) and getattr(self, variable):
                raise ValueError(f"{file} and {variable}: give one of them")
        kind, login, user = self.kind, self.login, self.username or ""
        alone = (self.username is None) != (login.password is None)
        wrong = {
            "url: given here and in a file or the environment; give one of them": self.urls and self.url,
            "needs urls": kind == ALERTMANAGER and not self.urls,
            "needs url": kind == WEBHOOK and not (self.urls or self.url),
            "needs url_file or url_env": kind == SLACK and not self.url,
            "needs command, a list of a program and its arguments": kind == COMMAND and not self.command,
            "username: needs password_file or password_env, and vice versa": alone,
            "token and username: give one of them": user and login.token,
            "username: must not contain a colon": ":" in user,
        }
        for message, holds in wrong.items():
            if holds:
                raise ValueError(message)
        return self

    @property
    def urls(self) -> tuple[str, ...]:
        """Addresses that are no secrets."""
        return tuple(dict.fromkeys(url for url in (self.single_url, *self.several_urls) if url is not None))

    @property
    def url(self) -> Secret | None:
        """An address that is a secret."""
        return self._secret(*_URL)

    @property
    def login(self) -> Login:
        """Credentials for the address."""
        return Login(self._secret(*_TOKEN), self.username, self._secret(*_PASSWORD))

    @property
    def secrets(self) -> list[Secret]:
        """The secrets that the receiver reads when it sends."""
        return [secret for secret in (self.url, self.login.token, self.login.password) if secret is not None]

    def _secret(self, file: str, variable: str) -> Secret | None:
        path, name = getattr(self, file), getattr(self, variable)
        if path is not None:
            return Secret(file, file=Path(path))
        return None if name is None else Secret(variable, variable=name)


def checked(tables: Any) -> tuple[ReceiverConfig, ...]:
    """Return the receivers that the settings describe; raise BadReceiver if a table is wrong."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise BadReceiver("needs tables: [[receivers]] above each")
    found: dict[str, ReceiverConfig] = {}
    for number, table in enumerate(tables, 1):
        try:
            config = checked_table(ReceiverConfig, table)
        except BadTable as error:
            name = table.get("name")
            who = f" ({name})" if isinstance(name, str) and _NAME.fullmatch(name) else ""
            raise BadReceiver(f"receiver {number}{who}: {error}") from None
        if config.name in found:
            raise BadReceiver(f"receiver {number} ({config.name}): another receiver has this name; give each its own")
        found[config.name] = config
    return tuple(found.values())


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
    return [Command(asked.name, policy, asked.command, agent_url, hidden)]
