"""Questions about operations: summaries, single ones, collectives, efficiency."""

from __future__ import annotations

import csv
import io
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from http import HTTPStatus

from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.history.operations import Cursor, Operation
from commwatch_agent.job.merging import Heard, Nodes
from commwatch_agent.job.queries import Cells, NodePart, view_of
from commwatch_agent.model.api_views import Summary
from commwatch_agent.questions.answer import ApiError, Scoped, Text, job_exists
from commwatch_agent.questions.heard import over_nodes
from commwatch_agent.reference.efficiency import Efficiency, Line

#: Seconds that a question may search the raw history.
MOST_LOOKING_S = 10.0


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


def summary(
    agent: QueryService,
    from_ns: int,
    until_ns: int,
    job: str | None,
    *,
    by: list[str],
    same: Mapping[str, str | int | None],
    heard: Heard | None = None,
) -> Scoped[Summary]:
    """Return operations grouped by the dimensions ``by``; arguments as for ``QueryService.summary``."""
    every, nodes = _with_cells(agent, heard)
    job_exists(every, job)
    covered, rows = every.summary(from_ns, until_ns, by, {"job_id": job, **same})
    return Scoped(nodes, Summary(covered[0], covered[1], by, rows))


def cells(agent: QueryService, from_ns: int, until_ns: int, job: str) -> Cells:
    """Return sums by rank, group, op and size for another agent."""
    job_exists(agent, job)
    covered, found = agent.cells(from_ns, until_ns, job)
    return Cells(covered[0], covered[1], [view_of(one) for one in found])


def efficiency(
    agent: QueryService, from_ns: int, until_ns: int, job: str | None, *, heard: Heard | None = None
) -> Scoped[Efficiencies]:
    """Return operations by group and size with their expected durations."""
    every, nodes = _with_cells(agent, heard)
    job_exists(every, job)
    return Scoped(nodes, Efficiencies(*every.efficiency(from_ns, until_ns, job)))


def _with_cells(agent: QueryService, heard: Heard | None) -> tuple[QueryService, Nodes | None]:
    return over_nodes(agent, heard, Cells, lambda cells: NodePart(cells=cells))


def deadline() -> Callable[[], None]:
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
    in_time = deadline()

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
