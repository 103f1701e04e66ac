"""``commwatch compare``: how two jobs of the history differ."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commwatch.wire.errors import INCOMPLETE, UsageError
from commwatch_agent.config import Config
from commwatch_agent.text.terminal_text import complain, output_cells

if TYPE_CHECKING:
    from commwatch_agent.compare.comparison import Comparison
    from commwatch_agent.compare.gate import Condition, NoRegression
    from commwatch_agent.compare.runs import Run


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    compare = commands.add_parser(
        "compare",
        parents=[common],
        help="compare two jobs: step time, shares, incidents, operations, settings",
        description="Compare job B with job A. Exit code 0: no condition of --fail-if is met; 1: one is met; 3: none is met, but "
        "one cannot be decided.",
    )
    compare.add_argument("job_a", nargs="?", metavar="JOB_A", help="the baseline (default: the last run but one)")
    compare.add_argument("job_b", nargs="?", metavar="JOB_B", help="the job to compare with it (default: the latest)")
    compare.add_argument(
        "--state-b", type=Path, metavar="DIR", help="directory of the history with job B (default: as for A)"
    )
    compare.add_argument(
        "--fail-if",
        action="append",
        default=[],
        type=_condition,
        metavar="CONDITION",
        help="exit with code 1 if this condition is met, such as 'step_p50 > +5%%' or 'comm_share > +3pp', or incidents: B has incidents that are "
        "new or cost more; may be repeated (docs/runs.md)",
    )
    form = compare.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained HTML page")
    compare.set_defaults(command=_compare)


def _condition(text: str) -> Condition | NoRegression:
    from commwatch_agent.compare.gate import parse

    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _compare(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch_agent.compare import pages
    from commwatch_agent.compare.comparison import compare
    from commwatch_agent.runtime.whole_files import write

    of_b = config if arguments.state_b is None else replace(config, state=arguments.state_b)
    job_a, job_b = arguments.job_a, arguments.job_b
    if job_a is None and arguments.state_b is None:
        job_a, job_b = _latest_two(config)
    found = compare(_run(config, job_a), _run(of_b, job_b))
    if arguments.html is not None:
        write(arguments.html, pages.html(found), UsageError)
    else:
        print(pages.as_json(found) if arguments.json else pages.text(found, output_cells()))
    return _judged(found, arguments.fail_if)


def _latest_two(config: Config) -> tuple[str, str]:
    from commwatch_agent.cli.stored import latest_two, reading

    with reading(config) as agent:
        return latest_two(agent)


def _run(config: Config, name: str | None) -> Run:
    from commwatch_agent.cli.stored import job_in, reading
    from commwatch_agent.compare.runs import read
    from commwatch_agent.incidents.stored import of_run
    from commwatch_agent.sources.nccl_archive import kept

    with reading(config) as agent:
        job = job_in(agent, name)
        stored = agent.stored(job.job_id)
        return read(config.history, job, kept(config.history, stored), of_run(config.history, stored))


def _judged(found: Comparison, conditions: list[Condition | NoRegression]) -> int:
    """Print which conditions are met or cannot be decided; return the exit code."""
    from commwatch_agent.compare.gate import Condition
    from commwatch_agent.compare.pages import incidents_that_differ, says

    codes = {0}
    for condition in conditions:
        met = condition.is_met(found)
        if met is None:
            complain(
                f"compare: {condition.text}: cannot be decided: {found.too_few or 'too few samples for an interval, or a job lacks this figure'}"
            )
            codes.add(INCOMPLETE)
        elif met:
            worse = incidents_that_differ(each for each in found.incidents if each.is_regression)
            why = says(condition.of(found)) if isinstance(condition, Condition) else "; ".join(worse)
            complain(f"compare: {condition.text}: met: {why}")
            codes.add(1)
    return 1 if 1 in codes else max(codes)
