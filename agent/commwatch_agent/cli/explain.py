"""``commwatch explain``: explain the debug output of NCCL and RCCL."""

from __future__ import annotations

import argparse
import gc
from typing import Any

from commwatch_agent.config import Config


def add_parser(commands: Any) -> None:
    """Add the command."""
    explain = commands.add_parser(
        "explain",
        help="explain NCCL_DEBUG output",
        description="Explain the debug output of NCCL and RCCL: topology, choices, and problems. "
        "Exit code 1 if it has errors.",
    )
    explain.add_argument(
        "logs",
        nargs="+",
        metavar="LOG",
        help="log files (also gzip, bzip2, xz, zip, tar), folders, globs, or - for standard input",
    )
    explain.add_argument("--json", action="store_true", help="print everything as JSON")
    explain.set_defaults(command=_explain, dir=None, state=None, config=None, host=None, port=None)


def _explain(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch_agent.commands.explain import explain

    gc.disable()  # this command creates no reference cycles, and collection costs a tenth of the time
    return explain(arguments.logs, arguments.json)
