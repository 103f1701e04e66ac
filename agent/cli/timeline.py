"""``commwatch timeline``: write a job's operations as a trace for Perfetto."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from commwatch.cli.common_flags import last_seconds
from commwatch.config import Config
from commwatch.core.errors import UsageError
from commwatch.core.terminal_text import line


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    timeline = commands.add_parser(
        "timeline",
        parents=[common],
        help="write a job's operations as a trace for Perfetto",
        description="Write the operations of a job's latest run as a Chrome trace, for ui.perfetto.dev or chrome://tracing: a process "
        "for each rank, a thread for each group.",
    )
    timeline.add_argument("job", nargs="?", help="job id (default: the latest)")
    timeline.add_argument(
        "--last",
        type=last_seconds,
        default="30s",
        metavar="AGE",
        help="how much of the job's end, such as 90s or 2h; all: the whole job (default: %(default)s)",
    )
    timeline.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="the file; compressed if its name ends in .gz"
    )
    timeline.set_defaults(command=_timeline)


def _timeline(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch.alerting.marks import marks_of
    from commwatch.cli.stored import job_in, reading
    from commwatch.report.timeline_export import Window, export, writing

    with reading(config) as agent:
        job = job_in(agent, arguments.job)
        try:
            with writing(arguments.out) as out:
                found = export(
                    config.history, job.job_id, Window(arguments.last), marks_of(config.evidence, job.job_id), out
                )
        except OSError as error:
            raise UsageError(f"cannot write {arguments.out}: {error.strerror}") from None
    counts = f"{found.operations} operations, {found.steps} steps, {found.arrows} arrows, {found.marks} marks"
    print(line(f"{arguments.out}: {counts}"))
    return 0
