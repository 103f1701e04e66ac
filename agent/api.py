"""The REST query API: read-only, JSON, errors as problem details (RFC 9457). Response models stand beside the routes."""

from __future__ import annotations

import csv
import io
import os
import time
from dataclasses import asdict, dataclass, fields
from http import HTTPStatus
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import Response

from commwatch import __version__
from commwatch.collectors.nccl.classes import CLASSES, OTHER
from commwatch.host_views import HostView
from commwatch.nccl import NcclMessage, Topology
from commwatch.operations import Operation, Place, place_of
from commwatch.problems import ERRORS, Problem
from commwatch.query import AgentOf, HostOf, JobFilter, Limit, LogsOf, Span, job_exists, known_parameters
from commwatch.summary import DIMENSIONS, Row
from commwatch.views import GroupView, JobView, RankView, StepView

#: A question may look through the raw history for so long.
MOST_LOOKING_S = 10.0


@dataclass(frozen=True)
class Summary:
    """Operations added up. ``since`` and ``until`` are what was really covered: whole roll-ups of 10 s (older: 5 min)."""

    since: float | None
    until: float | None
    by: list[str]
    rows: list[Row]


@dataclass(frozen=True)
class Operations:
    """Single operations, newest first; give ``cursor`` back for the next page, ``None`` = there is none."""

    operations: list[Operation]
    cursor: str | None


@dataclass(frozen=True)
class Collective:
    """One collective, its ranks side by side."""

    group_id: str
    seq: int
    #: All ranks of the group are here, in one symmetric operation: transfer and waits are defined.
    complete: bool
    transfer_s: float | None
    #: The rank the others waited for, and how long (their median).
    late_rank: int | None
    lateness_s: float | None
    ranks: list[RankInCollective]


@dataclass(frozen=True)
class RankInCollective:
    """One rank's part; ``wait_s``: the part of its duration spent waiting for the last rank."""

    wait_s: float | None
    operation: Operation


@dataclass(frozen=True)
class About:
    """The agent itself."""

    version: str
    pid: int
    history: str
    #: Why it is not ready; ``None`` if it is.
    trouble: str | None
    #: When ``/metrics`` was last fetched, and by whom; ``None``: never.
    scraped_at: float | None
    scraper: str | None
    #: Unix time of the answer, by the agent's clock.
    at: float | None = None


router = APIRouter(prefix="/api/v1", responses=ERRORS, dependencies=[Depends(known_parameters)])


@router.get("/about")
def about(request: Request, agent: AgentOf) -> About:
    """The agent itself: version, history, what troubles it, who fetches its metrics."""
    state = request.app.state
    scraped_at, scraper = state.scraped
    return About(__version__, os.getpid(), str(agent.path), state.trouble(), scraped_at, scraper, time.time())


@router.get("/jobs")
def jobs(agent: AgentOf) -> list[JobView]:
    """The jobs of this node, newest first."""
    return agent.jobs()


@router.get("/summary")
def summary(
    agent: AgentOf,
    span: Span,
    job: JobFilter = None,
    by: Annotated[str, Query(description=f"Comma-separated, of {', '.join(DIMENSIONS)}.")] = "group,op",
    group: str | None = None,
    op: str | None = None,
    rank: int | None = None,
) -> Summary:
    """Operations by group and op, or by what else is asked: counts, bytes, percentiles, bandwidths, waits."""
    dimensions = [part.strip() for part in by.split(",") if part.strip()]
    for dimension in dimensions:
        if dimension not in DIMENSIONS:
            raise Problem(
                HTTPStatus.BAD_REQUEST, f"by={dimension}: unknown dimension; there are {', '.join(DIMENSIONS)}"
            )
    job_exists(agent, job)
    covered, rows = agent.summary(
        span.from_ns, span.until_ns, dimensions, {"job_id": job, "group": group, "op": op, "rank": rank}
    )
    return Summary(covered[0], covered[1], dimensions, rows)


