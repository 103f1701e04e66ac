"""The scripts of ``commwatch manifest slurm``, made from templates. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from string import Template

from commwatch_agent.deploy.templates import template

#: The scripts, each with the file that it is written to.
FILES = {
    "prolog": "commwatch-prolog.sh",
    "epilog": "commwatch-epilog.sh",
    "task-prolog": "commwatch-task-prolog.sh",
    "job": "commwatch-job.sh",
}


class _Script(Template):
    """A template with ``@@`` for its fields, because shell scripts use ``$``."""

    delimiter = "@@"


@dataclass(frozen=True)
class Site:
    """What the scripts need to know of a cluster."""

    #: Folders on each node, created by root: ``run`` has one folder per job, ``state`` one per user.
    run: str
    state: str
    #: Folder to put in front of a trainer's ``PYTHONPATH``; empty: the job's script installs one, the others none.
    probe: str
    #: File of root from which the prolog derives the common token of a job's agents; empty: each agent has its own.
    secret: str
    #: Port on which the agents of a job reach each other; ``None``: they do not.
    port: int | None
    #: Slurm's program that expands lists of nodes.
    scontrol: str


def scripts(commwatch: str, agent_flags: Sequence[str], site: Site) -> dict[str, str]:
    """Return each of ``FILES`` as a script for POSIX ``sh``.

    Args:
        commwatch: absolute path of the program.
        agent_flags: flags of every agent, in addition to those for its folders.
    """
    agent = shlex.join([commwatch, "agent", *agent_flags])
    values = {"commwatch": commwatch, **asdict(site), "port": str(site.port or "")}
    words = {"agent": agent, **{name: shlex.quote(value) for name, value in values.items()}}
    node = _filled("node", words).rstrip()
    return {part: _filled(part, {**words, "node": node}) for part in FILES}


def _filled(part: str, words: dict[str, str]) -> str:
    return _Script(template(f"slurm-{part}.sh")).substitute(words)
