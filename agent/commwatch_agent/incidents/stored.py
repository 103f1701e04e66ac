"""Incidents as rows of the history. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from commwatch_agent.history.history import History
from commwatch_agent.history.rows import IncidentRow
from commwatch_agent.incidents.answers import IncidentDetails, details_of
from commwatch_agent.incidents.incident import AlertState, EvidenceItem, Incident
from commwatch_agent.model.runs import Stored

_TUPLES = ("ranks", "waiting", "nodes", "subject")


def row_of(incident: Incident, agent: str) -> IncidentRow:
    """Return an incident as it is stored.

    Args:
        agent: run directory of this agent.
    """
    return IncidentRow(
        incident.id,
        agent,
        incident.job_id,
        incident.run,
        incident.state,
        int(incident.began_at * 1e9),
        int(incident.last_at * 1e9),
        json.dumps(asdict(incident)),
    )


def incidents_of(rows: Iterable[IncidentRow]) -> Iterator[Incident]:
    """Yield the incidents of rows; rows that cannot be read are left out."""
    for row in rows:
        try:
            yield from_json(json.loads(row.data))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue


def of_run(path: Path, run: Stored) -> list[Incident]:
    """Return the incidents of a run in the history that were or are open, the latest first.

    Raises:
        StoreError, sqlite3.Error: the history cannot be read.
    """
    with History(path) as history:
        rows = history.incidents(runs=[run.key], states=("open", "ended"))
    if not run.key:  # it is known by its name only
        rows = [row for row in rows if row.job == run.name and run.from_s <= row.began_ns / 1e9 < run.until_s]
    return list(incidents_of(rows))


def details_of_run(path: Path, run: Stored) -> list[IncidentDetails]:
    """Return ``of_run`` as views."""
    return list(map(details_of, of_run(path, run)))


def from_json(given: dict[str, Any]) -> Incident:
    """Return an incident from JSON types, as ``asdict`` returns them; unknown fields are left out.

    Raises:
        ValueError, TypeError, KeyError: it is not one.
    """
    known = {field.name: given[field.name] for field in fields(Incident) if field.name in given}
    known |= {name: tuple(known[name]) for name in _TUPLES}
    known["evidence"] = tuple(EvidenceItem(**item) for item in known.get("evidence", ()))
    known["alerts"] = tuple(AlertState(**state) for state in known.get("alerts", ()))
    return Incident(**known)
