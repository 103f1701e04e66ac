"""What is active, and what was, on disk: one file, so that a restart of the agent forgets nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from commwatch.alerts.kept import KeptFile
from commwatch.alerts.model import STATES, Alert

#: Alerts that are over are kept so many and so long.
MOST_PAST, PAST_S = 1000, 30 * 86400.0
#: So often what is active is written although nothing has changed: an agent that is killed loses no more of ``for``.
REFRESH_S = 60.0
_VERSION = 1


@dataclass(frozen=True)
class Kept:
    """What the file holds."""

    #: Of the evaluator, as it gave it.
    state: Mapping[str, Any]
    #: Alerts that are over, newest first.
    past: tuple[Alert, ...] = ()


def as_json(alert: Alert) -> dict[str, Any]:
    """An alert as JSON knows it; its value is text, for JSON has neither NaN nor infinity."""
    plain = {field.name: getattr(alert, field.name) for field in fields(Alert)}
    return {**plain, "labels": dict(alert.labels), "annotations": dict(alert.annotations), "value": repr(alert.value)}


def from_json(given: Mapping[str, Any]) -> Alert:
    """The alert that ``as_json`` was given.

    Raises:
        ValueError: it was not; so do ``TypeError`` and ``KeyError``.
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
    """Alerts that are over, newest first, within the bounds of number and age."""
    ended = sorted(resolved, key=lambda alert: alert.resolved_at or 0, reverse=True)
    return tuple(alert for alert in (*ended, *past) if (alert.resolved_at or 0) > wall_s - PAST_S)[:MOST_PAST]


def written(kept: Kept) -> str:
    """The text of the file."""
    return json.dumps(
        {"version": _VERSION, "evaluator": kept.state, "past": [as_json(alert) for alert in kept.past]}, allow_nan=False
    )


def read(text: str) -> Kept:
    """What a file holds.

    Raises:
        ValueError: it is damaged, or of another version.
    """
    try:
        given = json.loads(text)
        if given["version"] != _VERSION:
            raise ValueError(f"version {given['version']}, and this is {_VERSION}")
        state, past = given["evaluator"], tuple(from_json(one) for one in given["past"])
        for one in state["active"]:
            from_json(one["alert"])
            _number(one["held_s"])
            _time(one["ended_s"])
        _time(state["seen_at"])
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"not what was written: {type(error).__name__}: {error}") from None
    return Kept(state, past)


def gist(kept: Kept) -> tuple[object, ...]:
    """What two states of the file must differ in for the difference to be worth writing at once."""
    active = [(one["alert"]["labels"], one["alert"]["state"], one["ended_s"] is None) for one in kept.state["active"]]
    return active, kept.past[0].id if kept.past else None


class Book:
    """The file. What goes wrong with it is said once and raises nothing: alerts go on without it.

    Args:
        path: the file; beside it a damaged one is put aside.
    """

    def __init__(self, path: Path) -> None:
        self._file = KeptFile(path)
        self._gist: tuple[object, ...] = ([], None)
        self._saved_s = 0.0

    def load(self) -> Kept | None:
        """What was kept; ``None``: nothing, or nothing that can be read."""
        return self._file.load(read)

    def save(self, kept: Kept, at_s: float, *, last: bool = False) -> None:
        """Replace the file by one that holds this, whole or not at all.

        Written are changes of what is active or over at once; for how long alerts have been active, every ``REFRESH_S``.

        Args:
            at_s: on a clock that never goes back.
            last: the agent ends.
        """
        now, fresh = gist(kept), at_s < self._saved_s + REFRESH_S and not last
        if now == self._gist and (fresh or not kept.state["active"]):
            return
        if self._file.save(written(kept)):
            self._gist, self._saved_s = now, at_s
