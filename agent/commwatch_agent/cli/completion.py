"""``commwatch completion``: print what completes the command line in a shell."""

from __future__ import annotations

import argparse
from typing import Any

from commwatch_agent.config import Config

SHELLS = ("bash", "zsh", "fish", "tcsh")
#: What an argument that names a job is called in the usage.
_JOBS = ("job", "job_a", "job_b")
#: By shell: what completes the name of a job, and the function for it.
_NAMES = {
    "bash": "_commwatch_jobs",
    "zsh": "_commwatch_jobs",
    "fish": "(commwatch jobs --names 2>/dev/null)",
    "tcsh": "`commwatch jobs --names`",
}
_FUNCTIONS = {
    "bash": '_commwatch_jobs() { compgen -W "$(commwatch jobs --names 2>/dev/null)" -- "$1"; }',
    "zsh": '_commwatch_jobs() { local -a names; names=(${(f)"$(commwatch jobs --names 2>/dev/null)"}); compadd -a names; }',
}


def add_parser(commands: Any, parser: argparse.ArgumentParser) -> None:
    """Add the command; ``parser`` is that of the whole command line."""
    completion = commands.add_parser(
        "completion",
        help="print the completion of commands, flags and jobs for a shell",
        description='Print a script that completes commands, flags and names of jobs in a shell. For bash: eval "$(commwatch completion bash)"',
    )
    completion.add_argument("shell", choices=SHELLS)
    completion.set_defaults(command=_completion, parser=parser, config=None, dir=None, state=None, host=None, port=None)


def _completion(_: Config, arguments: argparse.Namespace) -> int:
    import shtab

    _complete_jobs(arguments.parser)
    print(shtab.complete(arguments.parser, arguments.shell, preamble=_FUNCTIONS.get(arguments.shell, "")))
    return 0


def _complete_jobs(parser: argparse.ArgumentParser) -> None:
    """Let the completion of all commands ask for the names of jobs."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _complete_jobs(each)
        elif action.nargs != argparse.REMAINDER and str(action.metavar or action.dest).lower() in _JOBS:
            action.complete = _NAMES  # type: ignore[attr-defined]
