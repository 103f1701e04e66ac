"""The flags that most commands have, and the settings that follow from them."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from commwatch.wire.errors import UsageError
from commwatch_agent.config import SETTINGS, Config
from commwatch_agent.config_sources import load
from commwatch_agent.model.durations import parse_last


def parser(*, listens: bool = False, asks: bool = False) -> argparse.ArgumentParser:
    """Return a parser of these flags, as a parent of the parsers of commands.

    Args:
        listens: the command starts an agent; the help of others does not show how one listens, though they accept it.
        asks: it sends requests to agents; the help of others does not show the credentials.
    """

    def shown(wanted: bool, text: str) -> str:
        return text if wanted else argparse.SUPPRESS

    common = argparse.ArgumentParser(add_help=False)
    places = common.add_argument_group("places")
    places.add_argument(
        "--dir",
        help="run directory shared by trainers and agent; also holds the history unless --state is given",
    )
    places.add_argument("--state", help="directory of the history (default: $XDG_STATE_HOME/commwatch)")
    places.add_argument(
        "--config", type=Path, help="settings file (default: $COMMWATCH_CONFIG, else ./commwatch.toml if it exists)"
    )
    access = common.add_argument_group("access")
    access.add_argument("--host", help=shown(listens, "address the agent listens on (default: 127.0.0.1)"))
    port = "port of the agent (default: 9477, or any free port if it is taken; 0: any free port)"
    access.add_argument("--port", type=int, help=shown(listens, port))
    access.add_argument(
        "--token-file", metavar="FILE",
        help=shown(listens or asks, "file with the agent's token (default: agent.token in its run directory)"),
    )  # fmt: skip
    reading = "the agent requires its token for reading, too"
    access.add_argument("--require-token", action="store_true", default=None, help=shown(listens, reading))
    beyond = "let the agent listen beyond this machine without TLS"
    access.add_argument("--insecure", action="store_true", default=None, help=shown(listens, beyond))
    ca = "CA certificates that agents are verified with (default: the system's)"
    access.add_argument("--ca-file", metavar="FILE", help=shown(listens or asks, ca))
    cert = "certificate with its key, for agents that require one"
    access.add_argument("--client-cert", metavar="FILE", help=shown(listens or asks, cert))
    return common


def add_node(command: argparse.ArgumentParser) -> None:
    """Add the flag of commands that show all nodes of a job by default, if the agent knows the agents of the others."""
    command.add_argument(
        "--node", action="store_true", help="only this node, from its history (default: all nodes that the agent knows)"
    )


def last_seconds(text: str) -> float | None:
    """Return the seconds in a ``--last`` argument; ``None``: the whole job."""
    try:
        return parse_last(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def settings_of(arguments: argparse.Namespace) -> Config:
    """Return the settings of a command; raise ``ConfigError`` if one is wrong."""
    with explained_if_deleted():  # here, too, as an agent reads its settings again
        return load(os.environ, arguments.config, **flags_of(arguments))


def flags_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that flags of the command gave; ``None``: not given."""
    return {key: getattr(arguments, key, None) for key, setting in SETTINGS.items() if setting.flag}


@contextlib.contextmanager
def explained_if_deleted() -> Iterator[None]:
    """Turn the error of a path relative to the current folder into ``UsageError`` if that folder was deleted."""
    try:
        yield
    except FileNotFoundError:
        try:
            Path.cwd()
        except FileNotFoundError:
            raise UsageError("the current folder was deleted; change to one that exists") from None
        raise
