"""The command line. Exit codes: 0 success, 1 failure, 2 wrong usage; ``run`` returns the job's exit code."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from typing import Any, NoReturn

from commwatch import __version__
from commwatch.cli import (
    agent,
    alerts,
    bench,
    common_flags,
    compare,
    dashboards,
    deploy,
    diagnose,
    doctor,
    explain,
    jobs,
    native,
    profile,
    query,
    report,
    run,
    settings,
    timeline,
    top,
)
from commwatch.core.errors import CommwatchError
from commwatch.core.terminal_text import OneLine, complain, guard_output, line

#: Positional arguments that take any number of values.
_MANY = ("agents", "logs", "parts")


def main(argv: list[str] | None = None) -> int:
    """Run ``commwatch`` with ``argv``; return the exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the parent process closed it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for the life of the process
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale without Unicode gets question marks, not a traceback
    guard_output()
    arguments = _parser().parse_args(argv)
    log = logging.StreamHandler()
    log.setFormatter(OneLine("commwatch: %(message)s"))
    logging.basicConfig(handlers=[log], level=logging.WARNING if getattr(arguments, "quiet", False) else logging.INFO)
    try:
        with common_flags.explained_if_deleted():
            code: int = arguments.command(common_flags.settings_of(arguments), arguments)
        sys.stdout.flush()
    except CommwatchError as error:
        complain(f"{_name(arguments)}: {error}" if error.names_command else str(error))
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _name(arguments: argparse.Namespace) -> str:
    """Return the name of the command, with its verb if it has any."""
    return " ".join(filter(None, (arguments.command_name, getattr(arguments, "command_verb", None))))


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, even if the quoted argument has line breaks."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and ``message``, and exit with code 2."""
        super().error(line(message))


class _Command(_Parser):
    """Parser of one command: reports unknown arguments itself, accepts flags between repeated positional arguments."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does; also accept repeated positional arguments that flags separate."""
        found, rest = super().parse_known_args(args, namespace)
        many = next((name for name in _MANY if name in found), None)
        if many is not None and not any(part.startswith("-") for part in rest):
            setattr(found, many, [*getattr(found, many), *rest])
        elif rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, []


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="commwatch", description="Watch the communication of distributed training.")
    parser.add_argument("--version", action="version", version=f"commwatch {__version__}")
    commands: Any = parser.add_subparsers(dest="command_name", metavar="COMMAND", required=True, parser_class=_Command)
    common = common_flags.parser()
    for part in (run, agent, report, jobs, compare, timeline):
        part.add_parser(commands, common)
    explain.add_parser(commands)
    for part in (doctor, diagnose, bench, query, profile, alerts, top, settings, deploy):
        part.add_parser(commands, common)
    dashboards.add_parser(commands)
    native.add_parser(commands)
    return parser
