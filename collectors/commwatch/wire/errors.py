"""The base of the errors that end a command or a request. Pure."""

from __future__ import annotations

from http import HTTPStatus

#: Exit code of a command whose answer is incomplete: an agent did not answer, or too little is known to decide.
INCOMPLETE = 3


class CommwatchError(Exception):
    """An error for the user; its text is one line that names what is wrong and the remedy.

    ``main`` of ``cli/command_line.py`` prints the text and returns ``exit_code``. ``server/problems.py`` returns the text with ``status``.
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