@router.get("/ops", response_model=Operations, responses={200: {"content": {"text/csv": {}}}})
def ops(
    agent: AgentOf,
    span: Span,
    job: JobFilter = None,
    group: str | None = None,
    group_id: str | None = None,
    op: str | None = None,
    rank: int | None = None,
    seq: Annotated[int | None, Query(ge=0)] = None,
    min_seconds: Annotated[float | None, Query(ge=0, description="Only operations that took at least so long.")] = None,
    limit: Limit = 100,
    cursor: Annotated[str | None, Query(description="As returned by the page before.")] = None,
    format: Annotated[Literal["json", "csv"], Query()] = "json",  # noqa: A002 - the name in the URL
) -> Operations | Response:
    """Single operations, newest first."""
    job_exists(agent, job)
    before: Place | None = None
    if cursor is not None:
        try:
            before = place_of(cursor)
        except ValueError:
            raise Problem(HTTPStatus.BAD_REQUEST, f"cursor={cursor}: not one this API has given out") from None
    same = {"job_id": job, "group": group, "group_id": group_id, "op": op, "rank": rank, "seq": seq}
    checks = [(name, value) for name, value in same.items() if value is not None]
    end = time.monotonic() + MOST_LOOKING_S

    def in_time() -> None:
        if time.monotonic() > end:
            detail = f"since, until: there is more between them than can be looked through in {MOST_LOOKING_S:g} s; ask for less"
            raise Problem(HTTPStatus.BAD_REQUEST, detail)

    def wanted(operation: Operation) -> bool:
        in_time()
        slow = min_seconds is None or (operation.duration_s is not None and operation.duration_s >= min_seconds)
        return slow and all(getattr(operation, name) == value for name, value in checks)

    found = agent.operations(span.from_ns, span.until_ns, before, wanted, limit + 1, go_on=in_time)
    page = found[:limit]
    following = page[-1].id if len(found) > limit else None
    if format == "csv":
        return Response(_csv(page), media_type="text/csv", headers={"X-Next-Cursor": following} if following else None)
    return Operations(page, following)


@router.get("/collectives/{group_id}/{seq}")
def collective(agent: AgentOf, group_id: str, seq: Annotated[int, Path(ge=0, lt=1 << 32)]) -> Collective:
    """The ranks of one collective side by side."""
    found = agent.collective(group_id, seq)
    if found is None:
        raise Problem(
            HTTPStatus.NOT_FOUND,
            f"no collective {seq} of group '{group_id}' in the raw history; /api/v1/groups lists the groups",
        )
    operations, waits = found
    return Collective(
        group_id=group_id,
        seq=seq,
        complete=waits is not None,
        transfer_s=None if waits is None else waits.transfer_ns / 1e9,
        late_rank=None if waits is None else waits.late.rank,
        lateness_s=None if waits is None else waits.lateness_ns / 1e9,
        ranks=[
            RankInCollective(
                next((wait / 1e9 for part, wait in waits.waits if part.rank == o.rank), None)
                if waits is not None
                else None,
                o,
            )
            for o in operations
        ],
    )


@router.get("/steps")
def steps(
    agent: AgentOf, span: Span, job: JobFilter = None, rank: int | None = None, limit: Limit = 100
) -> list[StepView]:
    """Training steps, newest first."""
    job_exists(agent, job)
    return agent.steps(span.from_ns, span.until_ns, job, rank, limit)


@router.get("/ranks")
def ranks(agent: AgentOf, job: JobFilter = None) -> list[RankView]:
    """The ranks of this node: state, last collective, operations in flight and for how long."""
    job_exists(agent, job)
    return agent.ranks(job)


@router.get("/groups")
def groups(agent: AgentOf, job: JobFilter = None) -> list[GroupView]:
    """The process groups that were used."""
    job_exists(agent, job)
    return agent.groups(job)


@router.get("/host")
def host(agent: AgentOf, watch: HostOf, job: JobFilter = None) -> HostView:
    """This node: CPU, memory, network devices, GPUs near them, what is wrong, and what collectives sent beside what was counted."""
    job_exists(agent, job)
    return watch.view(job)


@router.get("/topology")
def topology(agent: AgentOf, logs: LogsOf, job: JobFilter = None) -> list[Topology]:
    """What the NCCL logs of running jobs say: hosts, communicators, transports, choices, findings."""
    if job is not None and not logs.knows(job):
        job_exists(agent, job)
    return logs.topology(job)


@router.get("/nccl/messages")
def nccl_messages(
    agent: AgentOf,
    logs: LogsOf,
    span: Span,
    job: JobFilter = None,
    message_class: Annotated[
        str | None, Query(alias="class", description=f"One of {', '.join((*CLASSES, OTHER))}.")
    ] = None,
    limit: Limit = 100,
) -> list[NcclMessage]:
    """Warnings in the NCCL logs of running jobs, newest first."""
    if message_class not in (None, *CLASSES, OTHER):
        raise Problem(
            HTTPStatus.BAD_REQUEST, f"class={message_class}: no such class; there are {', '.join((*CLASSES, OTHER))}"
        )
    if job is not None and not logs.knows(job):
        job_exists(agent, job)
    return logs.messages(job, message_class, span.from_ns / 1e9, span.until_ns / 1e9, limit)


def _csv(operations: list[Operation]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Operation)])
    writer.writeheader()
    writer.writerows(asdict(operation) for operation in operations)
    return text.getvalue()
