"""Content of messages: Alertmanager's webhook payload, and text for people. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from commwatch_alerts.model import FIRING, RESOLVED, SEVERITIES, Alert, printable
from commwatch_alerts.outbox import Batch, Labels
from commwatch_alerts.receivers.sending import began, fingerprint, labels_of, rfc3339

#: Go's zero time: the end of an alert that still fires.
NO_TIME = "0001-01-01T00:00:00Z"
#: Most alerts of a message for people that are shown in full.
MOST_SHOWN = 10


def webhook(batch: Batch, receiver: str, agent_url: str) -> dict[str, Any]:
    """Return the payload of Alertmanager's webhook, version 4.

    Args:
        agent_url: URL of the agent, used in place of Alertmanager's and Prometheus's URLs.

    Source: prometheus/alertmanager, notify/webhook/webhook.go and template/template.go.
    """
    alerts = [_alert(alert, agent_url) for alert in batch.alerts]
    return {
        "receiver": receiver,
        "status": status(batch),
        "alerts": alerts,
        "groupLabels": dict(batch.group),
        "commonLabels": _common(alert["labels"] for alert in alerts),
        "commonAnnotations": _common(alert["annotations"] for alert in alerts),
        "externalURL": agent_url,
        "version": "4",
        "groupKey": group_key(batch.group),
        "truncatedAlerts": len(batch.truncated),
    }


def _alert(alert: Alert, agent_url: str) -> dict[str, Any]:
    labels, ended = labels_of(alert), alert.state == RESOLVED and alert.resolved_at is not None
    return {
        "status": RESOLVED if alert.state == RESOLVED else FIRING,
        "labels": labels,
        "annotations": dict(sorted(alert.annotations.items())),
        "startsAt": rfc3339(began(alert)),
        "endsAt": rfc3339(alert.resolved_at or 0.0) if ended else NO_TIME,
        "generatorURL": source(alert, agent_url),
        "fingerprint": fingerprint(labels),
    }


def page(agent_url: str) -> str:
    """Return the URL at which the agent lists its alerts."""
    return f"{agent_url}/api/v1/alerts"


def source(alert: Alert, agent_url: str) -> str:
    """Return the URL of the page of the alert's incident; that of all alerts, if it names none."""
    incident = alert.annotations.get("incident")
    return f"{agent_url}/incidents/{quote(incident, safe='')}" if incident else page(agent_url)


def group_key(group: Labels) -> str:
    """Return the key of a group in Alertmanager's form.

    >>> group_key((("alertname", "CommShareHigh"), ("job_id", "train")))
    '{}:{alertname="CommShareHigh", job_id="train"}'
    """
    return "{}:{" + ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in sorted(group)) + "}"


def status(batch: Batch) -> str:
    """Return ``firing`` if any alert of the message fires, else ``resolved``."""
    return FIRING if any(alert.state == FIRING for alert in batch.alerts + batch.truncated) else RESOLVED


def _common(sets: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the items that all mappings have in common."""
    first, *others = sets
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def title(batch: Batch) -> str:
    """Return the title of a message: severity and summary of its only alert, else such as ``[WARNING:2] CommShareHigh train``.

    On a phone it is all that is seen at first, so it has what, where and what to do.
    """
    if is_of_one(batch):
        (alert,) = batch.alerts
        status_of = _end(alert) if alert.state == RESOLVED else alert.labels.get("severity", FIRING)
        return f"[{printable(status_of).upper()}] {summary(alert)}"
    every = batch.alerts + batch.truncated
    firing = sum(alert.state == FIRING for alert in every)
    found = [alert.labels.get("severity", "") for alert in every if alert.state == FIRING]
    worst = max(filter(SEVERITIES.__contains__, found), key=SEVERITIES.index, default=FIRING)
    group = dict(batch.group) or dict(batch.alerts[0].labels)
    names = " ".join(group[name] for name in ("alertname", "job_id") if group.get(name))
    return printable(f"[{f'{worst.upper()}:{firing}' if firing else 'RESOLVED'}] {names}")


def _end(alert: Alert) -> str:
    """Return ``resolved``, or ``ended`` if the job ended before its fault did."""
    return RESOLVED if alert.annotations.get("outcome", "Recovered").startswith("Recovered") else "ended"


def is_of_one(batch: Batch) -> bool:
    """Return whether a message is about one alert, whose summary is then its title."""
    return len(batch.alerts) == 1 and not batch.truncated


def summary(alert: Alert) -> str:
    """Return the alert's summary in one line; its name if it has none."""
    return printable(alert.annotations.get("summary") or alert.name)


def description(alert: Alert) -> str:
    """Return whom the alert is about, what to do, and its description, in one line; of one that is over, how it ended; empty: nothing.

    Names may have line breaks.
    """
    end = ("outcome",) if alert.annotations.get("outcome") else ("description",)  # what it describes is over
    shown = (*end, "where") if alert.state == RESOLVED else ("where", "remedy", "description")
    parts = (alert.annotations.get(name, "") for name in shown)
    return printable(" ".join(filter(None, parts)))


def links(alert: Alert, agent_url: str) -> list[tuple[str, str]]:
    """Return the names and URLs of the alert's links: its incident, runbook and evidence."""
    named = (("runbook", "runbook_url"), ("evidence", "evidence_url"))
    urls = [(name, alert.annotations.get(key, "")) for name, key in named]
    own = [("incident", source(alert, agent_url))] if alert.annotations.get("incident") else []
    return own + [(name, url) for name, url in urls if url.startswith(("http://", "https://"))]
