"""Read small one-value files of ``/proc`` and ``/sys``. A missing file or an unknown value is ``None``."""

from __future__ import annotations

import os

from commwatch.wire.handlers import raised_by_handler

_MOST_BYTES = 4096


def text(path: str, most_bytes: int = _MOST_BYTES) -> str | None:
    """Return the stripped text of a file; ``None`` if it cannot be read (drivers return EINVAL for unknown values)."""
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
    """Return the number in a file; ``None`` if it cannot be read or holds other text ("N/A (no PMA)", "Unknown")."""
    content = text(path)
    try:
        return None if content is None else int(content, base)
    except ValueError:
        return None


def of_process(pid: int, proc: str = "/proc") -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the state on; empty if it cannot be read."""
    content = text(f"{proc}/{pid}/stat") or ""  # the process name may hold any bytes and be cut anywhere
    return content.rpartition(")")[2].split()


def names(path: str) -> list[str]:
    """Return the sorted names in a directory; empty if it cannot be read."""
    try:
        return sorted(entry.name for entry in os.scandir(path))
    except OSError as error:
        if raised_by_handler(error):
            raise
        return []
