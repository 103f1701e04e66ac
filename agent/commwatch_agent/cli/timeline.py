"""``commwatch timeline``: write a job's operations as a trace for Perfetto."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from commwatch.wire.errors import UsageError
from commwatch_agent.cli.common_flags import add_node, last_seconds
from commwatch_agent.config import Config
from commwatch_agent.text.terminal_text import complain, line
from commwatch_agent.text.units import counted


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    timeline = commands.add_parser(
        "timeline",
        parents=[common],
        help="write a job's operations as a trace for Perfetto",
        description="Write the operations of a job's latest run as a Chrome trace, for ui.perfetto.dev or chrome://tracing. The "
        "trace has a process for each rank and a thread for each group. It covers all nodes whose agents the agent of this node knows.",
    )
    timeline.add_argument("job", nargs="?", help="job id, or the beginning of one (default: the latest)")
    timeline.add_argument(
        "--last",
        type=last_seconds,
        default="30s",
        metavar="AGE",
        help="how much of the job's end, such as 90s or 2h; all: the whole job (default: %(default)s)",
    )
    add_node(timeline)
    timeline.add_argument(
        "--no-profiles", action="store_true", help="leave out the traces that commwatch profile has made on this node"
    )
    timeline.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="file to write; compressed if its name ends in .gz"
    )
    timeline.set_defaults(command=_timeline)


def _timeline(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch_agent.cli.stored import job_in, reading
    from commwatch_agent.commands.timeline import traces_of_others
    from commwatch_agent.incidents.stored import of_run
    from commwatch_agent.job.merging import Nodes, covered
    from commwatch_agent.report.incident_marks import marks_of
    from commwatch_agent.report.timeline_export import Window, own_trace, write
    from commwatch_agent.runtime.whole_files import writing
    from commwatch_agent.sources.profiles import kept_in, traces_of

    with reading(config) as agent:
        job = job_in(agent, arguments.job).job_id
        others, silent = ([], {}) if arguments.node else traces_of_others(config, job, arguments.last)
        for url, why in silent.items():
            complain(f"{url} does not answer: {why}")
        about = {"nodes": {"answered": 1 + len(others), "silent": silent}} if others or silent else {}
        marks, window = marks_of(of_run(config.history, agent.stored(job))), Window(arguments.last)
        profiles = () if arguments.no_profiles else traces_of(kept_in(config.state), job)
        try:
            with (
                writing(arguments.out) as out,
                own_trace(config.history, job, window, marks, alone=not others, profiles=profiles) as own,
            ):
                found = write([own, *others], job, window, about, out)
        except OSError as error:
            raise UsageError(f"cannot write {arguments.out}: {error.strerror}") from None
    for note in found.profiles.values():
        if "error" in note:
            complain(str(note["error"]))
    of_nodes = covered(Nodes(1 + len(others), silent))
    contents = [("operation", found.operations), ("step", found.steps), ("arrow", found.arrows), ("mark", found.marks)]
    contents += [("profile", len(found.profiles))] if found.profiles else []
    counts = ", ".join(counted(number, thing) for thing, number in contents)
    print(line(f"{arguments.out}: {counts}{f', {of_nodes}' if of_nodes else ''}"))
    return 0
