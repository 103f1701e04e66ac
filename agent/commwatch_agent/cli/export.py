"""``commwatch export``: write a job's operations, steps and waits as tables for other tools."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from commwatch_agent.cli.common_flags import last_seconds
from commwatch_agent.config import Config
from commwatch_agent.text.terminal_text import line
from commwatch_agent.text.units import counted

#: As in ``table_export.FORMATS``, which needs numpy.
_FORMATS = ("parquet", "arrow", "csv")


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    export = commands.add_parser(
        "export",
        parents=[common],
        help="write a job's operations, steps and waits as Parquet, Arrow or CSV files",
        description="Write the operations, steps and waits of a job on this node as three tables (docs/runs.md). Parquet and Arrow need pyarrow.",
    )
    export.add_argument("job", nargs="?", help="job id, or the beginning of one (default: the latest)")
    export.add_argument(
        "--format",
        choices=_FORMATS,
        help="format of the files (default: parquet, or csv where pyarrow is not installed)",
    )
    export.add_argument(
        "--last",
        type=last_seconds,
        default="all",
        metavar="AGE",
        help="how much of the job's end, such as 90s or 2h (default: all of the job)",
    )
    export.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder to write to; created if it is missing"
    )
    export.set_defaults(command=_export)


def _export(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch_agent.cli.stored import job_in, reading
    from commwatch_agent.report.table_export import export

    form = arguments.format or ("csv" if find_spec("pyarrow") is None else "parquet")
    with reading(config) as agent:
        written = export(agent, job_in(agent, arguments.job).job_id, arguments.out, form, arguments.last)
    for path, rows in written.items():
        print(line(f"{path}: {counted(rows, 'row')}"))
    return 0
