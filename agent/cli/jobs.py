"""``commwatch jobs``: list the jobs of the history."""

from __future__ import annotations

import argparse
import shutil
from typing import Any

from commwatch.config import Config
from commwatch.core.terminal_text import line

#: Width where the output is no terminal.
_PLAIN_CELLS = 80


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    jobs = commands.add_parser(
        "jobs",
        parents=[common],
        help="list past and running jobs with their headline figures",
        description="List the jobs of the history, newest first, with the headline figures of their reports.",
    )
    jobs.add_argument(
        "--limit", type=_positive, default=20, metavar="N", help="most jobs to list (default: %(default)s)"
    )
    jobs.add_argument("--json", action="store_true", help="print JSON")
    jobs.set_defaults(command=_jobs)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: give a number above 0")
    return int(text)


def _jobs(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch.cli.stored import reading
    from commwatch.report import job_list

    with reading(config) as agent:
        known = len(agent.jobs())
        jobs = job_list.job_figures(agent, arguments.limit)
    if arguments.json:
        print(job_list.as_json(jobs))
        return 0
    cells = shutil.get_terminal_size((_PLAIN_CELLS, 24)).columns
    print(job_list.text(jobs, cells) if jobs else line(f"no job in {config.history} yet"))
    if more := known - len(jobs):
        print(f"{more} earlier {'job is' if more == 1 else 'jobs are'} not listed; use --limit {known} to list all")
    return 0
