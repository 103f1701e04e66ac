"""``commwatch completion``: print what completes the command line in a shell."""

from __future__ import annotations

import argparse
from typing import Any

from commwatch_agent.config import Config

SHELLS = ("bash", "zsh", "fish", "tcsh")


def add_parser(commands: Any, parser: argparse.ArgumentParser) -> None:
    """Add the command; ``parser`` is that of the whole command line."""
    completion = commands.add_parser(
        "completion",
        help="print the completion of commands and flags for a shell",
        description='Print a script that completes commands and flags in a shell. For bash: eval "$(commwatch completion bash)"',
    )
    completion.add_argument("shell", choices=SHELLS)
    completion.set_defaults(command=_completion, parser=parser, config=None, dir=None, state=None, host=None, port=None)


def _completion(_: Config, arguments: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(arguments.parser, arguments.shell))
    return 0
