"""API queries that read much of the history, and their answers. Imports no web server, as a separate process runs it."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple

from commwatch.wire.errors import CommwatchError
from commwatch_agent.analysis.advice_facts import Whys
from commwatch_agent.analysis.advice_input import network_of
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.analysis.time_buckets import FINE, Lengths, SlotSums
from commwatch_agent.analysis.timeline import NodeBars, past_bars
from commwatch_agent.core.api_views import Advice, Summary
from commwatch_agent.core.host_views import HostView
from commwatch_agent.core.views import StepView
from commwatch_agent.history.history import History
from commwatch_agent.history.operations import Cursor, Operation, Reader
from commwatch_agent.incidents.answers import IncidentDetails, IncidentFilter, IncidentView, details_of, latest_of
from commwatch_agent.incidents.answers import view_of as incident_view
from commwatch_agent.incidents.stored import incidents_of, of_run
from commwatch_agent.nodes.queries import Cells, view_of
from commwatch_agent.reference.efficiency import Efficiency, Line
from commwatch_agent.report.job_advice import lately
from commwatch_agent.report.job_figures import figures_parts, job_figures
from commwatch_agent.report.recorded_steps import ADVICE_PARTS, known_steps
from commwatch_collectors.nccl.views import Finding

#: Seconds that a question may search the raw history.
MOST_LOOKING_S = 10.0


class ApiError(CommwatchError):
    """An error of the caller, or the reason why there is no answer; the text is the detail of the problem details."""

    def __init__(self, status: HTTPStatus, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class Text(NamedTuple):
    """An answer as it is sent."""

    body: bytes
    media_type: str
    headers: Mapping[str, str]


def as_file(body: bytes, media_type: str, kind: str, job: str, suffix: str) -> Text:
    """Return an answer that browsers save as a file; ``kind``, the job and ``suffix`` make its name."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", job)[:80]
    return Text(body, media_type, {"Content-Disposition": f'attachment; filename="{kind}-{name}.{suffix}"'})


@dataclass(frozen=True)
class Operations:
    """Single operations, newest first; pass ``cursor`` on to get the next page, ``None``: there is none."""

    operations: list[Operation]
    cursor: str | None


@dataclass(frozen=True)
class Collective:
    """One collective with its ranks."""

    group_id: str
    seq: int
    #: All ranks of the group are recorded, in one symmetric operation: transfer and waits are defined.
    complete: bool
    transfer_s: float | None
    #: The rank that the others waited for, and their median wait in seconds.
    late_rank: int | None
    lateness_s: float | None
    ranks: list[RankInCollective]


@dataclass(frozen=True)
class RankInCollective:
    """One rank's part of a collective; ``wait_s``: seconds of its duration that it waited for the last rank."""

    wait_s: float | None
    operation: Operation


@dataclass(frozen=True)
class Efficiencies:
    """Operations with their expected durations, and curves fitted to the job's operations."""

    operations: list[Efficiency]
    #: T = a(n)·α + b(n)·S/bandwidth, fitted to the fastest operations; empty where sizes are too few or too alike.
    fits: list[Line]


@dataclass(frozen=True)
class Wanted:
    """Filter of operations: those in ``[from_ns, until_ns)`` that come after ``before`` and match all values given."""

    from_ns: int
    until_ns: int
    job: str | None
    #: Field of an operation to the value it must have; ``None``: any.
    same: Mapping[str, str | int | None] = field(default_factory=dict)
    min_seconds: float | None = None
    before: Cursor | None = None
    limit: int = 100


def job_exists(agent: QueryService, job: str | None) -> None:
    """Raise ``ApiError`` (404) if the history has no such job."""
    if job is not None and not agent.has_job(job):
        raise ApiError(HTTPStatus.NOT_FOUND, f"no job '{job}' in the history; /api/v1/jobs lists the jobs")


