"""``commwatch jobs``: list the jobs of the history."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from commwatch_agent.cli.common_flags import add_node
from commwatch_agent.config import Config
from commwatch_agent.text.terminal_text import complain, line, output_cells

if TYPE_CHECKING:
    from commwatch_agent.job.merging import JobWide
    from commwatch_agent.model.views import JobFigures

#: Most jobs that an agent lists.
_MOST_JOBS = 10_000
#: Names that a shell takes as one word.
_PLAIN = re.compile(r"[A-Za-z0-9._:@%+/-]+")


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    jobs = commands.add_parser(
        "jobs",
        parents=[common],
        help="list past and running jobs with their headline figures",
        description="List jobs, newest first, with the headline figures of their reports. The list covers all nodes if the agent of this "
        "node knows the other agents (docs/api.md). Otherwise it covers this node, from its history.",
    )
    jobs.add_argument(
        "--limit", type=_positive, default=20, metavar="N", help="maximum number of jobs to list (default: %(default)s)"
    )
    add_node(jobs)
    jobs.add_argument("--json", action="store_true", help="print JSON")
    jobs.add_argument(
        "--names", action="store_true", help="print only the names of the jobs of this node, for completion"
    )
    jobs.set_defaults(command=_jobs)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: give a number above 0")
    return int(text)


def _jobs(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch_agent.cli.stored import LATEST, reading
    from commwatch_agent.job.merging import covered
    from commwatch_agent.report import job_list
    from commwatch_agent.report.job_figures import job_figures

    if arguments.names:
        with reading(config) as agent:
            names = [job.job_id for job in agent.jobs()]
        print(*(name for name in (LATEST, *names) if _PLAIN.fullmatch(name)), sep="\n")
        return 0
    wide = None if arguments.node else _of_all_nodes(config, arguments.limit + 1)
    if wide is None:
        with reading(config) as agent:
            known, nodes = len(agent.jobs()), None
            jobs = job_figures(agent, arguments.limit)
    else:
        jobs, known, nodes = wide.data[: arguments.limit], len(wide.data), wide.nodes
        for url, why in nodes.silent.items():
            complain(f"{url} does not answer: {why}")
    if arguments.json:
        print(job_list.as_json(jobs))
        return 0
    cells = output_cells()
    print(job_list.text(jobs, cells) if jobs else line(f"no job in {config.history} yet"))
    if nodes is not None:
        print(covered(nodes))
        if known > len(jobs):
            print("earlier jobs are not listed; use a larger --limit")
    elif more := known - len(jobs):
        print(f"{more} earlier {'job is' if more == 1 else 'jobs are'} not listed; use --limit {known} to list all")
    return 0


def _of_all_nodes(config: Config, most: int) -> JobWide[list[JobFigures]] | None:
    """Return the agent's list of the jobs of all nodes; ``None``: there is none, or it does not answer."""
    from commwatch_agent.cli.whole_job import answer

    text = answer(config, "jobs", {"figures": "true", "limit": min(most, _MOST_JOBS)})
    if text is None:
        return None
    from pydantic import TypeAdapter  # here, because it takes long to load

    from commwatch_agent.job.merging import JobWide
    from commwatch_agent.model.views import JobFigures

    return TypeAdapter(JobWide[list[JobFigures]]).validate_json(text)
