"""``commwatch report``: print the report on a job from the history."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commwatch.wire.errors import UsageError
from commwatch_agent.cli.common_flags import add_node, last_seconds
from commwatch_agent.config import Config
from commwatch_agent.model.durations import LAST, parse_age
from commwatch_agent.text.terminal_text import output_cells

if TYPE_CHECKING:
    from commwatch_agent.report.report import Report


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    report = commands.add_parser(
        "report",
        parents=[common],
        help="report on a finished or running job",
        description="Print the report on a job. It covers all nodes of the job if the agent of this node knows the other agents "
        "(docs/api.md). Otherwise it covers this node, from its history.",
    )
    report.add_argument("job", nargs="?", help="job id, or the beginning of one (default: the latest)")
    report.add_argument(
        "--last",
        type=last_seconds,
        default=LAST,
        metavar="AGE",
        help="how much of the job's end the advice covers, such as 90s or 2h; all: the whole job (default: %(default)s)",
    )
    add_node(report)
    form = report.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained HTML page")
    report.set_defaults(command=_report)


def _report(config: Config, arguments: argparse.Namespace) -> int:
    from functools import partial

    from commwatch_agent.cli.stored import job_in, reading
    from commwatch_agent.questions import reports
    from commwatch_agent.report import report, report_text
    from commwatch_agent.runtime.whole_files import write

    with reading(config) as agent:
        job = job_in(agent, arguments.job).job_id
        command = f"{again(arguments)}{_other_last(arguments.last)} {shlex.quote(job)}"
        wide = None if arguments.node else _of_all_nodes(config, job, arguments)
        own, last_s = reports.of_history(agent, job), arguments.last
        if arguments.html is not None:
            page = wide or reports.report_page(agent, job, own=own, last_s=last_s, command=command).body
            write(arguments.html, page.decode(), UsageError)
            return 0
        here = partial(reports.report, agent, job, own=own, last_s=last_s, command=command)
        found = here() if wide is None else replace(_as_report(wide), command=command)
    print(report.as_json(found) if arguments.json else report_text.text(found, output_cells()))
    return 0


def _of_all_nodes(config: Config, job: str, arguments: argparse.Namespace) -> bytes | None:
    """Return the agent's report on all nodes; ``None``: there is none, or it does not answer."""
    from commwatch_agent.cli.whole_job import answer

    form = "json" if arguments.html is None else "html"
    last = "all" if arguments.last is None else f"{arguments.last:g}s"
    return answer(config, "report", {"job": job, "last": last, "format": form})


def _as_report(text: bytes) -> Report:
    from pydantic import TypeAdapter  # here, because it takes as long to load as a report on one node

    from commwatch_agent.report.report import Report

    return TypeAdapter(Report).validate_json(text)


def again(arguments: argparse.Namespace, command: str = "report") -> str:
    """Return the command that prints the report of a run again, or another command on it, without the job's name."""
    flags = [
        (f"--{name}", getattr(arguments, name))
        for name in ("config", "dir", "state")
        if getattr(arguments, name) is not None
    ]
    node = ["--node"] if getattr(arguments, "node", False) else []
    return shlex.join(["commwatch", command, *node, *(str(part) for flag in flags for part in flag)])


def _other_last(last_s: float | None) -> str:
    """Return the ``--last`` flag with a space before it; empty for the default."""
    return "" if last_s == parse_age(LAST) else " --last all" if last_s is None else f" --last {last_s:g}s"