def incidents(
    agent: QueryService, *, job: str | None, wanted: IncidentFilter, own: list[IncidentView], limit: int
) -> list[IncidentView]:
    """Return incidents of a job, or of all jobs and of the node.

    Args:
        own: those in memory, which may be newer than those in the history.
        limit: most ended ones.
    """
    if job is None:
        with History(agent.path) as history:
            known = list(incidents_of(history.incidents(states=("open", "ended"))))
    else:
        known = of_run(agent.path, agent.stored(job))
    found = [incident_view(each) for each in known if wanted.holds(each)]
    every = {each.id: each for each in [*found, *(view for view in own if wanted.holds(view))]}
    shown = [each if job is None else replace(each, job_id=job) for each in every.values()]
    return latest_of(shown, limit)


def incident(agent: QueryService, *, incident_id: str, own: IncidentDetails | None) -> IncidentDetails:
    """Return one incident; ``own``: as it is in memory. Raises ``ApiError`` (404) if there is none of that id."""
    if own is not None:
        return own
    with History(agent.path) as history:
        rows = history.incidents(incident_id=incident_id)
    for each in incidents_of(rows):
        return details_of(each)
    raise no_incident(incident_id)


def no_incident(incident_id: str) -> ApiError:
    """Return the error for an incident that is not known."""
    return ApiError(HTTPStatus.NOT_FOUND, f"no incident {incident_id}; /api/v1/incidents lists the incidents")


def summary(
    agent: QueryService,
    from_ns: int,
    until_ns: int,
    job: str | None,
    *,
    by: list[str],
    same: dict[str, str | int | None],
) -> Summary:
    """Return operations grouped by the dimensions ``by``; arguments as for ``QueryService.summary``."""
    job_exists(agent, job)
    covered, rows = agent.summary(from_ns, until_ns, by, {"job_id": job, **same})
    return Summary(covered[0], covered[1], by, rows)


def cells(agent: QueryService, from_ns: int, until_ns: int, job: str) -> Cells:
    """Return sums by rank, group, op and size for another agent."""
    job_exists(agent, job)
    covered, found = agent.cells(from_ns, until_ns, job)
    return Cells(covered[0], covered[1], [view_of(one) for one in found])


def slots(agent: QueryService, from_ns: int, until_ns: int, job: str, *, of: Lengths = FINE) -> list[SlotSums]:
    """Return the sums of a job's buckets for another agent."""
    job_exists(agent, job)
    return agent.slots(from_ns, until_ns, job, of)


def bars(agent: QueryService, from_ns: int, until_ns: int, job: str) -> NodeBars:
    """Return the latest operations of a job that ended in a window."""
    job_exists(agent, job)
    with History(agent.path) as history:
        reader = Reader(history, {ring.id: ring for ring in history.rings(job)})
        return past_bars(reader.records(from_ns, until_ns, go_on=_deadline()), reader.names, reader.parts.of)


def _deadline() -> Callable[[], None]:
    """Return a function that raises ``ApiError`` once a search that begins now has taken too long."""
    end = time.monotonic() + MOST_LOOKING_S

    def in_time() -> None:
        if time.monotonic() > end:
            detail = f"since, until: a search of this window takes more than {MOST_LOOKING_S:g} s; use a shorter window"
            raise ApiError(HTTPStatus.BAD_REQUEST, detail)

    return in_time


def operations(agent: QueryService, wanted: Wanted) -> Operations:
    """Single operations, newest first."""
    job_exists(agent, wanted.job)
    checks = [(name, value) for name, value in wanted.same.items() if value is not None]
    in_time = _deadline()

    def fits(operation: Operation) -> bool:
        in_time()
        least = wanted.min_seconds
        slow = least is None or (operation.duration_s is not None and operation.duration_s >= least)
        return slow and all(getattr(operation, name) == value for name, value in checks)

    found = agent.operations(
        wanted.from_ns,
        wanted.until_ns,
        wanted.before,
        fits,
        wanted.limit + 1,
        job=wanted.job,
        same=wanted.same,
        least_s=wanted.min_seconds,
        go_on=in_time,
    )
    page = found[: wanted.limit]
    return Operations(page, page[-1].id if len(found) > wanted.limit else None)


