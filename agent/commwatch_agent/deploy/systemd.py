"""The unit of ``commwatch manifest systemd``, made from its template. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from string import Template

from commwatch_agent.deploy.templates import template


def unit(command: Sequence[str], *, name: str, user: str, group: str, memory: str, cpu: str) -> str:
    """Return the unit file.

    Args:
        command: command line of the agent, with its flags; the first word is an absolute path.
        name: name of the unit, and of its folders under ``/run`` and ``/var/lib``.
        user, group: account of the agent, and the group that trainers share their rings with.
        memory, cpu: limits for the agent, in systemd's notation: ``512M``, ``50%``.
    """
    started = " ".join(map(_word, command))
    return Template(template("systemd.service")).substitute(
        command=started, name=name, user=user, group=group, memory=memory, cpu=cpu
    )


def _word(text: str) -> str:
    """Return a word of a command line, quoted for systemd."""
    for special, written in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        text = text.replace(special, written)
    return f'"{text}"' if not text or any(letter in text for letter in " \t;'\"\\") else text
