"""Alerts as JSON types, for the record of what was sent. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from commwatch_alerts.model import STATES, Alert


def as_json(alert: Alert) -> dict[str, Any]:
    """Return an alert as JSON types; its value is text, because JSON has neither NaN nor infinity."""
    plain = {field.name: getattr(alert, field.name) for field in fields(Alert)}
    return {**plain, "labels": dict(alert.labels), "annotations": dict(alert.annotations), "value": repr(alert.value)}


def from_json(given: Mapping[str, Any]) -> Alert:
    """Return the alert that ``as_json`` converted.

    Raises:
        ValueError, TypeError, KeyError: ``given`` is not a result of ``as_json``.
    """
    alert = Alert(
        name=str(given["name"]),
        labels={str(name): str(value) for name, value in given["labels"].items()},
        annotations={str(name): str(value) for name, value in given["annotations"].items()},
        value=float(given["value"]),
        state=given["state"],
        active_at=_number(given["active_at"]),
        fired_at=_time(given["fired_at"]),
        resolved_at=_time(given["resolved_at"]),
    )
    if alert.state not in STATES:
        raise ValueError(f"no state of an alert: {alert.state}")
    return alert


def _time(given: Any) -> float | None:
    return None if given is None else _number(given)


def _number(given: Any) -> float:
    if not isinstance(given, (int, float)):
        raise ValueError(f"no number: {given!r}")
    return float(given)