def operations_csv(agent: QueryService, wanted: Wanted) -> Text:
    """Return ``operations`` as CSV, with the cursor in the header ``X-Next-Cursor``."""
    found = operations(agent, wanted)
    headers = {"X-Next-Cursor": found.cursor} if found.cursor else {}
    return Text(csv_table(found.operations).encode(), "text/csv", headers)


def csv_table(rows: list[Operation]) -> str:
    """Return operations as CSV with a header row."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [each.name for each in fields(Operation)])
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in asdict(row).items()} | {"id": row.id} for row in rows)
    return text.getvalue()


#: A spreadsheet takes a cell that begins like this for a formula; some skip leading white space.
_FORMULA = re.compile(r"\s*[=+\-@]|[\t\r\n]")


def _cell(value: object) -> object:
    """Return a value for a CSV table; text that a spreadsheet would evaluate gets a leading apostrophe."""
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def collective(agent: QueryService, group_id: str, seq: int, job: str | None = None) -> Collective:
    """Return one collective with its ranks; raise ``ApiError`` (404) if the raw history lacks it."""
    job_exists(agent, job)
    found = agent.collective(group_id, seq, job)
    if found is None:
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            f"no collective {seq} of group '{group_id}' in the raw history; /api/v1/groups lists the groups",
        )
    parts, waits = found
    waited = {} if waits is None else {part.rank: wait / 1e9 for part, wait in waits.waits}
    return Collective(
        group_id=group_id,
        seq=seq,
        complete=waits is not None,
        transfer_s=None if waits is None else waits.transfer_ns / 1e9,
        late_rank=None if waits is None else waits.late.rank,
        lateness_s=None if waits is None else waits.lateness_ns / 1e9,
        ranks=[RankInCollective(waited.get(part.rank), part) for part in parts],
    )


def steps(
    agent: QueryService, from_ns: int, until_ns: int, job: str | None, *, rank: int | None, limit: int
) -> list[StepView]:
    """Return training steps, newest first."""
    job_exists(agent, job)
    return agent.steps(from_ns, until_ns, job, rank, limit)


def efficiency(agent: QueryService, from_ns: int, until_ns: int, job: str | None) -> Efficiencies:
    """Return operations by group and size with their expected durations."""
    job_exists(agent, job)
    return Efficiencies(*agent.efficiency(from_ns, until_ns, job))


def advice(
    agent: QueryService,
    job: str,
    findings: list[Finding],
    *,
    host: HostView,
    late: dict[int, float] | None,
    for_cores: float | None,
    whys: Whys,
    last_s: float | None,
) -> list[Advice]:
    """Return advice for a job from its last ``last_s`` s (``None``: all of it).

    Args:
        late: its current stragglers, as in ``facts``; ``for_cores`` and ``whys`` likewise.
    """
    known = agent.job(job)
    if known is None:
        return []
    recorded = partial(known_steps, agent.path, known, last_s, most_parts=ADVICE_PARTS)
    network = network_of(host, agent.ranks(job))
    return lately(
        agent, known, findings, last_s, network=network, late=late, for_cores=for_cores, whys=whys, recorded=recorded
    )


#: Functions by name; each is called with the agent and the arguments of the question.
QUESTIONS: Mapping[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        incidents,
        incident,
        summary,
        cells,
        slots,
        bars,
        operations,
        operations_csv,
        collective,
        steps,
        efficiency,
        advice,
        job_figures,
        figures_parts,
    )
}


def text_of(answer: object) -> Text:
    """Return an answer as JSON, unless it is a ``Text`` already; numbers that are not finite become ``null``."""
    if isinstance(answer, Text):
        return answer
    try:
        text = json.dumps(answer, default=vars, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(answer), separators=(",", ":"))
    return Text(text.encode(), "application/json", {})


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return _finite(vars(value)) if hasattr(value, "__dict__") else value
