"""Lines of the agent's log about jobs that come and go, and about incidents: one for each change between two looks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from commwatch_agent.analysis.verdicts import by_job
from commwatch_agent.incidents.evidence import Evidence, KnownJob
from commwatch_agent.incidents.incident import JOB_ENDED, Incident
from commwatch_agent.incidents.words import lasted_s
from commwatch_agent.model.views import RankView
from commwatch_agent.runtime.agent_log import about
from commwatch_agent.text.units import counted, seconds
from commwatch_alerts.model import SEVERITIES

log = logging.getLogger("commwatch")
#: Most lines after one look; further changes are only counted.
MOST_LINES = 32
#: Seconds that a job which began after the agent may be older than the first look at it, and still count as new: it imports much first.
_NEW_S = 30.0


class Line(NamedTuple):
    """A line of the log, with what JSON shows besides."""

    says: str
    fields: dict[str, Any]


class JobState(NamedTuple):
    """What lines are made of: a run of a job on this node, at one moment."""

    name: str
    size: int
    user: str
    script: str
    restart: int
    #: Unix time in s; ``None``: not known.
    began_at: float | None
    ended_at: float | None
    is_over: bool
    ranks: int
    #: Ranks that ended without a clean exit.
    lost: int
    records: int
    records_lost: int


class Journal:
    """Logs what has changed since the look before; one thread calls it.

    Args:
        since: Unix time in s at which the agent started.
        incidents: those that are known at the start, which are no news.
    """

    def __init__(self, since: float, incidents: Iterable[Incident] = ()) -> None:
        self._since = since
        self._jobs: dict[str, JobState] = {}
        self._incidents = _by_id(incidents)

    def __call__(self, look: Evidence, incidents: Iterable[Incident]) -> None:
        """Log the changes up to a look, and what was concluded from it."""
        jobs, known = jobs_of(look), _by_id(incidents)
        lines = [*job_lines(self._jobs, jobs, look.now, self._since), *incident_lines(self._incidents, known)]
        self._jobs, self._incidents = jobs, known
        for line in lines[:MOST_LINES]:
            log.info("%s", line.says, **about(**line.fields))
        if len(lines) > MOST_LINES:
            log.info("%d more changes of jobs and incidents at the same time", len(lines) - MOST_LINES)


def _by_id(incidents: Iterable[Incident]) -> dict[str, Incident]:
    return {each.id: each for each in incidents if each.state != "pending"}


def jobs_of(look: Evidence) -> dict[str, JobState]:
    """Return the state of each run on this node, by its key."""
    ranks = by_job(look.ranks)
    return {job.run or name: _state(name, job, ranks[name]) for name, job in look.jobs.items() if name in ranks}


def _state(name: str, job: KnownJob, ranks: list[RankView]) -> JobState:
    began = [view.started_at for view in ranks if view.started_at is not None]
    ended = [view.ended_at for view in ranks if view.ended_at is not None]
    return JobState(
        name,
        job.world_size,
        job.user,
        job.script,
        max(view.restart for view in ranks),
        min(began, default=None),
        max(ended, default=None),
        all(view.state in ("ended", "gone") for view in ranks),
        len(ranks),
        sum(view.state == "gone" for view in ranks),
        sum(view.records for view in ranks),
        sum(view.lost for view in ranks),
    )


def job_lines(
    before: Mapping[str, JobState], after: Mapping[str, JobState], now: float, since: float
) -> Iterator[Line]:
    """Yield a line for each run that has begun or ended between two looks, with a new name, or restarted.

    Args:
        now: Unix time in s of the later look.
        since: that of the start of the agent.
    """
    for key, job in after.items():
        was = before.get(key)
        # One that is over at the first look began in the time of an earlier agent if it is older than this one.
        is_past = was is None and job.is_over and (job.began_at or now) < since
        if not is_past and (was is None or (was.is_over and not job.is_over) or was.restart != job.restart):
            yield _begun(job, was, now, since)
        elif was is not None and was.name != job.name:
            yield Line(f"job {was.name}: is now called {job.name}", {"event": "job_renamed", "job_id": job.name})
        if job.is_over and (was is None or not was.is_over or was.restart != job.restart):
            yield _over(job)
    yield from (_over(job) for key, job in before.items() if key not in after and not job.is_over)


def _begun(job: JobState, was: JobState | None, now: float, since: float) -> Line:
    age_s = None if job.began_at is None else now - job.began_at
    found = was is None and age_s is not None and age_s > min(now - since, _NEW_S) and not job.is_over
    how = f"found, has run for {seconds(age_s)}" if found else "began"
    how += f" again (restart {job.restart})" if was is not None else ""
    parts = [f"job {job.name}: {how}", f"world size {job.size}"]
    parts += [f"user {job.user}"] if job.user else []
    parts += [job.script] if job.script else []
    fields = {
        "job_id": job.name,
        "world_size": job.size,
        "restart": job.restart,
        "user": job.user,
        "script": job.script,
    }
    return Line(", ".join(parts), {"event": "job_found" if found else "job_began", **fields})


def _over(job: JobState) -> Line:
    lasted = None if job.began_at is None or job.ended_at is None else job.ended_at - job.began_at
    after = "" if lasted is None else f" after {seconds(lasted)}"
    unclean = f", {job.lost} of them without a clean exit" if job.lost else ""
    says = f"job {job.name}: ended{after}, {counted(job.ranks, 'rank')} here{unclean}; {counted(job.records, 'record')} read, {job.records_lost} lost"
    fields = {"ranks": job.ranks, "ranks_lost": job.lost, "records": job.records, "records_lost": job.records_lost}
    return Line(says, {"event": "job_ended", "job_id": job.name, **fields})


def incident_lines(before: Mapping[str, Incident], after: Mapping[str, Incident]) -> Iterator[Line]:
    """Yield a line for each incident that has opened, become worse or another kind, or ended between two looks."""
    for one in after.values():
        was = before.get(one.id)
        fields = {"incident": one.id, "kind": one.kind, "severity": one.severity, "job_id": one.job_id}
        named = f"{one.severity} {one.kind}" + (f" in job {one.job_id}" if one.job_id else "")
        if was is None or (was.state == "ended" and one.state == "open"):
            yield Line(f"incident {one.id} opened: {named}: {one.says}", {"event": "incident_opened", **fields})
        elif one.state == "open" and (one.kind != was.kind or _is_worse(one, was)):
            event = "incident_worse" if _is_worse(one, was) else "incident_changed"
            yield Line(f"incident {one.id} is now: {named}: {one.says}", {"event": event, **fields})
        if one.state == "ended" and (was is None or was.state != "ended"):
            how = "its job ended" if one.outcome == JOB_ENDED else "recovered"
            says = f"incident {one.id} ended: {named}: {how} after {seconds(lasted_s(one))}"
            yield Line(says, {"event": "incident_ended", **fields})


def _is_worse(one: Incident, was: Incident) -> bool:
    return SEVERITIES.index(one.severity) > SEVERITIES.index(was.severity)
