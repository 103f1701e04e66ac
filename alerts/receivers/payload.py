"""What a message says: Alertmanager's webhook payload, and words for people. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from commwatch.alerts.model import FIRING, RESOLVED, Alert, printable
from commwatch.alerts.outbox import Batch, Labels
from commwatch.alerts.receivers.sending import began, fingerprint, labels_of, rfc3339

#: How Go writes a time that is not set: the end of what still fires.
NO_TIME = "0001-01-01T00:00:00Z"
#: Alerts of a message that people are shown in full.
MOST_SHOWN = 10


def webhook(batch: Batch, receiver: str, agent_url: str) -> dict[str, Any]:
    """The payload of Alertmanager's webhook, version 4.

    Args:
        agent_url: of the agent, which stands where Alertmanager gives its own and Prometheus'.

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
        "generatorURL": page(agent_url),
        "fingerprint": fingerprint(labels),
    }


def page(agent_url: str) -> str:
    """Where the agent shows its alerts."""
    return f"{agent_url}/api/v1/alerts"


def group_key(group: Labels) -> str:
    """What names a group, in Alertmanager's form.

    >>> group_key((("alertname", "CommShareHigh"), ("job_id", "train")))
    '{}:{alertname="CommShareHigh", job_id="train"}'
    """
    return "{}:{" + ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in sorted(group)) + "}"


def status(batch: Batch) -> str:
    """Of a message: what fires wins."""
    return FIRING if any(alert.state == FIRING for alert in batch.alerts + batch.truncated) else RESOLVED


def _common(sets: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """What is the same in all."""
    first, *others = sets
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def title(batch: Batch) -> str:
    """One line: ``[FIRING:2] CommShareHigh train``."""
    firing = sum(alert.state == FIRING for alert in batch.alerts + batch.truncated)
    group = dict(batch.group) or dict(batch.alerts[0].labels)
    names = " ".join(group[name] for name in ("alertname", "job_id") if group.get(name))
    return printable(f"[{f'FIRING:{firing}' if firing else 'RESOLVED'}] {names}")


def summary(alert: Alert) -> str:
    """What it is about, in one line."""
    return printable(alert.annotations.get("summary") or alert.name)


def description(alert: Alert) -> str:
    """What there is to know of it, in one line, for a name in it may hold line breaks; empty: nothing."""
    return printable(alert.annotations.get("description", ""))


def links(alert: Alert) -> list[tuple[str, str]]:
    """What leads on from it, with where."""
    named = (("runbook", "runbook_url"), ("evidence", "evidence_url"))
    urls = [(name, alert.annotations.get(key, "")) for name, key in named]
    return [(name, url) for name, url in urls if url.startswith(("http://", "https://"))]


def text(batch: Batch, agent_url: str) -> str:
    """All of it for people, without any mark-up."""
    parts = []
    for alert in batch.alerts[:MOST_SHOWN]:
        began_at = f"since {rfc3339(began(alert))}"
        ended = f", ended {rfc3339(alert.resolved_at)}" if alert.state == RESOLVED and alert.resolved_at else ""
        lines = [f"{alert.state.upper()} {summary(alert)}", description(alert)]
        lines += [
            f"{began_at}{ended}",
            " ".join(f"{name}={printable(value)}" for name, value in labels_of(alert).items()),
        ]
        lines += [f"{name}: {url}" for name, url in links(alert)]
        parts.append("\n".join(line for line in lines if line))
    more = len(batch.alerts) + len(batch.truncated) - MOST_SHOWN
    if more > 0:
        parts.append(f"and {more} more")
    return "\n\n".join([*parts, f"all of them: {page(agent_url)}"]) + "\n"
