"""The unit of ``commwatch manifest systemd``, out of its template. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from string import Template


def unit(command: Sequence[str], *, name: str, user: str, group: str, memory: str, cpu: str) -> str:
    """The unit file.

    Args:
        command: what starts the agent, with its flags; its first word is an absolute path.
        name: of the unit, and of its folders under ``/run`` and ``/var/lib``.
        user, group: who the agent is, and with whom trainers share their rings.
        memory, cpu: the most it may have, as systemd writes them: ``512M``, ``50%``.
    """
    template = resources.files("commwatch.deploy").joinpath("systemd.service").read_text(encoding="utf-8")
    started = " ".join(map(_word, command))
    return Template(template).substitute(command=started, name=name, user=user, group=group, memory=memory, cpu=cpu)


def _word(text: str) -> str:
    """A word of a command line, as systemd reads it."""
    for special, written in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        text = text.replace(special, written)
    return f'"{text}"' if not text or any(letter in text for letter in " \t;'\"\\") else text
