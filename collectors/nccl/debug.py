"""Where NCCL's debug output goes: the settings in force, from the environment and NCCL's own files.

Runs inside the trainer, too: standard library only.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

#: Levels at which NCCL writes into its debug file; below, and for unknown words, it does not.
WRITING = ("WARN", "INFO", "ABORT", "TRACE")
_NAMES = ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")


def in_force(env: Mapping[str, str], etc: Path = Path("/etc/nccl.conf")) -> dict[str, str]:
    """The debug settings that NCCL would find: the environment wins over the user's file, that over the machine's."""
    own = env.get("NCCL_CONF_FILE") or (f"{env['HOME']}/.nccl.conf" if env.get("HOME") else "")
    found: dict[str, str] = {}
    for path in (etc, *([Path(own)] if own else [])):
        try:
            found.update(read_conf(path.read_text(encoding="utf-8", errors="replace")))
        except OSError:
            continue
    found.update({name: env[name] for name in _NAMES if name in env})
    return {name: value for name, value in found.items() if value}


def read_conf(text: str) -> dict[str, str]:
    """The debug settings in the text of an ``nccl.conf``."""
    pairs = (line.partition("=") for line in text.splitlines() if not line.lstrip().startswith("#"))
    return {name.strip(): value.strip() for name, equals, value in pairs if equals and name.strip() in _NAMES}


def file_of(settings: Mapping[str, str]) -> str | None:
    """The debug file's name with its ``%h`` and ``%p``; ``None`` where NCCL writes to standard output or not at all."""
    writes = settings.get("NCCL_DEBUG", "").upper() in WRITING
    return settings.get("NCCL_DEBUG_FILE") or None if writes else None


def expanded(name: str, pid: str, host: str | None = None) -> str:
    """A debug file's name as NCCL expands it; ``pid`` may be a pattern.

    >>> expanded("/logs/%h.%p", "42", "node1")
    '/logs/node1.42'
    """
    host = short_host() if host is None else host
    return re.sub("%[hp%]", lambda found: {"%h": host, "%p": pid, "%%": "%"}[found[0]], name)


def short_host() -> str:
    """The host's name as NCCL prints it: up to the first dot."""
    return socket.gethostname().partition(".")[0]


def own_file(env: Mapping[str, str]) -> str | None:
    """The debug file of this process, as a whole path."""
    name = file_of(in_force(env))
    return None if name is None else os.path.abspath(expanded(name, str(os.getpid())))  # noqa: PTH100 - keeps what a link names
