"""Active and past alerts in one file on disk, so that they outlive a restart of the agent."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from commwatch_alerts.kept import KeptFile
from commwatch_alerts.model import STATES, Alert

#: Most past alerts that are kept, and for how many seconds.
MOST_PAST, PAST_S = 1000, 30 * 86400.0
#: Seconds between writes of unchanged alerts: a killed agent loses at most this much of how long a condition has held.
REFRESH_S = 60.0
_VERSION = 1


@dataclass(frozen=True)
class Kept:
    """The content of the file."""

    #: State of the evaluator, from ``Evaluator.state``.
    state: Mapping[str, Any]
    #: Past alerts, newest first.
    past: tuple[Alert, ...] = ()


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


def with_past(past: Sequence[Alert], resolved: Iterable[Alert], wall_s: float) -> tuple[Alert, ...]:
    """Return past and just resolved alerts, newest first, up to ``MOST_PAST`` and ``PAST_S``."""
    ended = sorted(resolved, key=lambda alert: alert.resolved_at or 0, reverse=True)
    return tuple(alert for alert in (*ended, *past) if (alert.resolved_at or 0) > wall_s - PAST_S)[:MOST_PAST]


def written(kept: Kept) -> str:
    """Return the text of the file."""
    return json.dumps(
        {"version": _VERSION, "evaluator": kept.state, "past": [as_json(alert) for alert in kept.past]}, allow_nan=False
    )


def read(text: str) -> Kept:
    """Return the content of the file from its text.

    Raises:
        ValueError: the text is damaged, or of another version.
    """
    try:
        given = json.loads(text)
        if given["version"] != _VERSION:
            raise ValueError(f"version {given['version']}, expected {_VERSION}")
        state, past = given["evaluator"], tuple(from_json(one) for one in given["past"])
        for one in state["active"]:
            from_json(one["alert"])
            _number(one["held_s"])
            _time(one["ended_s"])
        _time(state["seen_at"])
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"invalid content: {type(error).__name__}: {error}") from None
    return Kept(state, past)


def gist(kept: Kept) -> tuple[object, ...]:
    """Return the part of the content whose changes are written at once."""
    active = [(one["alert"]["labels"], one["alert"]["state"], one["ended_s"] is None) for one in kept.state["active"]]
    return active, kept.past[0].id if kept.past else None


class Book:
    """The file of alerts. Errors are logged once and not raised, because alerts work without it.

    Args:
        path: the file; a damaged one is renamed to ``NAME.damaged``.
    """

    def __init__(self, path: Path) -> None:
        self._file = KeptFile(path)
        self._gist: tuple[object, ...] = ([], None)
        self._saved_s = 0.0

    def load(self) -> Kept | None:
        """Return the content of the file; ``None`` if there is none or it cannot be read."""
        return self._file.load(read)

    def save(self, kept: Kept, at_s: float, *, last: bool = False) -> None:
        """Replace the file atomically, if that is due.

        A change in active or past alerts is due at once; durations of active alerts, every ``REFRESH_S`` seconds.

        Args:
            at_s: monotonic seconds.
            last: the agent ends, so durations are due.
        """
        now, fresh = gist(kept), at_s < self._saved_s + REFRESH_S and not last
        if now == self._gist and (fresh or not kept.state["active"]):
            return
        if self._file.save(written(kept)):
            self._gist, self._saved_s = now, at_s
