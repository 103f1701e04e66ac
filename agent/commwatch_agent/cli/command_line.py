"""The command line. Exit codes (docs/commands.md): 0 success, 1 failure, 2 wrong usage, 3 incomplete, 130 Ctrl-C; ``run`` returns the job's exit code."""

from __future__ import annotations

import argparse
import io
import logging
import os
import signal
import sys
from typing import Any, NoReturn

from commwatch import __version__
from commwatch.wire.errors import CommwatchError
from commwatch_agent.cli import (
    agent,
    alerts,
    bench,
    common_flags,
    compare,
    completion,
    dashboards,
    deploy,
    diagnose,
    doctor,
    explain,
    export,
    jobs,
    native,
    profile,
    query,
    report,
    run,
    settings,
    timeline,
    top,
    whatif,
)
from commwatch_agent.config import REMOVED
from commwatch_agent.text.nearest import nearest
from commwatch_agent.text.terminal_text import OneLine, complain, guard_output, line

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
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command_name is None:
        parser.print_help()
        return 0
    log = logging.StreamHandler()
    log.setFormatter(OneLine("commwatch: %(message)s"))
    logging.basicConfig(handlers=[log], level=logging.INFO)
    try:
        if (user := getattr(arguments, settings.AS_USER, None)) is not None:
            settings.become(user)  # first, for which files are trusted depends on the user
        with common_flags.explained_if_deleted():
            code: int = arguments.command(common_flags.settings_of(arguments), arguments)
        sys.stdout.flush()
    except CommwatchError as error:
        complain(f"{_name(arguments)}: {error}" if error.names_command else str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
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

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is none of the choices, and suggest one that looks like it; Python does so from 3.14 on."""
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action, f"invalid choice: '{value}'{_like(value, choices)} (one of {', '.join(choices)})"
            )


class _Command(_Parser):
    """Parser of one command: reports unknown arguments itself, accepts flags between repeated positional arguments."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does; also accept repeated positional arguments that flags separate."""
        found, rest = super().parse_known_args(args, namespace)
        many = next((name for name in _MANY if name in found), None)
        if many is not None and not any(part.startswith("-") for part in rest):
            setattr(found, many, [*getattr(found, many), *rest])
        elif rest:
            flag = next((part.partition("=")[0] for part in rest if part.startswith("-")), "")
            instead = REMOVED.get(flag.removeprefix("--"))
            hint = f"; {instead}" if instead else _like(flag, [*self._option_string_actions])
            self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
        return found, []


def _like(given: str, known: list[str]) -> str:
    """Return a suggestion for a word that is not known; empty if no known one looks like it."""
    near = nearest(given, known, "--")
    return f"; did you mean {near}?" if near else ""


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="commwatch", description="Watch the communication of distributed training.")
    parser.add_argument("--version", action="version", version=f"commwatch {__version__}")
    commands: Any = parser.add_subparsers(dest="command_name", metavar="COMMAND", parser_class=_Command)
    starts, asks, reads = (
        common_flags.parser(listens=True), common_flags.parser(asks=True), common_flags.parser(),
    )  # fmt: skip
    for part, common in (
        (run, starts), (agent, starts), (report, asks), (jobs, asks), (compare, reads), (whatif, asks), (timeline, asks), (export, reads),
    ):  # fmt: skip
        part.add_parser(commands, common)
    explain.add_parser(commands)
    for part, common in (
        (doctor, asks), (diagnose, asks), (bench, reads), (query, asks), (profile, asks), (alerts, asks), (top, asks), (settings, starts),
        (deploy, starts),
    ):  # fmt: skip
        part.add_parser(commands, common)
    dashboards.add_parser(commands)
    native.add_parser(commands)
    completion.add_parser(commands, parser)
    return parser
