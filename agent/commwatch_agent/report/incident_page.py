"""The page of one incident, without scripts: what was wrong, what to do, and what the conclusion rests on. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from urllib.parse import quote

from commwatch_agent.incidents.answers import IncidentView
from commwatch_agent.incidents.incident import JOB_ENDED, EvidenceItem
from commwatch_agent.incidents.words import cost, when
from commwatch_agent.report.html_frame import page, table, text
from commwatch_agent.text.units import moment, percent
from commwatch_collectors.spans import ranks as named


def incident_page(
    incident: IncidentView,
    evidence: Sequence[EvidenceItem],
    cause: IncidentView | None,
    consequences: Iterable[IncidentView],
    links: Iterable[tuple[str, str]],
) -> str:
    """Return the page of an incident.

    Args:
        cause: the incident that explains this one; ``None``: there is none, or it is not known.
        links: names and addresses of what else there is about it.
    """
    body = [f"<p>{text(incident.says)}</p>"]
    if cause is not None:
        body.append(f"<p>A consequence of {_link(cause)}.</p>")
    body.append(table((), list(_facts(incident))))
    if incident.remedy:
        body += ["<h2>What to do</h2>", f"<p>{_with_code(incident.remedy)}</p>"]
    body.append(f"<p>{' · '.join(_anchor(name, url) for name, url in _links(incident, links))}</p>")
    if effects := [f"<li>{_link(each)}: {text(each.says)}</li>" for each in consequences]:
        body += ["<h2>Consequences</h2>", f"<ul>{''.join(effects)}</ul>"]
    if evidence:
        body += ["<h2>Evidence</h2>", *map(_item, sorted(evidence, key=lambda item: item.at))]
    return page(incident.title, "\n".join(body))


def _facts(incident: IncidentView) -> Iterator[tuple[str, str]]:
    """Yield what is known of an incident, with its name."""
    state = (
        incident.state
        if incident.ended_at is None
        else "ended with the job"
        if incident.outcome == JOB_ENDED
        else "ended"
    )
    operation = f"{incident.op} {'' if incident.seq is None else incident.seq}".strip()
    known = {
        "State": f"{state}, {incident.severity}",
        "Job": incident.job_id,
        "Nodes": ", ".join(incident.nodes),
        "Culprits": named(incident.ranks) if incident.ranks else "",
        "Waiting": named(incident.waiting) if incident.waiting else "",
        "Operation": f"{operation}{f' of group {incident.group}' if incident.group else ''}" if operation else "",
        "When": f"{moment(incident.began_at).split()[0]}, {when(incident)}",
        "Cost": cost(incident),
        "Share of the time": "" if incident.share is None else percent(incident.share),
        "Where in the code": incident.place,
    }
    yield from ((name, value) for name, value in known.items() if value)


def _links(incident: IncidentView, links: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    yield from links
    yield ("live page", f"/?job={quote(incident.job_id, safe='', errors='replace')}" if incident.job_id else "/")
    yield ("as JSON", f"/api/v1/incidents/{incident.id}")


def _link(incident: IncidentView) -> str:
    return _anchor(incident.title, f"/incidents/{incident.id}")


def _anchor(name: str, url: str) -> str:
    return f'<a href="{escape(url)}">{text(name)}</a>'


def _with_code(remedy: str) -> str:
    """Return a text with its commands, which are between backticks, as HTML."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", text(remedy))


def _item(item: EvidenceItem) -> str:
    stack = item.data.get("stack")
    lines = f"<pre>{text(str(stack))}</pre>" if stack else ""
    return f"<h3>{text(moment(item.at))}: {text(item.source.replace('_', ' '))}</h3>\n<p>{text(item.text)}</p>{lines}"
