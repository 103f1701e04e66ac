"""Taking over what trainers leave: their files are read with care, their traces in a process of its own."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from commwatch.collectors.wire import others

#: Of a claim or a result; of a trace, packed: one of 50 steps has some ten megabytes.
_MOST_BYTES, _MOST_TRACE_BYTES = 65_536, 256 << 20


def read(path: Path) -> str | None:
    """What a rank has left; ``None`` where it has left nothing, or nothing that can be read."""
    try:
        return others.read(path, _MOST_BYTES).decode(errors="replace")
    except OSError:
        return None


def take(left: Path, kept: Path) -> None:
    """Move a trace to where it is kept; raises ``OSError``, also where it is too large or somebody else's."""
    hidden = kept.with_name(f".{kept.name}")
    try:
        with open(others.open_plain(left), "rb") as source, open(hidden, "wb") as target:
            about = os.fstat(source.fileno())
            others.check_owner(left, about)
            if about.st_size > _MOST_TRACE_BYTES:
                raise others.Refused(errno.EFBIG, f"larger than {_MOST_TRACE_BYTES} bytes", str(left))
            for _ in range(_MOST_TRACE_BYTES >> 20):  # it may grow meanwhile
                if not target.write(source.read(1 << 20)):
                    break
        hidden.replace(kept)
    finally:
        hidden.unlink(missing_ok=True)
    left.unlink(missing_ok=True)


def overlap(trace: Path, from_ns: int, until_ns: int, patience_s: float) -> dict[str, Any]:
    """What ``commwatch.watchers.trace_overlap`` says of a stretch of a trace (its ``Overlap``), or ``error``."""
    command = [sys.executable, "-m", "commwatch.watchers.trace_overlap", str(trace), str(from_ns), str(until_ns)]
    try:  # from / because the folder we were started in may hold modules named like ours
        done = subprocess.run(command, cwd="/", capture_output=True, timeout=patience_s, check=True)
        answer: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"error": f"reading the trace took more than {patience_s:.0f} s"}
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        return {"error": f"the trace cannot be read: {error}"}
    return answer
