"""Receivers over HTTP: Alertmanager, webhooks, Slack."""

from __future__ import annotations

import json
import re
from dataclasses import KW_ONLY, dataclass, field
from typing import Any
from urllib.parse import quote

from commwatch_alerts.model import CRITICAL, FIRING, RESOLVED, Alert
from commwatch_alerts.outbox import Batch, Policy
from commwatch_alerts.receivers import payload
from commwatch_alerts.receivers.http import basic, post
from commwatch_alerts.receivers.sending import LIMIT_S, CannotSend, Secret, began, labels_of, rfc3339, shown
from commwatch_alerts.receivers.settings import is_url

#: Seconds between messages to Alertmanager about a firing alert, which expires there without them; and seconds for which
#: a resolved alert is sent again. Values of Prometheus.
ALERTMANAGER_REPEAT_S, ALERTMANAGER_LINGER_S = 60.0, 900.0
#: Parts of a secret URL with fewer characters are not hidden, because they occur in any text.
_LEAST_HIDDEN = 6
_MOST_TEXT, _MOST_DESCRIPTION = 3000, 800
_COLOURS = {RESOLVED: "good", FIRING: "warning", CRITICAL: "danger"}


@dataclass(frozen=True)
class Login:
    """Credentials for HTTP: none, a bearer token, or a user name and a password."""

    token: Secret | None = None
    username: str | None = None
    password: Secret | None = None

    def headers(self) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return the headers to send, and the secrets in them; raise CannotSend if a secret cannot be read."""
        if self.token is not None:
            token = self.token.read()
            if not token.isascii():
                raise CannotSend(f"{self.token.key}: a token is made of ASCII characters")
            return {"Authorization": f"Bearer {token}"}, (token,)
        if self.username is not None and self.password is not None:
            password = self.password.read()
            header = basic(self.username, password)
            return {"Authorization": header}, (password, header.removeprefix("Basic "))
        return {}, ()


@dataclass(frozen=True)
class Alertmanager:
    """One Alertmanager, by its API v2. Each of several Alertmanagers is a receiver and gets all alerts."""

    name: str
    policy: Policy
    url: str
    agent_url: str
    login: Login = field(default_factory=Login)
    _: KW_ONLY
    limit_s: float = LIMIT_S

    def send(self, batch: Batch, now_s: float) -> None:
        """Send alerts at the Unix time ``now_s``; raise CannotSend."""
        headers, secrets = self.login.headers()
        body = json.dumps([self._alert(alert, now_s) for alert in batch.alerts]).encode()
        post(f"{self.url.rstrip('/')}/api/v2/alerts", body, headers, *secrets, limit_s=self.limit_s)

    def _alert(self, alert: Alert, now_s: float) -> dict[str, Any]:
        """Return an alert in Alertmanager's form. Its end is never before its start, even if the clock was set back."""
        message = {
            "labels": labels_of(alert),
            "annotations": {name: value for name, value in alert.annotations.items() if value},
            "startsAt": rfc3339(min(began(alert), now_s)),
            "generatorURL": payload.source(alert, self.agent_url),
        }
        if alert.state == RESOLVED:
            ends = min(now_s if alert.resolved_at is None else alert.resolved_at, now_s)
            return {**message, "startsAt": rfc3339(min(began(alert), ends)), "endsAt": rfc3339(ends)}
        # No `endsAt`: Alertmanager resolves an alert that is not repeated within its `resolve_timeout` (five minutes).
        return message


@dataclass(frozen=True)
class Webhook:
    """A server that accepts Alertmanager's webhook payload."""

    name: str
    policy: Policy
    url: str | Secret
    agent_url: str
    login: Login = field(default_factory=Login)
    _: KW_ONLY
    limit_s: float = LIMIT_S

    def send(self, batch: Batch, now_s: float) -> None:
        """Send a message; raise CannotSend."""
        url, hidden = address(self.url)
        headers, secrets = self.login.headers()
        body = json.dumps(payload.webhook(batch, self.name, self.agent_url)).encode()
        post(url, body, headers, *secrets, *hidden, limit_s=self.limit_s)


@dataclass(frozen=True)
class Slack:
    """An incoming webhook of Slack, or of a compatible service."""

    name: str
    policy: Policy
    url: Secret
    agent_url: str
    limit_s: float = LIMIT_S

    def send(self, batch: Batch, now_s: float) -> None:
        """Send a message; raise CannotSend."""
        url, hidden = address(self.url)
        post(url, json.dumps(slack(batch, self.agent_url)).encode(), {}, *hidden, limit_s=self.limit_s)


def address(url: str | Secret) -> tuple[str, tuple[str, ...]]:
    """Return the URL, and its parts that must not be shown; raise CannotSend if it is unreadable or not valid."""
    if isinstance(url, str):
        return url, ()
    text = url.read()
    if not is_url(text):
        raise CannotSend(f"{url.key}: does not hold an address such as https://hooks.example.com/services/...")
    rest = text[len(shown(text)) :]
    return text, (text, *(part for part in (rest, *re.split("[/?&=]", rest)) if len(part) >= _LEAST_HIDDEN))


def slack(batch: Batch, agent_url: str) -> dict[str, Any]:
    """Return a message in Slack's markup (mrkdwn)."""
    lines = []
    for alert in batch.alerts[: payload.MOST_SHOWN]:
        mark = ":white_check_mark:" if alert.state == RESOLVED else ":rotating_light:"
        if not payload.is_of_one(batch):  # else the title has it
            lines.append(f"{mark} *{_escaped(payload.summary(alert))}*")
        lines.append(_escaped(payload.description(alert)[:_MOST_DESCRIPTION]))
        lines.append(" · ".join(f"<{_link(url)}|{name}>" for name, url in payload.links(alert, agent_url)))
    more = len(batch.alerts) + len(batch.truncated) - payload.MOST_SHOWN
    lines.append(f"and {more} more" if more > 0 else "")
    worst = payload.status(batch)
    if any(a.labels.get("severity") == CRITICAL and a.state == FIRING for a in batch.alerts + batch.truncated):
        worst = CRITICAL
    title = _escaped(payload.title(batch))
    sources = {payload.source(alert, agent_url) for alert in batch.alerts + batch.truncated}
    attachment = {
        "color": _COLOURS[worst],
        "fallback": title,
        "title": title,
        "title_link": sources.pop() if len(sources) == 1 else payload.page(agent_url),
        "text": _clipped([line for line in lines if line]),
        "mrkdwn_in": ["text"],
    }
    return {"attachments": [attachment]}


def _clipped(lines: list[str]) -> str:
    """Return as many whole lines as fit, because a cut in a line could leave half a link."""
    kept, room = [], _MOST_TEXT
    for line in lines:
        room -= len(line) + 1
        if room < 0:
            kept.append("…")
            break
        kept.append(line)
    return "\n".join(kept)


def _escaped(text: str) -> str:
    """Escape the three characters with a meaning in Slack, which could mention people or hide links."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _link(url: str) -> str:
    return quote(url, safe=":/?#[]@!$&'()*+,;=%~-._").replace("&", "&amp;")
