"""The incidents of a job as marks of a timeline. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from commwatch_agent.incidents.answers import view_of
from commwatch_agent.incidents.incident import Incident
from commwatch_agent.incidents.words import cost, lasted_s, when
from commwatch_agent.report.chrome_trace import TraceMark


def marks_of(incidents: Iterable[Incident]) -> Iterator[TraceMark]:
    """Yield the incidents from their begin to their end, for each rank that they name, and their alerts when they began to fire."""
    every = {each.id: each for each in incidents}
    for incident in every.values():
        shown, cause = view_of(incident), every.get(incident.consequence_of or "")
        about = {
            "says": shown.says,
            "when": when(shown),
            "cause": shown.cause,
            "place": shown.place,
            "cost": cost(shown),
            "consequence of": "" if cause is None else view_of(cause).title,
            "remedy": shown.remedy,
            "severity": shown.severity,
            "id": shown.id,
        }
        args = {name: text for name, text in about.items() if text}
        began_ns, ended_ns = (int(at * 1e9) for at in (shown.began_at, shown.began_at + lasted_s(shown)))
        for rank in shown.ranks or (None,):
            yield TraceMark(began_ns, f"incident {_within(shown.title)}", rank, args, ended_ns)
        for alert in incident.alerts:
            if alert.fired_at is not None:
                summary = {"summary": alert.annotations.get("summary", "")}
                yield TraceMark(int(alert.fired_at * 1e9), f"alert {alert.name}", None, summary)


def _within(title: str) -> str:
    """Return a title as it is within a sentence; names such as GPU stay as they are."""
    return title if title[1:2].isupper() else title[:1].lower() + title[1:]
