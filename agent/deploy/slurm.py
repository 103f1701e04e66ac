"""The scripts of ``commwatch manifest slurm``, out of their templates. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from importlib import resources
from string import Template

#: What there is, and the file that each is written to.
FILES = {
    "prolog": "commwatch-prolog.sh",
    "epilog": "commwatch-epilog.sh",
    "task-prolog": "commwatch-task-prolog.sh",
    "job": "commwatch-job.sh",
}


class _Script(Template):
    """Shell has its own use for ``$``."""

    delimiter = "@@"


def scripts(commwatch: str, agent_flags: Sequence[str], *, run: str, state: str, probe: str) -> dict[str, str]:
    """Each of ``FILES`` as a script for POSIX ``sh``.

    Args:
        commwatch: the program, as an absolute path.
        agent_flags: what every agent is started with, in front of where it keeps its things.
        run, state: folders on each node that root makes, with one in them for each job, for each user.
        probe: what goes in front of a trainer's ``PYTHONPATH``; empty: nothing.
    """
    agent = shlex.join([commwatch, "agent", *agent_flags])
    values = {"commwatch": commwatch, "run": run, "state": state, "probe": probe}
    words = {"agent": agent, **{name: shlex.quote(value) for name, value in values.items()}}
    node = _filled("node", words).rstrip()
    return {part: _filled(part, {**words, "node": node}) for part in FILES}


def _filled(part: str, words: dict[str, str]) -> str:
    text = resources.files("commwatch.deploy").joinpath(f"slurm-{part}.sh").read_text(encoding="utf-8")
    return _Script(text).substitute(words)
