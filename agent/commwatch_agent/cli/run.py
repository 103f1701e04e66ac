"""``commwatch run``: run a job, watch it, and print a report at the end."""

from __future__ import annotations

import argparse
import os
from typing import Any

from commwatch.wire.errors import UsageError
from commwatch_agent.cli.report import again
from commwatch_agent.commands.nccl_debug import LEVELS
from commwatch_agent.config import Config
from commwatch_agent.config_sources import settings_file


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command."""
    run = commands.add_parser(
        "run",
        parents=[common],
        help="run a job and watch it: commwatch run -- torchrun ...",
        description="Run a job, watch it, and print a report at the end.",
    )
    run.add_argument(
        "--nccl-debug",
        choices=LEVELS,
        default="warn",
        help="value of NCCL_DEBUG for the job, if it is not set (default: warn); info also shows topology and NCCL's choices",
    )
    run.add_argument("job", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="command that starts the job")
    run.set_defaults(command=_run)


def _run(config: Config, arguments: argparse.Namespace) -> int:
    from commwatch_agent.commands.run import run

    command = arguments.job[1:] if arguments.job[:1] == ["--"] else arguments.job
    if not command:
        raise UsageError("no job given; use commwatch run -- torchrun ...")
    file = settings_file(os.environ, arguments.config)
    return run(config, file, command, os.environ, report_command=again(arguments), nccl_level=arguments.nccl_debug)
