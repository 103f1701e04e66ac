"""What commands that read the history share: its queries, a job in it, and errors that name it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from commwatch.wire.errors import UsageError
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.config import Config
from commwatch_agent.core.views import JobView
from commwatch_agent.reference.references import References, directory


@contextmanager
def reading(config: Config) -> Iterator[QueryService]:
    """Yield the queries of a history; turn an error of SQLite into ``UsageError``."""
    try:
        yield QueryService(config.history, references=References(directory(config.state), config.links))
    except sqlite3.Error as error:
        raise UsageError(f"{config.history}: {error}") from None


def job_in(agent: QueryService, name: str | None) -> JobView:
    """Return a job of the history (``None``: the latest); raise ``UsageError`` if it has none of that name."""
    jobs = agent.jobs()
    if not jobs:
        raise UsageError(f"no job in {agent.path} yet")
    found = jobs[0] if name is None else agent.job(name)
    if found is None:
        known = f"{', '.join(job.job_id for job in jobs[:5])}{' ...' if len(jobs) > 5 else ''}"
        raise UsageError(f"no job '{name}' in {agent.path}; it has {known}")
    return found
