"""Recorded ``/proc`` and ``/sys``: one text file a host, for a tree of links and colons is nothing for a repository.

A line is ``path = what the file says``, ``path -> where the link leads``, ``path !`` for a file that cannot be read, or ``path <<`` for
one of several lines, which end with a line of one dot. ``#`` begins a comment.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

HOSTS = Path(__file__).parent / "fixtures" / "host"


def unpack(name: str, at: Path) -> Path:
    """Lay the recorded host ``name`` out at ``at``; returns that."""
    lines = iter((HOSTS / f"{name}.txt").read_text(encoding="utf-8").splitlines())
    for line in lines:
        path, _, rest = line.partition(" ")
        if not line or line.startswith("#"):
            continue
        file = at / path
        file.parent.mkdir(parents=True, exist_ok=True)
        sign, _, value = rest.partition(" ")
        if sign == "->":
            file.symlink_to(value)
        elif sign == "!":
            file.mkdir()  # reading it fails, as EINVAL does
        elif sign == "<<":
            file.write_text("".join(f"{each}\n" for each in iter(lines.__next__, ".")))
        else:
            assert sign == "=", line
            file.write_text(f"{value}\n")
    return at


@contextmanager
def procfs(at: Path) -> Iterator[None]:
    """Counters, CPU and memory of the node are read from this ``/proc``."""
    before, psutil.PROCFS_PATH = psutil.PROCFS_PATH, str(at)
    try:
        yield
    finally:
        psutil.PROCFS_PATH = before


def say(tree: Path, path: str, value: object) -> None:
    """Change what a file says."""
    (tree / path).write_text(f"{value}\n")


def vanish(tree: Path, path: str) -> None:
    """Take something away, as when a device is pulled."""
    target = tree / path
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    else:
        target.unlink()
