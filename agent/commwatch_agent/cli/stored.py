"""What commands that read the history share: its queries, a job in it, and errors that name it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from commwatch.wire.errors import UsageError
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.config import Config
from commwatch_agent.model.views import JobView
from commwatch_agent.reference.references import References, directory
from commwatch_agent.text.units import counted

#: In place of a name: the latest job.
LATEST = "latest"


@contextmanager
def reading(config: Config) -> Iterator[QueryService]:
    """Yield the queries of a history; turn an error of SQLite into ``UsageError``."""
    try:
        yield QueryService(config.history, references=References(directory(config.state), config.links))
    except sqlite3.Error as error:
        raise UsageError(f"{config.history}: {error}") from None


def job_in(agent: QueryService, name: str | None) -> JobView:
    """Return a job of the history.

    Args:
        name: of the job, or the beginning of only one name; ``None``, or ``latest`` where no job has that name: the latest.

    Raises:
        UsageError: there is none, or several names begin so.
    """
    jobs = agent.jobs()
    if not jobs:
        raise UsageError(f"no job in {agent.path} yet")
    found = jobs[0] if name is None else agent.job(name)
    if found is None and name is not None:
        names = [job.job_id for job in jobs]
        job = only(name, names)
        if job is None:
            raise UsageError(f"no job '{name}' in {agent.path}; it has {_listed(names)}")
        found = jobs[names.index(job)]
    assert found is not None
    return found


def only(name: str, jobs: Sequence[str]) -> str | None:
    """Return the job that has a name, the only one whose name begins so, or for ``latest`` the first; ``None``: there is none.

    Raises:
        UsageError: several names begin so.
    """
    begin_so = [name] if name in jobs else [job for job in jobs if job.startswith(name)]
    if len(begin_so) > 1:
        raise UsageError(f"several jobs begin with '{name}': {_listed(begin_so)}")
    return next(iter(begin_so or (jobs[:1] if name == LATEST else ())), None)


def latest_two(agent: QueryService) -> tuple[str, str]:
    """Return the names of the last two runs, the earlier one first; raise ``UsageError`` if there are fewer."""
    jobs = agent.jobs()
    names = [name for job in jobs[:2] for name in (job.job_id, *job.earlier[:1])]
    runs = sorted(filter(None, map(agent.job, names)), key=lambda job: job.started_at)
    if len(runs) < 2:
        raise UsageError(f"{agent.path} has {counted(len(runs), 'run')}; two are needed")
    return runs[-2].job_id, runs[-1].job_id


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
