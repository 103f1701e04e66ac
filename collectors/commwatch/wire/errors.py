"""The base of the errors that end a command or a request. Pure."""

from __future__ import annotations

from http import HTTPStatus

#: Exit code of a command whose answer is incomplete: an agent did not answer, or too little is known to decide.
INCOMPLETE = 3
#: What a command prints where the agent, or a package that it needs, is not installed.
ONLY_PROBE = "only the probe is installed here"
REMEDY = (
    "install commwatch in an environment of its own (`uv tool install`, `pipx install`), and use its commands: `commwatch run` records the jobs "
    "of every environment"
)


class CommwatchError(Exception):
    """An error for the user; its text is one line that names what is wrong and the remedy.

    ``main`` of ``cli/command_line.py`` prints the text and returns ``exit_code``. ``web/problems.py`` returns the text with ``status``.
    """

    #: Exit code of the command: 1 failure, 2 wrong usage.
    exit_code: int = 1
    #: Status of the HTTP response.
    status: HTTPStatus = HTTPStatus.INTERNAL_SERVER_ERROR
    #: The name of the command is printed before the text.
    names_command: bool = True


class UsageError(CommwatchError):
    """The command line or the request for a command is wrong; the text names the argument and a correct value."""

    exit_code = 2
