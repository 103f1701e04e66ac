"""Small files of ``/proc`` and ``/sys``: one value each. What is not there, or what the kernel refuses to say, is ``None``."""

from __future__ import annotations

import os

from commwatch.collectors.wire.handlers import raised_by_handler

_MOST_BYTES = 4096


def text(path: str, most_bytes: int = _MOST_BYTES) -> str | None:
    """The words of a file; ``None`` where it cannot be read (EINVAL, too, is how a driver says that it does not know)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if raised_by_handler(error):
            raise
        return None
    try:
        return os.read(fd, most_bytes).decode("utf-8", "replace").strip()
    except OSError as error:
        if raised_by_handler(error):
            raise
        return None
    finally:
        os.close(fd)


def number(path: str, base: int = 10) -> int | None:
    """The number in a file; ``None`` too where there stands something else ("N/A (no PMA)", "Unknown")."""
    words = text(path)
    try:
        return None if words is None else int(words, base)
    except ValueError:
        return None


def of_process(pid: int, proc: str = "/proc") -> list[str]:
    """The fields of ``/proc/PID/stat`` from the state on; empty if it cannot be read."""
    words = text(f"{proc}/{pid}/stat") or ""  # its name is any bytes: the kernel cuts it anywhere
    return words.rpartition(")")[2].split()


def names(path: str) -> list[str]:
    """What lies in a folder, in order; nothing where there is none."""
    try:
        return sorted(entry.name for entry in os.scandir(path))
    except OSError as error:
        if raised_by_handler(error):
            raise
        return []
